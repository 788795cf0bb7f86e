"""Reusing partly augmented samples: how transforms are split, and where what they have made is kept."""
