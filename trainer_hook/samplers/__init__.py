"""Samplers that draw by what is learned, or by what is cached."""
