"""What the manager does about the cache: keeps and drops records, warms, fetches ahead, measures the source."""
