"""The commands of `spiderfs`, one module each: they read what a person types and print what a person sees."""
