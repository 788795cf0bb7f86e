"""The kernel's protocol: takes requests, calls the file system, turns its answers and errors into replies."""
