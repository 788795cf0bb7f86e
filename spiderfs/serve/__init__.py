"""The daemon without a mount: requests come from a Unix socket in place of /dev/fuse (docs/howto/without-fuse.md)."""
