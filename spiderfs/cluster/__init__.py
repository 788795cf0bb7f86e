"""Several nodes: the managers of their mounts tell each other rows, scores and plans, by streams of Redis."""
