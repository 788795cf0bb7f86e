"""Files that benchmarks and tests make to be read through mounts."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Write a file and make it old enough to be cached."""
    path.write_bytes(content)
    make_older(path)


def make_older(path: str | bytes | Path, by_s: float = 3600.0) -> None:
    """Move a file's mtime into the past, since spiderfs keeps nothing of a file that may still be written to."""
    mtime_ns = os.lstat(path).st_mtime_ns - int(by_s * 1e9)
    os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
