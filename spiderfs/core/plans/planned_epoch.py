"""The plan of one epoch of one reader, and which of its positions are pending.

A **position** is the number of a draw in its epoch. A position is **pending** until the reader opens its sample for it.
It is **served** if its sample waits for the reader outside of the cache (in the kernel's pages, or as a partial
sample); then the cache need not keep the sample for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from spiderfs.core.policy import Key

Numbers = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class PlannedEpoch:
    """The draws of one epoch of one reader. Making this object costs a sort; any thread may do it.

    A sample is named by its index in the list.
    """

    number: int
    keys: Sequence[Key]
    """The file of each sample of the list; 0 if it is not known."""
    index_of: Mapping[Key, int]
    """The index of each file's sample."""
    order: Numbers
    """The index of the sample at each position of the epoch."""
    following: Numbers = field(init=False)
    """For each position the next position of the same sample, or the number of positions if there is none."""
    head: Numbers = field(init=False)
    """For each sample its first pending position, or the number of positions if none is pending."""
    start: int = 0
    """The position at which the reader begins."""
    repeats: bool = field(init=False)
    """Whether a sample is drawn more than once."""
    _served: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        total = len(self.order)
        rest = self.order[self.start :]
        by_sample = (np.argsort(rest, kind="stable") + self.start).astype(np.uint32)
        sorted_samples = self.order[by_sample]
        again = sorted_samples[1:] == sorted_samples[:-1]
        following = np.full(total, total, np.uint32)
        following[by_sample[:-1][again]] = by_sample[1:][again]
        head = np.full(len(self.keys), total, np.uint32)
        if len(rest):
            first = np.concatenate(([True], ~again))
            head[sorted_samples[first]] = by_sample[first]
        object.__setattr__(self, "repeats", bool(again.any()))
        object.__setattr__(self, "following", following)
        object.__setattr__(self, "head", head)

    def __len__(self) -> int:
        return len(self.order)

    def next_position(self, key: Key) -> int | None:
        """The first pending position of a file's sample; None if there is none, or if the list lacks the file."""
        sample = self.index_of.get(key)
        if sample is None:
            return None
        position: int = self.head.item(sample)
        return position if position < len(self.order) else None

    def next_use(self, key: Key) -> int | None:
        """The first pending position of a file's sample that is not served; None as for `next_position`."""
        position = self.next_position(key)
        while position in self._served:
            position = self.following.item(position)
        return position if position is not None and position < len(self.order) else None

    def serve(self, position: int) -> Key | None:
        """Note that a position is served. Returns the file of the sample; None if the position is not pending."""
        if not self.pending(position):
            return None
        self._served.add(position)
        return self.key(position)

    def unserve(self, position: int) -> Key:
        """Note that a position is not served any more. Returns the file of the sample."""
        self._served.discard(position)
        return self.key(position)

    def is_served(self, position: int) -> bool:
        return position in self._served

    def pending(self, position: int) -> bool:
        """Whether no open has used up this position."""
        first: int = self.head.item(self.order.item(position))
        return first <= position

    def key(self, position: int) -> Key:
        """The file of the sample at a position."""
        return self.keys[self.order.item(position)]

    def use_up(self, position: int) -> Key:
        """Make a position no longer pending, the first pending one of its sample. Returns the file of the sample."""
        sample = self.order.item(position)
        self.head[sample] = self.following[position]
        self._served.discard(position)
        return self.keys[sample]

    def swap(self, position: int, sample: int) -> list[Key]:
        """Let a position and a sample's change places if both are pending; the files of both. No sample may repeat."""
        if not (position < len(self.order) and sample < len(self.head) and self.pending(position)):
            return []
        other, before = int(self.head[sample]), int(self.order[position])
        if other >= len(self.order) or other == position:
            return []
        self.order[position], self.order[other] = sample, before
        self.head[sample], self.head[before] = position, other
        self._served.difference_update((position, other))
        return [self.keys[sample], self.keys[before]]

    def give_up(self) -> None:
        """Make all positions no longer pending."""
        self.head.fill(len(self.order))
        self._served.clear()

    def same_draws(self, other: PlannedEpoch) -> bool:
        """Whether both are the same epoch with the same draws of the same files, wherever they start."""
        same_files = self.keys is other.keys or self.keys == other.keys
        return same_files and self.number == other.number and np.array_equal(self.order, other.order)
