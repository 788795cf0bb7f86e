"""Drive an engine with recorded accesses and count what it would have served.

The law that every result can be held against: a cache that fetches only on demand serves, in an epoch that reads each
sample exactly once, nothing but what it held when the epoch began; so no policy, however much it foresees, serves
more than the cached fraction. More takes repetition, prefetching or substitution.

What a scorer found while a trace was recorded is replayed as hints, between the accesses where it was found; policies
that are not guided go without. A hub was read with the batch that made it one, so its bytes are taken to lie in landing
still, and entering the cache costs no second read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spiderfs.core.accesses import Accesses
from spiderfs.core.engine import Engine
from spiderfs.core.guided import Guided
from spiderfs.core.hints import Epoch, Hint, Hub, Labels, Pinning, Ratio, Scored
from spiderfs.core.policy import Key, Policy
from spiderfs.core.schedule import PlannedEpoch

Counts = NDArray[np.int64]

NEVER = -1


@dataclass(frozen=True, slots=True)
class Replay:
    """Counts per epoch; the last epoch may be a part of one."""

    opens: Counts
    hits: Counts
    """Opens that did not wait for the source, those that were redirected among them."""
    redirects: Counts
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


def replay(
    engine: Engine,
    accesses: Accesses,
    epoch_length: int,
    hints: Sequence[tuple[int, Hint]] = (),
    planned_epochs: int = 0,
) -> Replay:
    """Feed all accesses (at least one) to an engine and count by epochs of `epoch_length` accesses.

    Each hint comes with the number of the access before which it is given; they are in that order. With
    `planned_epochs` of 1 the engine is told what an epoch will read as it begins, with 2 also what the next will.
    """
    members = engine.members
    plans = _Plans(engine, accesses, epoch_length, planned_epochs)
    guide = _Guide(engine, dict(zip(accesses.keys, accesses.sizes, strict=True)), hints)
    hit_list: list[bool] = []
    redirect_list: list[bool] = []
    for number, (key, size, list_id) in enumerate(zip(accesses.keys, accesses.sizes, accesses.list_ids, strict=True)):
        if number == guide.due:
            guide.give(number)
        if number == plans.due:
            plans.give(number)
        if planned_epochs:
            engine.wanted(_READER, key, float(number))
        hit = key in members
        hub = guide.stand_in(list_id, key) if list_id and not hit else None
        hit_list.append(hit or hub is not None)
        redirect_list.append(hub is not None)
        if isinstance(key, tuple):
            engine.block_read(key, size)
        elif hub is not None:
            engine.opened(hub, members[hub].size)
        else:
            engine.opened(key, size)
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


# All accesses of a trace are taken to be one reader's.
_READER = "trace"


class _Plans:
    """Tells an engine what each epoch will read."""

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


class _Guide:
    """Gives the hints to a policy that takes them, each at its time."""

    def __init__(self, engine: Engine, sizes: Mapping[Key, int], hints: Sequence[tuple[int, Hint]]) -> None:
        self._engine = engine
        self._policy = engine.policy if isinstance(engine.policy, Guided) else None
        self._sizes = sizes
        self._hints = hints if self._policy else ()
        self._next = 0
        self.due = self._hints[0][0] if self._hints else NEVER

    def give(self, number: int) -> None:
        """Give all that are due before access `number`."""
        while self.due == number:
            self._give(self._hints[self._next][1])
            self._next += 1
            self.due = self._hints[self._next][0] if self._next < len(self._hints) else NEVER

    def stand_in(self, list_id: str, key: Key) -> Key | None:
        if self._policy is None:
            return None
        hub = self._policy.stand_in(list_id, key)
        if hub is not None:
            self._policy.stood_in(hub, key)
        return hub

    def _give(self, hint: Hint) -> None:
        assert self._policy is not None
        match hint:
            case Scored(key, score):
                self._engine.scored(key, score)
            case Hub():
                self._policy.hub_found(hint)
                # One that was never read during the trace is no member, and cannot become one.
                if hint.key in self._sizes:
                    self._engine.place(hint.key, self._sizes[hint.key])
            case Ratio(ratio):
                self._policy.set_ratio(ratio)
                self._engine.settle()
            case Epoch():
                self._policy.new_epoch()
            case Labels(list_id, labels):
                self._policy.listed(list_id, labels)
            case Pinning(list_id, keys):
                for key in self._policy.pin(list_id, keys):
                    # Any other enters when it is read.
                    if key in self._engine.members:
                        self._engine.place(key, self._engine.members[key].size)
