"""The parts that policies are made of: sections of importance and homophily, pins."""
