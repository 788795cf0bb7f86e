"""Events: what workers and trainings report to the manager.

Of each open a worker writes an `Access`, a record of a fixed size, so that many are one write. What trainings report is
one record each: hints for a guided policy, and news of the plans of ranks. A trace stores them, and a replay repeats
them. (`Candidates` are in no trace: a replay that scores batches again has them, where a mount has found the hub.)
`job_dataset_id` names a job dataset (`policy.py`); in a trace it is the job dataset's number. In the news of plans
`rank` is the number of a trainer, and `epoch` that of an epoch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spiderfs.core.policy import Hub, Key

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


@dataclass(frozen=True, slots=True)
class Candidates:
    """The samples of a batch that may become its hub, the best first: that one does which is no hub yet."""

    job_dataset_id: str
    hubs: Sequence[Hub]


@dataclass(frozen=True, slots=True)
class Scored:
    """A job dataset has new scores, one for each of these different samples."""

    job_dataset_id: str
    keys: Sequence[Key]
    scores: Sequence[float]


@dataclass(frozen=True, slots=True)
class AtHand:
    """The bytes of this sample are at hand when the hub or the pins that come next are placed."""

    key: Key
    size: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The engine got another budget (`Engine.resize`)."""

    capacity_bytes: int
    landing_bytes: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A member left without the engine's doing: the store lost it, or the user evicted it."""

    key: Key


@dataclass(frozen=True, slots=True)
class Published:
    """Readers learned of the redirects that had changed."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio was set."""

    ratio: float


@dataclass(frozen=True, slots=True)
class Epoch:
    """The job of this job dataset ended an epoch; the accuracy is a share from 0 to 1, if it is known."""

    job_dataset_id: str
    accuracy: float | None = None


@dataclass(frozen=True, slots=True)
class Labels:
    """A job declared the list of this job dataset, with these labels."""

    job_dataset_id: str
    labels: Mapping[Key, int]


@dataclass(frozen=True, slots=True)
class Pinning:
    """A job pinned these samples, in place of those that it had pinned before."""

    job_dataset_id: str
    keys: Sequence[Key]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The job of this job dataset began its warm-up, or, if not `active`, ended it."""

    job_dataset_id: str
    active: bool


Hint = Scored | Hub | Candidates | Ratio | Epoch | Labels | Pinning | WarmUp | AtHand | Budget | Lost | Published


@dataclass(frozen=True, slots=True)
class Planned:
    """The rank reads these from `start` on, now or later (`begun` False); without keys it breaks its epoch off."""

    rank: int
    job_dataset_id: str
    epoch: int
    start: int
    begun: bool
    keys: Sequence[Key] | npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Progressed:
    """How many positions of the epoch were dispatched, and how many taken."""

    rank: int
    job_dataset_id: str
    epoch: int
    dispatched: int
    taken: int


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The rank exchanges samples, and dispatched these from a position on; those it had planned come later."""

    rank: int
    job_dataset_id: str
    epoch: int
    position: int
    keys: Sequence[Key] | npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The trainer has disconnected."""

    rank: int


RankNews = Planned | Progressed | Dispatched | Disconnected
