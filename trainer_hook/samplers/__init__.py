"""Samplers that draw by scores, by losses, or by the state of the cache."""
