"""The lists of trainers: what a trainer declares, the files that it means, and in which order they will be read."""
