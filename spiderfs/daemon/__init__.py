"""The processes of a mount: supervisor, guard, worker, manager; and what they say to each other."""
