"""The format of recorded traces."""
