"""The commands of `spiderfs`, one module each; nothing but what a person types and sees."""
