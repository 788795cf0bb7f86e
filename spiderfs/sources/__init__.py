"""Sources: a directory, one in memory, one made slow; and the client by which all of spiderfs asks them."""
