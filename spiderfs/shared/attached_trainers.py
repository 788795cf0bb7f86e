"""The list of attached trainers: a file that the manager writes, and that workers and clients read.

The file is replaced as a whole, so a reader of it sees one list or the next; the file's edition says which.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Edition(NamedTuple):
    """Shows whether a file that another process replaces is still the one that was read last.

    Two files that were published one after the other differ in one of these values at least.

    The time alone is not enough: the kernel's clock for it stands still for up to 4 ms (CONFIG_HZ=250), and goes back
    when the machine's clock is set back. Nor does the inode alone, which may be used again, or be written to in place.
    """

    mtime_ns: int
    inode: int
    size: int


def edition_of(path: Path) -> Edition | None:
    """The edition of a file; None if there is no file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return Edition(found.st_mtime_ns, found.st_ino, found.st_size)


class Attached(NamedTuple):
    """One attached trainer; `started` is the start time of its process in clock ticks.

    `job_dataset_numbers` are those of the job datasets whose substitutes the trainer may be given: it has sent batches
    of their lists. `sends_batches` is whether there are such job datasets, or will be.
    """

    number: int
    pid: int
    started: int
    job_dataset_numbers: tuple[int, ...]
    sends_batches: bool


def publish_trainers(path: Path, trainers: Iterable[Attached]) -> None:
    """Write the list; if the disk is full, this raises OSError and the list is empty from then on."""
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(json.dumps(list(trainers)))
    except OSError:
        # An empty list is better than the old one: a trainer that has left must not be given substitutes any more.
        path.unlink(missing_ok=True)
        raise
    temporary.rename(path)


def published_trainers(path: Path) -> list[Attached]:
    """The list as it is now; empty while there is no such file, or none that can be read."""
    try:
        rows = json.loads(path.read_text())
        return [
            Attached(number, pid, since, tuple(learned), sends_batches)
            for number, pid, since, learned, sends_batches in rows
        ]
    except (OSError, ValueError):
        return []
