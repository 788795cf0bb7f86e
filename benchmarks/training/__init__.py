"""Benchmarks of real trainings, through mounts or in one process."""
