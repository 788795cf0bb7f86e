"""Drive an engine with recorded accesses and count what it would have served.

The law that every result can be held against: a cache that fetches only on demand serves, in an epoch that reads each
sample exactly once, nothing but what it held when the epoch began; so no policy, however much it foresees, serves
more than the cached fraction. More takes repetition, prefetching or substitution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spiderfs.core.engine import Engine
from spiderfs.core.policy import Key, Policy

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Accesses:
    """What was read, in order; the three run in parallel."""

    keys: Sequence[Key]
    sizes: Sequence[int]
    ids: Counts
    """The keys numbered from 0 in the order of their first access."""

    @classmethod
    def of(cls, keys: Sequence[Key], sizes: Sequence[int]) -> Accesses:
        numbers: dict[Key, int] = {}
        ids = (numbers.setdefault(key, len(numbers)) for key in keys)
        return cls(keys, sizes, np.fromiter(ids, np.int64, len(keys)))

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


@dataclass(frozen=True, slots=True)
class Replay:
    """Counts per epoch; the last epoch may be a part of one."""

    opens: Counts
    hits: Counts
    served_bytes: Counts
    origin_bytes: Counts
    distinct: Counts
    """Different samples seen in each epoch."""
    distinct_in_all: int

    @property
    def hit_ratio(self) -> float:
        return int(self.hits.sum()) / int(self.opens.sum())

    @property
    def warm_hit_ratio(self) -> float:
        """Hit ratio from the second epoch on; that of the only epoch where there is no second."""
        warm = slice(1 if len(self.opens) > 1 else 0, None)
        return int(self.hits[warm].sum()) / int(self.opens[warm].sum())

    @property
    def origin_bytes_per_sample(self) -> float:
        """Bytes fetched from the source for each sample served."""
        return int(self.origin_bytes.sum()) / int(self.opens.sum())

    @property
    def coverage(self) -> NDArray[np.float64]:
        """Per epoch: the share of all samples that was seen."""
        return self.distinct / self.distinct_in_all


def policy_for(policy: type[Policy], accesses: Accesses) -> Policy:
    """A policy for replaying these accesses, with knowledge of them if that is what it needs."""
    return policy.foreseeing([key for key in accesses.keys if not isinstance(key, tuple)])


def replay(engine: Engine, accesses: Accesses, epoch_length: int) -> Replay:
    """Feed all accesses (at least one) to an engine and count by epochs of `epoch_length` accesses."""
    members = engine.members
    hit_list: list[bool] = []
    for key, size in zip(accesses.keys, accesses.sizes, strict=True):
        hit_list.append(key in members)
        if isinstance(key, tuple):
            engine.block_read(key, size)
        else:
            engine.opened(key, size)
    hits = np.array(hit_list)
    sizes = np.asarray(accesses.sizes, np.int64)
    starts = np.arange(0, len(accesses), epoch_length)
    return Replay(
        opens=np.diff(starts, append=len(accesses)),
        hits=np.add.reduceat(hits.astype(np.int64), starts),
        served_bytes=np.add.reduceat(sizes, starts),
        origin_bytes=np.add.reduceat(np.where(hits, 0, sizes), starts),
        distinct=np.array([np.unique(accesses.ids[start : start + epoch_length]).size for start in starts]),
        distinct_in_all=accesses.distinct,
    )
