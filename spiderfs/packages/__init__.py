"""Packages: many small samples in one file at the source."""
