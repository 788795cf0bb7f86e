"""The connection to the daemon of a mount: finding it, the client, the job, and lists."""
