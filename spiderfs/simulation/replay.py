"""Replay: drive an engine with recorded accesses, and count what the cache would have served.

There is a law to check every result against. In an epoch that reads each sample exactly once, a cache that fetches only
on demand serves only the samples that it held when the epoch began. So no policy has a hit ratio above the cached
fraction, however much it foresees. A higher ratio needs repeated draws, fetching ahead, or stand-ins.

The hints in a trace are given to guided policies again, between the same accesses; other policies get none. Where a
hub's bytes were at hand when the trace was recorded, it enters the cache without a second read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spiderfs.core.accesses import Accesses
from spiderfs.core.engine import Engine
from spiderfs.core.hints import Hint
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.plans.rank_news import RankNews
from spiderfs.core.policy import Policy
from spiderfs.simulation.planned_ranks import PlannedRanks
from spiderfs.simulation.teacher import NEVER, Teacher

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Replay:
    """Counts, one for each epoch; the last epoch may be incomplete."""

    opens: Counts
    hits: Counts
    """Opens that did not wait for the source, including those that were redirected."""
    redirects: Counts
    served_bytes: Counts
    origin_bytes: Counts
    distinct: Counts
    """Different samples that were read in each epoch."""
    distinct_in_all: int
    """Different samples that were read in all epochs together."""

    @property
    def hit_ratio(self) -> float:
        return int(self.hits.sum()) / int(self.opens.sum())

    @property
    def warm_hit_ratio(self) -> float:
        """The hit ratio from the second epoch on; if there is one epoch only, its hit ratio."""
        warm = slice(1 if len(self.opens) > 1 else 0, None)
        return int(self.hits[warm].sum()) / int(self.opens[warm].sum())

    @property
    def origin_bytes_per_sample(self) -> float:
        """Origin bytes divided by the number of opens."""
        return int(self.origin_bytes.sum()) / int(self.opens.sum())

    @property
    def coverage(self) -> NDArray[np.float64]:
        """For each epoch the share of all samples that were read in it."""
        return self.distinct / self.distinct_in_all


def policy_for(policy: type[Policy], accesses: Accesses) -> Policy:
    """A new policy for a replay of these accesses; it knows them beforehand if it needs the future."""
    return policy.foreseeing([key for key in accesses.keys if not isinstance(key, tuple)])


def replay(
    engine: Engine,
    accesses: Accesses,
    epoch_length: int,
    hints: Sequence[tuple[int, Hint]] = (),
    planned_epochs: int = 0,
    ratio: float | None = None,
    news: Sequence[tuple[int, RankNews]] = (),
) -> Replay:
    """Feed all accesses (at least one) to an engine, and count by epochs of `epoch_length` accesses.

    Each hint comes with the number of the access before which the policy gets it; hints are in that order. The engine
    gets `news` of ranks in the same way. With `planned_epochs` of 1 the engine gets the plan of each epoch when the
    epoch begins, with 2 also that of the next. `ratio` fixes the ratio until a hint sets another one; None leaves it to
    the policy.
    """
    members = engine.members
    plans = _Plans(engine, accesses, epoch_length, planned_epochs)
    teacher = Teacher(engine, dict(zip(accesses.keys, accesses.sizes, strict=True)), hints, ratio)
    ranks = PlannedRanks(engine, news)
    hit_list: list[bool] = []
    redirect_list: list[bool] = []
    for number, (key, size, course_id) in enumerate(
        zip(accesses.keys, accesses.sizes, accesses.course_ids, strict=True)
    ):
        if number == teacher.due:
            teacher.give(number)
        if number == ranks.due:
            ranks.give(number)
        if number == plans.due:
            plans.give(number)
        if planned_epochs:
            epoch, position = divmod(number, epoch_length)
            engine.come(_READER, "", epoch, position + 1, position, float(number))
            engine.wanted(_READER, key, float(number))
        hit = key in members
        given = teacher.choose(course_id, key, hit) if course_id else key
        if course_id:
            teacher.served(course_id, key, given)
        redirected = given != key
        hit_list.append(hit or redirected)
        redirect_list.append(redirected)
        if isinstance(key, tuple):
            engine.block_read(key, size)
        else:
            engine.opened(given, members[given].size if redirected else size)
    teacher.give(len(accesses))
    hits = np.array(hit_list)
    sizes = np.asarray(accesses.sizes, np.int64)
    starts = np.arange(0, len(accesses), epoch_length)
    return Replay(
        opens=np.diff(starts, append=len(accesses)),
        hits=np.add.reduceat(hits.astype(np.int64), starts),
        redirects=np.add.reduceat(np.array(redirect_list).astype(np.int64), starts),
        served_bytes=np.add.reduceat(sizes, starts),
        origin_bytes=np.add.reduceat(np.where(hits, 0, sizes), starts),
        distinct=np.array([np.unique(accesses.ids[start : start + epoch_length]).size for start in starts]),
        distinct_in_all=accesses.distinct,
    )


# A replay takes all accesses of a trace for those of one reader.
_READER = "trace"


class _Plans:
    """Gives the plan of each epoch to an engine."""

    def __init__(self, engine: Engine, accesses: Accesses, epoch_length: int, planned_epochs: int) -> None:
        self._engine = engine
        self._ids = accesses.ids.astype(np.uint32)
        self._epoch_length = epoch_length
        self._planned_epochs = planned_epochs
        self.due = 0 if planned_epochs else NEVER
        self._keys = list(dict.fromkeys(accesses.keys))
        self._id_of = {key: number for number, key in enumerate(self._keys)}

    def give(self, number: int) -> None:
        """Give the plan of the epoch that begins with access `number`."""
        for ahead in range(self._planned_epochs):
            start = number + ahead * self._epoch_length
            order = self._ids[start : start + self._epoch_length]
            if len(order):
                epoch = PlannedEpoch(start // self._epoch_length, self._keys, self._id_of, order)
                self._engine.plan(_READER, "", epoch, float(number), begun=ahead == 0)
        self.due = number + self._epoch_length
