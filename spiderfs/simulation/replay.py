"""Replay: drive an engine with recorded accesses, and count what the cache would have served.

There is a law to check every result against. In an epoch that reads each sample exactly once, a cache that fetches only
on demand serves only the samples that it held when the epoch began. So no policy has a hit ratio above the cached
fraction, however much it foresees. A higher ratio needs repeated draws, fetching ahead, or substitutes.

The hints in a trace are given to guided policies again, between the same accesses; other policies get none. Where a
hub's bytes were at hand when the trace was recorded, it enters the cache without a second read.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from spiderfs.core.engine import Engine
from spiderfs.core.hints import (
    AtHand,
    Candidates,
    Disconnected,
    Dispatched,
    Epoch,
    Hint,
    Labels,
    Pinning,
    Planned,
    Progressed,
    RankNews,
    Ratio,
    Scored,
    WarmUp,
)
from spiderfs.core.homes import Homes
from spiderfs.core.learning.feed import PolicyFeed
from spiderfs.core.plans.exchange import SharedList
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Hub, Key, Policy
from spiderfs.trace.format import Accesses

Counts = NDArray[np.int64]
Item = TypeVar("Item")

NEVER = -1


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
    ratio: float | None = None,
    news: Sequence[tuple[int, RankNews]] = (),
    before: Callable[[int], None] = lambda number: None,
) -> Replay:
    """Feed all accesses (at least one) to an engine, and count by epochs of `epoch_length` accesses.

    Each hint comes with the number of the access before which the policy gets it; hints are in that order. The engine
    gets `news` of ranks in the same way. `ratio` fixes the ratio until a hint sets another one; None leaves it to the
    policy. `before` is called with the number of each access, before it.
    """
    return _replayed([engine], lambda key: engine, accesses, epoch_length, hints, ratio, news, before)


def replay_on_nodes(
    nodes: int,
    engine: Callable[[int, Homes], Engine],
    capacity_bytes: int,
    accesses: Accesses,
    epoch_length: int,
    hints: Sequence[tuple[int, Hint]] = (),
    ratio: float | None = None,
) -> Replay:
    """As `replay`, on so many nodes of this capacity each, whose engines `engine` makes; all get all hints.

    The accesses are dealt to them in turn, as a training with a rank on each node reads an epoch, and their caches act
    as one (`core/homes.py`): a node requests what it has not cached from its home, which fetches what it has not.
    """
    names = [f"{number:06}" for number in range(nodes)]
    homes = Homes(dict.fromkeys(names, 1.0), names[0])
    engines = [engine(capacity_bytes, homes.seen_from(place)) for place in range(nodes)]

    def home_of(key: Key) -> Engine:
        # The blocks of a file have one home.
        number = key[0] if isinstance(key, tuple) else key
        assert isinstance(number, int)
        return engines[homes.home(number)]

    return _replayed(engines, home_of, accesses, epoch_length, hints, ratio)


def _replayed(
    engines: Sequence[Engine],
    home_of: Callable[[Key], Engine],
    accesses: Accesses,
    epoch_length: int,
    hints: Sequence[tuple[int, Hint]],
    ratio: float | None,
    news: Sequence[tuple[int, RankNews]] = (),
    before: Callable[[int], None] = lambda number: None,
) -> Replay:
    ranks = PlannedRanks(engines[0], news)
    sizes = dict(zip(accesses.keys, accesses.sizes, strict=True))
    feeds = [ReplayedFeed(engine, sizes, hints, ratio) for engine in engines]
    outcomes = []
    for number, access in enumerate(zip(accesses.keys, accesses.sizes, accesses.job_dataset_ids, strict=True)):
        # All have the same hints.
        if number == feeds[0].due:
            for feed in feeds:
                feed.give(number)
        if number == ranks.due:
            ranks.give(number)
        before(number)
        own, home = engines[number % len(engines)], home_of(access[0])
        outcomes.append(served(own, feeds[number % len(engines)], *access, None if home is own else home))
    for feed in feeds:
        feed.give(len(accesses))
    return counted(accesses, epoch_length, outcomes)


def served(
    engine: Engine, feed: ReplayedFeed, key: Key, size: int, job_dataset_id: str, home: Engine | None = None
) -> tuple[bool, bool]:
    """Have a reader of a job dataset (or of none, "") read a sample; whether that is a hit, and whether it is
    redirected.

    What the engine has not cached it asks the `home` for, which is another one.
    """
    hit = key in engine.members
    given = feed.choose(job_dataset_id, key, hit) if job_dataset_id else key
    if job_dataset_id:
        feed.served(job_dataset_id, key, given)
    redirected = given != key
    if home is not None and not hit and not redirected:
        hit = key in home.members
        read(home, key, size)
    read(engine, given, engine.members[given].size if redirected else size)
    return hit or redirected, redirected


def read(engine: Engine, key: Key, size: int) -> None:
    """Report to the engine that a small file, or a block, was read."""
    if isinstance(key, tuple):
        engine.block_read(key, size)
    else:
        engine.opened(key, size)


def counted(accesses: Accesses, epoch_length: int, outcomes: list[tuple[bool, bool]]) -> Replay:
    """The counts by epochs, of what `served` has returned for each access."""
    hits, redirects = np.array(outcomes).T
    sizes = np.asarray(accesses.sizes, np.int64)
    starts = np.arange(0, len(accesses), epoch_length)
    return Replay(
        opens=np.diff(starts, append=len(accesses)),
        hits=np.add.reduceat(hits.astype(np.int64), starts),
        redirects=np.add.reduceat(redirects.astype(np.int64), starts),
        served_bytes=np.add.reduceat(sizes, starts),
        origin_bytes=np.add.reduceat(np.where(hits, 0, sizes), starts),
        distinct=np.array([np.unique(accesses.ids[start : start + epoch_length]).size for start in starts]),
        distinct_in_all=accesses.distinct,
    )


class _InOrder(ABC, Generic[Item]):
    """Gives items to an engine, each before its access; the items are in that order."""

    def __init__(self, engine: Engine, items: Sequence[tuple[int, Item]]) -> None:
        self._engine = engine
        self._items = items
        self._next = -1
        self._step()

    def give(self, number: int) -> None:
        """Give all items that are due before access `number`."""
        while self.due == number:
            self._give(self._items[self._next][1])
            self._step()

    def _step(self) -> None:
        self._next += 1
        self.due = self._items[self._next][0] if self._next < len(self._items) else NEVER

    @abstractmethod
    def _give(self, item: Item) -> None: ...


class ReplayedFeed(_InOrder[Hint]):
    """Gives the hints of a trace to a guided policy, each before its access, as the daemon does in a training."""

    def __init__(
        self, engine: Engine, sizes: Mapping[Key, int], hints: Sequence[tuple[int, Hint]], ratio: float | None
    ) -> None:
        super().__init__(engine, hints if engine.policy.guided else ())
        self._sizes = sizes
        # The bytes of samples that are at hand for the next hub or pins.
        self._at_hand: dict[Key, int] = {}
        self._epochs: Counter[str] = Counter()
        self._feed = PolicyFeed(engine, self._size_of)
        if ratio is not None:
            self._set_ratio(ratio)

    def choose(self, job_dataset_id: str, key: Key, hit: bool) -> Key:
        """The sample whose bytes a reader of this job dataset gets for this one, which is cached if it is a `hit`."""
        found = None if hit else self._feed.substitute(job_dataset_id, key)
        return key if found is None else found

    def served(self, job_dataset_id: str, key: Key, given: Key) -> None:
        """A reader of this job dataset asked for a sample, and gets these bytes."""
        self._feed.served(job_dataset_id, key, given)

    def _give(self, hint: Hint) -> None:
        feed = self._feed
        match hint:
            case Scored(job_dataset_id, keys, scores):
                feed.scored(job_dataset_id, keys, scores)
            case AtHand(key, size):
                self._at_hand[key] = size
            case Hub():
                feed.hub_found(hint)
                self._at_hand.clear()
            case Candidates(job_dataset_id, hubs):
                found = next((hub for hub in hubs if not feed.is_hub(job_dataset_id, hub.key)), None)
                # A hub that no access of the trace reads has no known size.
                if found is not None:
                    self._at_hand.update({found.key: self._sizes[found.key]} if found.key in self._sizes else {})
                    feed.hub_found(found)
                    self._at_hand.clear()
            case Ratio(ratio):
                self._set_ratio(ratio)
            case Epoch(job_dataset_id, accuracy):
                feed.epoch_ended(job_dataset_id, self._epochs[job_dataset_id], {}, accuracy)
                self._epochs[job_dataset_id] += 1
            case Labels(job_dataset_id, labels):
                feed.begin(job_dataset_id, job_dataset_id, labels)
            case Pinning(job_dataset_id, keys):
                for _ in feed.pin(job_dataset_id, keys):
                    pass
                self._at_hand.clear()
            case WarmUp(job_dataset_id, active):
                feed.warm_up(job_dataset_id, active)

    def _set_ratio(self, ratio: float) -> None:
        if self._engine.policy.adjustable:
            self._feed.pin_ratio(ratio)

    def _size_of(self, key: Key) -> int | None:
        return self._engine.members[key].size if key in self._engine.members else self._at_hand.get(key)


@dataclass
class _List:
    """A list that some job datasets have in common; it is shared from the first exchange on."""

    keys: Sequence[Key]
    index_of: Mapping[Key, int]
    shared: SharedList | None = None


@dataclass
class _Sharing:
    """How far a rank has come in the epoch that it exchanges."""

    epoch: PlannedEpoch
    taken: int


class PlannedRanks(_InOrder[RankNews]):
    """Gives news of ranks to an engine, each before its access; the news are in that order.

    Their plans overrule the policy, and so do the pending samples of jobs that exchange. The samples come in the order
    in which they were exchanged when the trace was recorded. With another capacity or policy a mount would have
    exchanged others, so a replay shows how the rules of eviction (`core/plans/foresight.py`) serve these orders.
    Nothing is fetched ahead. Time is counted in accesses.
    """

    def __init__(self, engine: Engine, news: Sequence[tuple[int, RankNews]]) -> None:
        super().__init__(engine, news)
        self._chance = random.Random(1).random
        self._list_of = lists_of(one for _, one in news if isinstance(one, Planned))
        self._sharing: dict[tuple[int, str], _Sharing] = {}

    def _give(self, news: RankNews) -> None:
        now_s = float(self.due)
        match news:
            case Planned():
                self._plan(news, now_s)
            case Progressed(rank, job_dataset_id, epoch, dispatched, taken):
                self._engine.progressed(rank, job_dataset_id, epoch, dispatched, taken, now_s)
                self._take(rank, job_dataset_id, epoch, taken)
            case Dispatched():
                self._hand(news)
            case Disconnected(rank):
                for other, job_dataset_id in list(self._sharing):
                    if other == rank:
                        self._end(rank, job_dataset_id)
                self._engine.unplan(rank)

    def _plan(self, plan: Planned, now_s: float) -> None:
        if plan.begun and not len(plan.keys):
            self._end(plan.rank, plan.job_dataset_id)
        known = self._list_of[plan.job_dataset_id]
        order = np.fromiter((known.index_of[key] for key in plan.keys), np.uint32, len(plan.keys))
        epoch = PlannedEpoch(plan.epoch, known.keys, known.index_of, order, plan.start)
        self._engine.plan(plan.rank, plan.job_dataset_id, epoch, now_s, plan.begun)

    def _hand(self, handed: Dispatched) -> None:
        rank = handed.rank, handed.job_dataset_id
        reader = self._engine.schedule.readers.get(rank)
        if reader is None or reader.epoch.number != handed.epoch or reader.epoch.repeats:
            return
        epoch, shared = reader.epoch, self._shared(handed.job_dataset_id)
        sharing = self._sharing.get(rank)
        if sharing is None or sharing.epoch is not epoch:
            self._sharing[rank] = _Sharing(epoch, handed.position)
            shared.begin(rank, handed.job_dataset_id, np.unique(epoch.order[handed.position :]))
            self._engine.rerank()
        samples = [epoch.index_of[key] for key in handed.keys if key in epoch.index_of]
        for position, sample in enumerate(samples, handed.position):
            for key in epoch.swap(position, sample):
                self._engine.exchange_pending.changed(key)
        shared.dispatched(rank, samples)

    def _take(self, rank: int, job_dataset_id: str, epoch: int, taken: int) -> None:
        sharing = self._sharing.get((rank, job_dataset_id))
        if sharing is not None and sharing.epoch.number == epoch and taken > sharing.taken:
            sharing.taken += self._shared(job_dataset_id).taken((rank, job_dataset_id), taken - sharing.taken)

    def _end(self, rank: int, job_dataset_id: str) -> None:
        if self._sharing.pop((rank, job_dataset_id), None) is not None:
            self._shared(job_dataset_id).end((rank, job_dataset_id))
            self._engine.rerank()

    def _shared(self, job_dataset_id: str) -> SharedList:
        known = self._list_of[job_dataset_id]
        if known.shared is None:
            known.shared = SharedList(known.keys, known.index_of, self._chance, self._engine.exchange_pending.changed)
            self._engine.share(id(known), known.shared)
        return known.shared


def lists_of(plans: Iterable[Planned]) -> dict[str, _List]:
    """The list of each job dataset: all samples of its plans; job datasets whose lists have a sample in common have one
    list."""
    groups: list[tuple[dict[Key, None], set[str]]] = []
    for plan in plans:
        keys, job_datasets = dict.fromkeys(plan.keys), {plan.job_dataset_id}
        others = []
        for group in groups:
            if plan.job_dataset_id in group[1] or not group[0].keys().isdisjoint(keys):
                keys, job_datasets = group[0] | keys, group[1] | job_datasets
            else:
                others.append(group)
        groups = [*others, (keys, job_datasets)]
    found: dict[str, _List] = {}
    for keys, job_datasets in groups:
        known = _List(list(keys), {key: sample for sample, key in enumerate(keys)})
        found |= dict.fromkeys(job_datasets, known)
    return found
