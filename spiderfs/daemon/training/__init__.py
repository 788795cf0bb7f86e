"""What the manager does about trainers: hears them, scores batches, publishes redirects, pins."""
