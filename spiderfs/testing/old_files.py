"""Files whose mtime lies in the past, as those of a real data set do."""

from __future__ import annotations

import os
from pathlib import Path

AN_HOUR_S = 3600.0


def make_older(path: str | bytes | Path, by_s: float = AN_HOUR_S) -> None:
    """Move a file's mtime into the past, since spiderfs keeps nothing of a file that may still be written to."""
    mtime_ns = os.lstat(path).st_mtime_ns - int(by_s * 1e9)
    os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
