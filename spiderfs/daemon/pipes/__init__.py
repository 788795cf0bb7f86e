"""The pipes by which workers, and readers around FUSE, tell the manager of opens."""
