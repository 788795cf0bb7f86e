"""What trainings feed the cache: scores, worths, hubs, the ratio of the sections, which samples were served."""
