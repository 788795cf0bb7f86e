"""Buckets as sources: what object stores have in common, and what Amazon's, Google's and Microsoft's have alone."""
