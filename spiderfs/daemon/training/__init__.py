"""The manager's work for trainers: their messages, plans, scores of batches, redirects, pins."""
