"""The names of extents: whole pages of a large file that stand in lists as samples do (`sources/ranges.py`)."""

from __future__ import annotations

import re
from typing import NamedTuple

DIRECTORY = b".@ranges/"
PAGE_BYTES = 4096
_EXTENT = re.compile(rb"(.+)\.@ranges/([0-9]{1,19})-([0-9]{1,19})", re.DOTALL)


class Extent(NamedTuple):
    """The bytes of a file from `begin` up to `end`."""

    file: bytes
    begin: int
    end: int

    @property
    def path(self) -> bytes:
        return b"%s%s%d-%d" % (self.file, DIRECTORY, self.begin, self.end)


def extent_of(path: bytes) -> Extent | None:
    """The extent that a path names; None for any other path."""
    found = _EXTENT.fullmatch(path) if DIRECTORY in path else None
    return None if found is None else Extent(found[1], int(found[2]), int(found[3]))


def file_of(path: bytes) -> bytes:
    """The file whose extent a path names; the path itself if it names none."""
    extent = extent_of(path)
    return path if extent is None else extent.file
