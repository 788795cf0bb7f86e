"""The manager's work on the cache: it keeps and drops records, warms, fetches ahead, measures the source."""
