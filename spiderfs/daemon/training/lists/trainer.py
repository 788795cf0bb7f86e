"""A trainer as the daemon knows it: which process it is, and which lists it has declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from spiderfs.protocol import Hello

Oldest = Callable[[npt.NDArray[np.uint32], int], npt.NDArray[np.int64] | None]
"""Chooses that many of the rows of waiting batches with these samples, or none of them if it does not know them all."""


@dataclass(frozen=True)
class Declared:
    """What became of a list that was declared: how many of its paths are unknown, and what the trainer should know."""

    unknown: int = 0
    warnings: Sequence[str] = ()
    oldest: Oldest | None = field(default=None, compare=False)
    """Chooses among rows of batches of the list that wait; nobody hears of the others. None if all have to wait."""


@dataclass(eq=False)
class Trainer:
    """`pid` and `uid` come from the kernel (SO_PEERCRED); the pid is 0 for a process of a foreign pid namespace."""

    pid: int
    uid: int
    hello: Hello
    lists: dict[str, int] = field(default_factory=dict)
    """The number of samples of each list that was declared, by its name."""
    batches: int = 0

    @property
    def rank(self) -> int:
        return self.hello.rank

    @property
    def job_id(self) -> str:
        return self.hello.job
