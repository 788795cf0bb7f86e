"""The store: contents of samples, blocks of large files, names; in LMDB and sparse files, or in memory."""
