"""Benchmarks of the engine and the scorer alone, without a mount."""
