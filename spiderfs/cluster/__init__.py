"""One training on several nodes: the managers of its mounts tell each other rows and scores, by a stream of Redis."""
