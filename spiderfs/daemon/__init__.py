"""The processes of a mount: supervisor, guard, worker, manager; and their messages."""
