"""The commands of `spiderfs`, one module each."""
