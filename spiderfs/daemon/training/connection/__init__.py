"""How trainers and loaders are heard: the hook's socket, their connections, what waits, lists on their way."""
