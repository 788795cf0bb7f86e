"""Partly augmented samples in the cache: their section, and whose turn it is to use one."""
