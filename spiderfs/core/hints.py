"""What trainings tell, one record for each: hints for a guided policy, and news of the plans of ranks.

A trace stores them, and a replay repeats them. (`Candidates` are in no trace: a replay that scores batches anew has
them, where a mount has found the hub.) `course_id` names a course (`guided.py`); in a trace it is the course's number.
In the news of plans `rank` is the number of a trainer, and `epoch` that of an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spiderfs.core.policy import Key


@dataclass(frozen=True, slots=True)
class Hub:
    """A sample that can stand in for its neighbours."""

    key: Key
    course_id: str
    neighbours: Sequence[Key]
    """Samples of the same list with the same label, nearest first."""
    distances: Sequence[float]
    """The distance from the hub to each neighbour, between embeddings of length 1."""

    def __post_init__(self) -> None:
        if len(self.neighbours) != len(self.distances):
            raise ValueError("a hub needs the distance of each neighbour")

    def shortened(self, length: int | None) -> Hub:
        """A copy of this hub with its `length` nearest neighbours (None: all), each once, and never the hub itself."""
        near: dict[Key, float] = {}
        for key, distance in zip(self.neighbours, self.distances, strict=True):
            if len(near) == length:
                break
            if key != self.key:
                near.setdefault(key, distance)
        return Hub(self.key, self.course_id, tuple(near), tuple(near.values()))


@dataclass(frozen=True, slots=True)
class Candidates:
    """The samples of a batch that may become its hub, the best first: that one does which is no hub yet."""

    course_id: str
    hubs: Sequence[Hub]


@dataclass(frozen=True, slots=True)
class Scored:
    """A course has new scores, one for each of these different samples."""

    course_id: str
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
    """The job of this course ended an epoch; the accuracy is a share from 0 to 1, if it is known."""

    course_id: str
    accuracy: float | None = None


@dataclass(frozen=True, slots=True)
class Labels:
    """A job declared the list of this course, with these labels."""

    course_id: str
    labels: Mapping[Key, int]


@dataclass(frozen=True, slots=True)
class Pinning:
    """A job pinned these samples, in place of those that it had pinned before."""

    course_id: str
    keys: Sequence[Key]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The job of this course began its warm-up, or, if not `active`, ended it."""

    course_id: str
    active: bool


Hint = Scored | Hub | Candidates | Ratio | Epoch | Labels | Pinning | WarmUp | AtHand | Budget | Lost | Published


@dataclass(frozen=True, slots=True)
class Planned:
    """The rank will read these samples in this epoch, from position `start` on: from now on, or later (`begun` False).

    Without samples the rank breaks the epoch off that it has begun.
    """

    rank: int
    course_id: str
    epoch: int
    start: int
    begun: bool
    keys: Sequence[Key] | npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Progressed:
    """How many positions of the epoch were dispatched, and how many taken."""

    rank: int
    course_id: str
    epoch: int
    dispatched: int
    taken: int


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The rank exchanges samples, and dispatched these from a position on; those it had planned come later."""

    rank: int
    course_id: str
    epoch: int
    position: int
    keys: Sequence[Key] | npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The trainer has disconnected."""

    rank: int


RankNews = Planned | Progressed | Dispatched | Disconnected
