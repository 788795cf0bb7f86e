"""The way to the daemon of a mount: finding it, the client, the job, and what is published to each daemon."""
