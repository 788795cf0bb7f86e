"""What jobs learn about their lists: job datasets in memory, scores of batches, pins, redirects, accounts."""
