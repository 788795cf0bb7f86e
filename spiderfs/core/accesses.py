"""A whole recording of what was asked for, as columns: what a replay drives an engine with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spiderfs.core.policy import Key


@dataclass(frozen=True, slots=True)
class Accesses:
    """What was asked for, in order; the four run in parallel."""

    keys: Sequence[Key]
    sizes: Sequence[int]
    ids: NDArray[np.int64]
    """The keys numbered from 0 in the order of their first access."""
    datasets: Sequence[str]
    """Of the reader, where it may be given a stand-in; "" where it may not."""

    @classmethod
    def of(cls, keys: Sequence[Key], sizes: Sequence[int], datasets: Sequence[str] | None = None) -> Accesses:
        numbers: dict[Key, int] = {}
        ids = (numbers.setdefault(key, len(numbers)) for key in keys)
        return cls(keys, sizes, np.fromiter(ids, np.int64, len(keys)), datasets or [""] * len(keys))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def distinct(self) -> int:
        """Number of different samples and blocks."""
        return int(self.ids.max()) + 1 if len(self) else 0

    @property
    def distinct_bytes(self) -> int:
        sizes = np.zeros(self.distinct, np.int64)
        sizes[self.ids] = self.sizes
        return int(sizes.sum())
