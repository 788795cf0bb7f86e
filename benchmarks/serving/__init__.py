"""Benchmarks of a mount as readers see it."""
