"""The measurements of `spiderfs profile` beside a mount, and the partition of a cache that follows."""
