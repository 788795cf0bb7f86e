"""Files that a benchmark makes to be read through mounts."""

from __future__ import annotations

import os
import time
from pathlib import Path

_AGE_S = 3600.0


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    make_older(path)


def make_older(path: Path) -> None:
    """Make a file an hour old, since spiderfs keeps nothing of a file that may still be written (docs/SEMANTICS.md)."""
    then = time.time() - _AGE_S
    os.utime(path, (then, then))
