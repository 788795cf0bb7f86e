"""The parts that several benchmarks share: sources, mounts, readers, and the one way to write results."""
