"""A short list, as a trainer declares it and as the manager has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spiderfs.daemon.training.known_list import KnownList
from spiderfs.daemon.training.trainer import SampleList, SamplePaths


def sample_list(count: int, name: str = "train") -> SampleList:
    paths = SamplePaths(b"".join(b"%03d\0" % number for number in range(count)))
    return SampleList(name, name, paths, np.arange(count, dtype=np.int32) % 2)


def known_list(number: int, inodes: list[int], directory: Path = Path("/nonexistent")) -> KnownList:
    """A list whose digest says its number."""
    files = np.array(inodes, np.uint64)
    return KnownList(number, f"digest {number}", sample_list(len(inodes)), files, directory)
