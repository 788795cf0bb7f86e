"""The forms of cached samples: the law that splits a cache among them, and profiles."""
