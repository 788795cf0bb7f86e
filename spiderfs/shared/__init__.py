"""Formats and paths on which several processes, or several rooms, have to agree."""
