"""Events: the reports of workers to the manager about each open. A record has a fixed size, so that many events are one
write."""

from __future__ import annotations

import struct
from functools import partial
from typing import NamedTuple

# The values of `Access.where`: where the bytes came from, and what became of them.
HIT = 0  # the store had the sample
FETCHED = 1  # the sample was fetched from the source and put into landing
REFUSED = 2  # the sample was fetched, and landing had no room for it
UNSTORED = 3  # the sample was fetched, and the store could not take anything (the disk is full)
WARMED = 4  # the sample was fetched because the user asked for it; no one has opened it
OPENED = 5  # a trainer opened a large file; its reads of blocks are accesses of their own, which name no trainer
UNSEEN = 6  # a trainer got the sample from the kernel's memory; no worker says so, the manager finds out by the plan
FORGOTTEN = 7  # no access: the kernel was made to forget all names, and the pages of files that no one has open
UNREPORTED = 8  # a trainer took the sample before any worker knew the trainer: no one knows how it was read
# With this bit, no one has opened the sample: the mount had the kernel read it ahead. The other bits are as above, or
# all of them are set if it could not be read.
PUSHED = 16
UNREAD = 15
FROM_THE_SOURCE = (FETCHED, REFUSED, UNSTORED)

ACCESS_RECORD = struct.Struct("<dQQQIIHBIx")
"""The bytes of one `Access` in a pipe: its fields, in their order, and padding."""


class Access(NamedTuple):
    """One access to a sample, or to a block of a large file.

    `wanted` is the inode that the reader asked for, and `inode` the one whose bytes it got. `trainer` is the number of
    the trainer that read, or 0. `block` is 0 for a sample and n >= 1 for the n-th block of a large file. `pid` is the
    thread that asked, or 0 if the mount fetched of itself. `waited_us` is how long the reader of a sample has waited
    for the source.
    """

    time_s: float
    inode: int
    wanted: int
    size: int
    block: int
    pid: int
    trainer: int
    where: int
    waited_us: int = 0


# `Access._make` is Python code and takes three times as long; every open is unpacked here.
_access = partial(tuple.__new__, Access)


def unpacked(records: bytes) -> list[Access]:
    """The accesses in packed records; raises struct.error if the bytes are not a whole number of records."""
    return list(map(_access, ACCESS_RECORD.iter_unpack(records)))
