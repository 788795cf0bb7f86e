"""Files that benchmarks and tests make to be read through mounts."""

from __future__ import annotations

import os
import random
from pathlib import Path

# The name of every bucket that is made for a run.
BUCKET = "bucket"
# What large files and objects are made of, again and again. It is longer than a block of the store (1 MiB), and of odd
# length: no two blocks, or pages, of a file are the same, so that swapped ones are noticed.
_PATTERN = random.Random(0).randbytes((1 << 20) + 4099)


def patterned(begin: int, end: int) -> bytes:
    """The bytes of any large file from one place to another."""
    at = begin % len(_PATTERN)
    return (_PATTERN * (1 + (at + end - begin) // len(_PATTERN)))[at : at + end - begin]


def write_patterned(path: Path, size: int) -> None:
    """Write a large file, whose bytes are those of `patterned`, and make it old enough to be cached."""
    with open(path, "wb") as file:
        for begin in range(0, size, 1 << 20):
            file.write(patterned(begin, min(begin + (1 << 20), size)))
    make_older(path)


def write(path: Path, content: bytes) -> None:
    """Write a file and make it old enough to be cached."""
    path.write_bytes(content)
    make_older(path)


def make_older(path: str | bytes | Path, by_s: float = 3600.0) -> None:
    """Move a file's mtime into the past, since spiderfs keeps nothing of a file that may still be written to."""
    mtime_ns = os.lstat(path).st_mtime_ns - int(by_s * 1e9)
    os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
