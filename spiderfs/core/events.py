"""What workers tell the manager: fixed-size records, so that a batch is one write."""

from __future__ import annotations

import struct
from functools import partial
from typing import NamedTuple

# How a sample came to its reader.
HIT = 0  # it was in the store
FETCHED = 1  # it was fetched from the source and put into landing
REFUSED = 2  # it was fetched, and landing had no room for it
UNSTORED = 3  # it was fetched, and the store could not take anything (the disk is full)
WARMED = 4  # it was fetched because the user asked for it, and nobody has opened it
OPENED = 5  # a trainer opened a large file; what it reads of it are accesses of their own, which name no trainer

ACCESS_RECORD = struct.Struct("<dQQQIIHB5x")
"""The fields of `Access`, in their order, as they go through a pipe."""


class Access(NamedTuple):
    """One access.

    `inode` is what was given, `wanted` what was asked for, `trainer` the number of the trainer that read it, or 0.
    `block` is 0 for a small file, n >= 1 for the n-th block of a large one; `pid` is the thread that asked, 0 where
    nobody did.
    """

    time_s: float
    inode: int
    wanted: int
    size: int
    block: int
    pid: int
    trainer: int
    where: int


# `Access._make` is Python, and takes three times as long; this is done for each open.
_access = partial(tuple.__new__, Access)


def unpacked(records: bytes) -> list[Access]:
    """The accesses of packed records; raises struct.error where that is no whole number of them."""
    return list(map(_access, ACCESS_RECORD.iter_unpack(records)))
