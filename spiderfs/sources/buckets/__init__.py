"""Buckets as sources: the common part of object stores, and those of Amazon, Google and Microsoft."""
