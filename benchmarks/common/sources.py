"""Files that a benchmark makes to be read through mounts."""

from __future__ import annotations

from pathlib import Path

from spiderfs.testing import make_older


def write(path: Path, content: bytes) -> None:
    """Write a file and make it old enough to be cached."""
    path.write_bytes(content)
    make_older(path)
