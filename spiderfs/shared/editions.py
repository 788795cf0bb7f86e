"""Telling whether a file that another process replaces is still the one that was read last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Edition(NamedTuple):
    """Two files that were published one after the other differ in one of these at least.

    The time alone does not tell: the kernel's clock for it stands still for up to 4 ms (CONFIG_HZ=250), and goes back
    when the machine's clock is set back. Nor does the inode alone, which may be used again, or be written to in place.
    """

    mtime_ns: int
    inode: int
    size: int


def edition_of(path: Path) -> Edition | None:
    """None: there is no file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return Edition(found.st_mtime_ns, found.st_ino, found.st_size)
