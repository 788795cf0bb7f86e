"""How trainers and loaders connect: the hook's socket, their connections, queued messages, lists that are declared."""
