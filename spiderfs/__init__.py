"""spiderfs: a read-only FUSE mount that caches remote training data."""

__version__ = "0.1.0"
