"""The list of attached trainers: a file that the manager writes, and that workers and clients read.

The file is replaced as a whole, so a reader of it sees one list or the next (`editions.py` tells it which).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Attached(NamedTuple):
    """One attached trainer; `started` is the start time of its process in clock ticks.

    `course_numbers` are those of the courses whose stand-ins the trainer may be given: it has sent batches of their
    lists. `teaches` is whether there are such courses, or will be.
    """

    number: int
    pid: int
    started: int
    course_numbers: tuple[int, ...]
    teaches: bool


def publish_trainers(path: Path, trainers: Iterable[Attached]) -> None:
    """Write the list; if the disk is full, this raises OSError and the list is empty from then on."""
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(json.dumps(list(trainers)))
    except OSError:
        # An empty list is better than the old one: a trainer that has left must not be given stand-ins any more.
        path.unlink(missing_ok=True)
        raise
    temporary.rename(path)


def published_trainers(path: Path) -> list[Attached]:
    """The list as it is now; empty while there is no such file, or none that can be read."""
    try:
        rows = json.loads(path.read_text())
        return [Attached(number, pid, since, tuple(taught), teaches) for number, pid, since, taught, teaches in rows]
    except (OSError, ValueError):
        return []
