"""Hints: what trainings tell a guided policy, one record for each. A trace stores them, and a replay repeats them.

`list_id` identifies a list that trainers declared (`guided.py`); in a trace it is the list's number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spiderfs.core.policy import Key


@dataclass(frozen=True, slots=True)
class Hub:
    """A sample that can stand in for its neighbours."""

    key: Key
    list_id: str
    neighbours: Sequence[Key]
    """Samples of the same list with the same label, nearest first."""
    distances: Sequence[float]
    """The distance from the hub to each neighbour, between embeddings of length 1."""

    def __post_init__(self) -> None:
        if len(self.neighbours) != len(self.distances):
            raise ValueError("a hub needs the distance of each neighbour")

    def shortened(self, length: int) -> Hub:
        """A copy of this hub with at most `length` neighbours: the nearest, each once, and never the hub itself."""
        near: dict[Key, float] = {}
        for key, distance in zip(self.neighbours, self.distances, strict=True):
            if len(near) == length:
                break
            if key != self.key:
                near.setdefault(key, distance)
        return Hub(self.key, self.list_id, tuple(near), tuple(near.values()))


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample got a new score."""

    key: Key
    score: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio was set."""

    ratio: float


@dataclass(frozen=True, slots=True)
class Epoch:
    """A trainer began an epoch."""


@dataclass(frozen=True, slots=True)
class Labels:
    """A trainer declared this list, with these labels."""

    list_id: str
    labels: Mapping[Key, int]


@dataclass(frozen=True, slots=True)
class Pinning:
    """A trainer pinned these samples of a list, in place of those that it had pinned before."""

    list_id: str
    keys: Sequence[Key]


Hint = Scored | Hub | Ratio | Epoch | Labels | Pinning
