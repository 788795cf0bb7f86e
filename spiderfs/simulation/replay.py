"""Replay: drive an engine with recorded accesses, and count what the cache would have served.

There is a law to check every result against. In an epoch that reads each sample exactly once, a cache that fetches only
on demand serves only the samples that it held when the epoch began. So no policy has a hit ratio above the cached
fraction, however much it foresees. A higher ratio needs repeated draws, fetching ahead, or stand-ins.

The hints in a trace are given to guided policies again, between the same accesses; other policies get none. Where a
hub's bytes were at hand when the trace was recorded, it enters the cache without a second read.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spiderfs.core.accesses import Accesses
from spiderfs.core.engine import Engine
from spiderfs.core.guided import Adjustable, Guided
from spiderfs.core.hints import (
    AtHand,
    Candidates,
    Disconnected,
    Dispatched,
    Epoch,
    Hint,
    Hub,
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
from spiderfs.core.learning.teaching import Teaching
from spiderfs.core.plans.exchange import SharedList
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Key, Policy

Counts = NDArray[np.int64]


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
    teacher = Teacher(engine, dict(zip(accesses.keys, accesses.sizes, strict=True)), hints, ratio)
    ranks = PlannedRanks(engine, news)
    outcomes = []
    for number, access in enumerate(zip(accesses.keys, accesses.sizes, accesses.course_ids, strict=True)):
        if number == teacher.due:
            teacher.give(number)
        if number == ranks.due:
            ranks.give(number)
        before(number)
        outcomes.append(served(engine, teacher, *access))
    teacher.give(len(accesses))
    return counted(accesses, epoch_length, outcomes)


def replay_on_nodes(
    nodes: int,
    engine: Callable[[int, Homes], Engine],
    capacity_bytes: int,
    accesses: Accesses,
    epoch_length: int,
    hints: Sequence[tuple[int, Hint]] = (),
    ratio: float | None = None,
) -> Replay:
    """As `replay`, on so many nodes of this capacity each, whose engines `engine` makes; all hear all hints.

    The accesses are dealt to them in turn, as a training with a rank on each node reads an epoch, and their caches act
    as one (`core/homes.py`): what a node has not cached it asks the home for, which fetches what it has not.
    """
    names = [f"{number:06}" for number in range(nodes)]
    homes = Homes(dict.fromkeys(names, 1.0), names[0])
    engines = [engine(capacity_bytes, homes.seen_from(place)) for place in range(nodes)]
    sizes = dict(zip(accesses.keys, accesses.sizes, strict=True))
    teachers = [Teacher(made, sizes, hints, ratio) for made in engines]
    outcomes = []
    for number, access in enumerate(zip(accesses.keys, accesses.sizes, accesses.course_ids, strict=True)):
        # All have the same hints.
        if number == teachers[0].due:
            for teacher in teachers:
                teacher.give(number)
        own, home = engines[number % nodes], engines[homes.home(_hash_of(access[0]))]
        outcomes.append(served(own, teachers[number % nodes], *access, None if home is own else home))
    for teacher in teachers:
        teacher.give(len(accesses))
    return counted(accesses, epoch_length, outcomes)


def served(
    engine: Engine, teacher: Teacher, key: Key, size: int, course_id: str, home: Engine | None = None
) -> tuple[bool, bool]:
    """Have a reader of a course (or of none, "") read a sample; whether that is a hit, and whether it is redirected.

    What the engine has not cached it asks the `home` for, which is another one.
    """
    hit = key in engine.members
    given = teacher.choose(course_id, key, hit) if course_id else key
    if course_id:
        teacher.served(course_id, key, given)
    redirected = given != key
    if home is not None and not hit and not redirected:
        hit = key in home.members
        read(home, key, size)
    read(engine, given, engine.members[given].size if redirected else size)
    return hit or redirected, redirected


def read(engine: Engine, key: Key, size: int) -> None:
    """Tell the engine that a small file, or a block, was read."""
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


def _hash_of(key: Key) -> int:
    """The number by which a sample has its home; the blocks of a file have one home."""
    number = key[0] if isinstance(key, tuple) else key
    assert isinstance(number, int)
    return number


class Teacher:
    """Gives the hints of a trace to a guided policy, each before its access, as the daemon does in a training."""

    def __init__(
        self, engine: Engine, sizes: Mapping[Key, int], hints: Sequence[tuple[int, Hint]], ratio: float | None
    ) -> None:
        self._engine = engine
        self._sizes = sizes
        self._hints = hints if isinstance(engine.policy, Guided) else ()
        self._next = 0
        # The bytes of samples that are at hand for the next hub or pins.
        self._at_hand: dict[Key, int] = {}
        self._epochs: Counter[str] = Counter()
        self._teaching = Teaching(engine, self._size_of)
        if ratio is not None:
            self._set_ratio(ratio)
        self.due = self._hints[0][0] if self._hints else NEVER

    def give(self, number: int) -> None:
        """Give all hints that are due before access `number`."""
        while self.due == number:
            self._give(self._hints[self._next][1])
            self._next += 1
            self.due = self._hints[self._next][0] if self._next < len(self._hints) else NEVER

    def choose(self, course_id: str, key: Key, hit: bool) -> Key:
        """The sample whose bytes a reader of this course gets for this one, which is cached if it is a `hit`."""
        found = None if hit else self._teaching.stand_in(course_id, key)
        return key if found is None else found

    def served(self, course_id: str, key: Key, given: Key) -> None:
        """A reader of this course asked for a sample, and gets these bytes."""
        self._teaching.served(course_id, key, given)

    def _give(self, hint: Hint) -> None:
        teaching = self._teaching
        match hint:
            case Scored(course_id, keys, scores):
                teaching.scored(course_id, keys, scores)
            case AtHand(key, size):
                self._at_hand[key] = size
            case Hub():
                teaching.hub_found(hint)
                self._at_hand.clear()
            case Candidates(course_id, hubs):
                found = next((hub for hub in hubs if not teaching.is_hub(course_id, hub.key)), None)
                # A hub that no access of the trace reads has no known size.
                if found is not None:
                    self._at_hand.update({found.key: self._sizes[found.key]} if found.key in self._sizes else {})
                    teaching.hub_found(found)
                    self._at_hand.clear()
            case Ratio(ratio):
                self._set_ratio(ratio)
            case Epoch(course_id, accuracy):
                teaching.epoch_ended(course_id, self._epochs[course_id], {}, accuracy)
                self._epochs[course_id] += 1
            case Labels(course_id, labels):
                teaching.begin(course_id, course_id, labels)
            case Pinning(course_id, keys):
                for _ in teaching.pin(course_id, keys):
                    pass
                self._at_hand.clear()
            case WarmUp(course_id, active):
                teaching.warm_up(course_id, active)

    def _set_ratio(self, ratio: float) -> None:
        if isinstance(self._engine.policy, Adjustable):
            self._teaching.pin_ratio(ratio)

    def _size_of(self, key: Key) -> int | None:
        return self._engine.members[key].size if key in self._engine.members else self._at_hand.get(key)


@dataclass
class _List:
    """A list that some courses have in common; it is shared from the first exchange on."""

    keys: Sequence[Key]
    index_of: Mapping[Key, int]
    shared: SharedList | None = None


@dataclass
class _Sharing:
    """How far a rank has come in the epoch that it exchanges."""

    epoch: PlannedEpoch
    taken: int


class PlannedRanks:
    """Gives news of ranks to an engine, each before its access; the news are in that order.

    Their plans overrule the policy, and so does what jobs that exchange still owe. The samples come in the order in
    which they were exchanged when the trace was recorded. With another capacity or policy a mount would have exchanged
    others, so a replay shows how the rules of eviction (`core/plans/foresight.py`) serve these orders. Nothing is
    fetched ahead. Time is counted in accesses.
    """

    def __init__(self, engine: Engine, news: Sequence[tuple[int, RankNews]]) -> None:
        self._engine = engine
        self._news = news
        self._next = 0
        self._chance = random.Random(1).random
        self._list_of = lists_of(one for _, one in news if isinstance(one, Planned))
        self._sharing: dict[tuple[int, str], _Sharing] = {}
        self.due = news[0][0] if news else NEVER

    def give(self, number: int) -> None:
        """Give all news that are due before access `number`."""
        while self.due == number:
            self._give(self._news[self._next][1], float(number))
            self._next += 1
            self.due = self._news[self._next][0] if self._next < len(self._news) else NEVER

    def _give(self, news: RankNews, now_s: float) -> None:
        match news:
            case Planned():
                self._plan(news, now_s)
            case Progressed(rank, course_id, epoch, dispatched, taken):
                self._engine.progressed(rank, course_id, epoch, dispatched, taken, now_s)
                self._take(rank, course_id, epoch, taken)
            case Dispatched():
                self._hand(news)
            case Disconnected(rank):
                for other, course_id in list(self._sharing):
                    if other == rank:
                        self._end(rank, course_id)
                self._engine.unplan(rank)

    def _plan(self, plan: Planned, now_s: float) -> None:
        if plan.begun and not len(plan.keys):
            self._end(plan.rank, plan.course_id)
        known = self._list_of[plan.course_id]
        order = np.fromiter((known.index_of[key] for key in plan.keys), np.uint32, len(plan.keys))
        epoch = PlannedEpoch(plan.epoch, known.keys, known.index_of, order, plan.start)
        self._engine.plan(plan.rank, plan.course_id, epoch, now_s, plan.begun)

    def _hand(self, handed: Dispatched) -> None:
        rank = handed.rank, handed.course_id
        reader = self._engine.schedule.readers.get(rank)
        if reader is None or reader.epoch.number != handed.epoch or reader.epoch.repeats:
            return
        epoch, shared = reader.epoch, self._shared(handed.course_id)
        sharing = self._sharing.get(rank)
        if sharing is None or sharing.epoch is not epoch:
            self._sharing[rank] = _Sharing(epoch, handed.position)
            shared.begin(rank, handed.course_id, np.unique(epoch.order[handed.position :]))
            self._engine.rank_anew()
        samples = [epoch.index_of[key] for key in handed.keys if key in epoch.index_of]
        for position, sample in enumerate(samples, handed.position):
            for key in epoch.swap(position, sample):
                self._engine.owed.changed(key)
        shared.dispatched(rank, samples)

    def _take(self, rank: int, course_id: str, epoch: int, taken: int) -> None:
        sharing = self._sharing.get((rank, course_id))
        if sharing is not None and sharing.epoch.number == epoch and taken > sharing.taken:
            sharing.taken += self._shared(course_id).taken((rank, course_id), taken - sharing.taken)

    def _end(self, rank: int, course_id: str) -> None:
        if self._sharing.pop((rank, course_id), None) is not None:
            self._shared(course_id).end((rank, course_id))
            self._engine.rank_anew()

    def _shared(self, course_id: str) -> SharedList:
        known = self._list_of[course_id]
        if known.shared is None:
            known.shared = SharedList(known.keys, known.index_of, self._chance, self._engine.owed.changed)
            self._engine.share(id(known), known.shared)
        return known.shared


def lists_of(plans: Iterable[Planned]) -> dict[str, _List]:
    """The list of each course: all samples of its plans; courses whose lists have a sample in common have one list."""
    groups: list[tuple[dict[Key, None], set[str]]] = []
    for plan in plans:
        keys, courses = dict.fromkeys(plan.keys), {plan.course_id}
        others = []
        for group in groups:
            if plan.course_id in group[1] or not group[0].keys().isdisjoint(keys):
                keys, courses = group[0] | keys, group[1] | courses
            else:
                others.append(group)
        groups = [*others, (keys, courses)]
    found: dict[str, _List] = {}
    for keys, courses in groups:
        known = _List(list(keys), {key: sample for sample, key in enumerate(keys)})
        found |= dict.fromkeys(courses, known)
    return found
