"""Several nodes: managers tell each other of rows, scores and plans, and that they are there, by streams of Redis."""
