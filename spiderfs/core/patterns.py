"""Paths and globs as a person writes them: `train/cat`, `train/*/0*.png`, `**/*.jpg`.

`*`, `?` and `[...]` match within one name (fnmatch(3)), `**` any number of names. A pattern that names a directory
means everything below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


class Pattern:
    """`text` is relative to the mount's root, or begins with the mount point."""

    def __init__(self, text: bytes, mountpoint: bytes) -> None:
        path = text.strip()
        if path == mountpoint or path.startswith(mountpoint.rstrip(b"/") + b"/"):
            path = path[len(mountpoint) :]
        # surrogateescape keeps every byte, and fnmatch takes strings
        self._parts = [part.decode(errors="surrogateescape") for part in path.split(b"/") if part not in (b"", b".")]

    def matches(self, path: bytes) -> bool:
        """Whether the pattern means this file, itself or by one of its directories."""
        return _leads_to(self._parts, _split(path))

    def may_match_below(self, directory: bytes) -> bool:
        """Whether any file below this directory could match; False prunes a walk."""
        return _may_go_on(self._parts, _split(directory))


def _split(path: bytes) -> list[str]:
    return path.decode(errors="surrogateescape").split("/") if path else []


def _leads_to(pattern: Sequence[str], path: Sequence[str]) -> bool:
    if not pattern:
        return True
    if pattern[0] == "**":
        if len(pattern) == 1:
            return True
        return any(_leads_to(pattern[1:], path[start:]) for start in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _leads_to(pattern[1:], path[1:])


def _may_go_on(pattern: Sequence[str], directory: Sequence[str]) -> bool:
    for part, name in zip(pattern, directory, strict=False):
        if part == "**":
            return True
        if not fnmatchcase(name, part):
            return False
    return True
