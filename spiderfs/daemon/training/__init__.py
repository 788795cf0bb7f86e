"""The manager's work for trainers: it hears them, follows plans, scores batches, publishes redirects, pins."""
