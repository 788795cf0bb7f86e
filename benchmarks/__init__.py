"""Measurements, each run as a module of its room; `--help` says what it measures."""
