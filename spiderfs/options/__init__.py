"""All options of a mount: the table that lists them, and the parsers for option strings, sizes, times and paths."""
