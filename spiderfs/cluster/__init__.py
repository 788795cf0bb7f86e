"""Several nodes: managers send each other rows, scores and plans, and report that they are there, by streams of
Redis."""
