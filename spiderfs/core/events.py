"""What workers tell the manager: fixed-size records, so that a batch is one write and one numpy view."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# How a sample came to its reader.
HIT = 0  # it was in the store
FETCHED = 1  # it was fetched from the source and put into landing
REFUSED = 2  # it was fetched, and landing had no room for it
UNSTORED = 3  # it was fetched, and the store could not take anything (the disk is full)
WARMED = 4  # it was fetched because the user asked for it, and nobody has opened it
OPENED = 5  # a trainer opened a large file; what it reads of it are accesses of their own, which name no trainer

# One access. `inode` is what was given, `wanted` what was asked for, `trainer` the number of the trainer that read it,
# or 0. `block` is 0 for a small file, n >= 1 for the n-th block of a large one; `pid` is the thread that asked,
# 0 where nobody did.
ACCESS = np.dtype(
    [
        ("time_s", "<f8"),
        ("inode", "<u8"),
        ("wanted", "<u8"),
        ("size", "<u8"),
        ("block", "<u4"),
        ("pid", "<u4"),
        ("trainer", "<u2"),
        ("where", "u1"),
        ("pad", "u1", (5,)),
    ]
)
assert ACCESS.itemsize == 48


class Access(NamedTuple):
    """One record of ACCESS."""

    time_s: float
    inode: int
    wanted: int
    size: int
    block: int
    pid: int
    trainer: int
    where: int
    pad: Any = None


def accesses(events: npt.NDArray[np.void]) -> list[Access]:
    """The records of an array of ACCESS."""
    return [Access._make(record) for record in events.tolist()]
