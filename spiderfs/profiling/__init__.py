"""What `spiderfs profile` measures beside a mount, and what follows from it for the partition of a cache."""
