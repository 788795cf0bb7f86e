"""Every option of a mount: the one table of them, and how words, sizes, times and paths are read."""
