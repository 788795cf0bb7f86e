"""What trainings report, one record for each: hints for a guided policy, and news of the plans of ranks.

A trace stores them, and a replay repeats them. (`Candidates` are in no trace: a replay that scores batches again has
them, where a mount has found the hub.) `job_dataset_id` names a job dataset (`policy.py`); in a trace it is the job
dataset's number. In the news of plans `rank` is the number of a trainer, and `epoch` that of an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spiderfs.core.policy import Hub, Key


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
    """The rank will read these samples in this epoch, from position `start` on: from now on, or later (`begun` False).

    Without samples the rank breaks the epoch off that it has begun.
    """

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
