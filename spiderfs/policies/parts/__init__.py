"""The parts that policies are made of: the section of importance, the two parts of ImPACT's cache, pins."""
