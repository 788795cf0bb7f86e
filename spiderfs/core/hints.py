"""What training tells a policy, each as one record: traces keep them, and replays give them to policies again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spiderfs.core.policy import Key


@dataclass(frozen=True, slots=True)
class Hub:
    key: Key
    dataset: str
    neighbours: Sequence[Key]
    """Samples of the same label in the same dataset, nearest first."""
    distances: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.neighbours) != len(self.distances):
            raise ValueError("a hub needs the distance of each neighbour")

    def shortened(self, length: int) -> Hub:
        """This hub with its nearest neighbours only, each once and itself not among them."""
        near: dict[Key, float] = {}
        for key, distance in zip(self.neighbours, self.distances, strict=True):
            if len(near) == length:
                break
            if key != self.key:
                near.setdefault(key, distance)
        return Hub(self.key, self.dataset, tuple(near), tuple(near.values()))


@dataclass(frozen=True, slots=True)
class Scored:
    key: Key
    score: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of the sections, as it was set."""

    ratio: float


@dataclass(frozen=True, slots=True)
class Epoch:
    """A trainer began one."""


@dataclass(frozen=True, slots=True)
class Labels:
    """A trainer declared this list."""

    dataset: str
    labels: Mapping[Key, int]


@dataclass(frozen=True, slots=True)
class Pinning:
    """A trainer had these samples of a dataset held, and no others of it."""

    dataset: str
    keys: Sequence[Key]


Hint = Scored | Hub | Ratio | Epoch | Labels | Pinning
