"""Services of Linux that Python does not offer: mounts, locks of byte ranges, the process table, worker threads."""
