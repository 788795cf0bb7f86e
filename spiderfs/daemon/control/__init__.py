"""What the manager answers for control files, and the channel by which workers ask for it."""
