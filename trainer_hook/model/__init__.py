"""What a model makes of each sample: its classifier's input and losses, and which samples a forward pass is of."""
