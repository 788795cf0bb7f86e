"""What ranks tell of their plans, one record for each; a trace stores them, and a replay follows the plans again.

`rank` is the number of a trainer and `course_id` names the course of its list (`core/guided.py`); in a trace it is the
course's number. `epoch` is the number of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spiderfs.core.policy import Key


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
