"""In which forms a mount keeps its samples: the law that splits a cache among them, and what a profile has found."""
