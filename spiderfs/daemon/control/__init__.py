"""The manager's answers for control files, and the channel by which workers ask for them."""
