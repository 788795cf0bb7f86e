"""Reusing partly augmented samples: how transforms are split, and where their output is kept."""
