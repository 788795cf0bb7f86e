"""The manager's work for trainers: it hears them, scores batches, publishes redirects, pins."""
