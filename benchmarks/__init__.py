"""Measurements, each run as `.venv/bin/python -m benchmarks.ROOM.NAME`; `--help` says what it measures."""
