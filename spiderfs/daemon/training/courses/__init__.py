"""What jobs learn about their lists: courses in memory, scores of batches, pins, redirects, accounts."""
