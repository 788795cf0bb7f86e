"""What Linux offers and Python does not: mounts, locks of byte ranges, the process table, worker threads."""
