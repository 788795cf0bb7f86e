"""All accesses of a trace, as columns: a replay drives an engine with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spiderfs.core.policy import Key


@dataclass(frozen=True, slots=True)
class Accesses:
    """One row for each access, in the order in which they came; the four columns have the same length."""

    keys: Sequence[Key]
    sizes: Sequence[int]
    """In bytes."""
    ids: NDArray[np.int64]
    """The number of each key: keys are numbered from 0, in the order of their first access."""
    course_ids: Sequence[str]
    """The course by which the reader may get a stand-in; "" for a reader of no course."""

    @classmethod
    def of(cls, keys: Sequence[Key], sizes: Sequence[int], course_ids: Sequence[str] | None = None) -> Accesses:
        numbers: dict[Key, int] = {}
        ids = (numbers.setdefault(key, len(numbers)) for key in keys)
        return cls(keys, sizes, np.fromiter(ids, np.int64, len(keys)), course_ids or [""] * len(keys))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def distinct(self) -> int:
        """Number of different samples and blocks."""
        return int(self.ids.max()) + 1 if len(self) else 0

    @property
    def distinct_bytes(self) -> int:
        """Bytes of all different samples and blocks, each counted once, with the size of its last access."""
        sizes = np.zeros(self.distinct, np.int64)
        sizes[self.ids] = self.sizes
        return int(sizes.sum())
