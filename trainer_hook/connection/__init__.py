"""The way to the daemon of a mount: finding it, the client, the job, and what each daemon has to be told."""
