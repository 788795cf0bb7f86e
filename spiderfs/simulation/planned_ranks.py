"""The plans of a trace's ranks in a replay: they overrule the policy, and so does what jobs that exchange still owe.

The samples come in the order in which they were exchanged when the trace was recorded. With another capacity or policy
a mount would have exchanged others, so a replay shows how the rules of eviction (`core/plans/foresight.py`) serve these
orders. Nothing is fetched ahead. Time is counted in accesses.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spiderfs.core.engine import Engine
from spiderfs.core.plans.exchange import SharedList
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.plans.rank_news import Come, Handed, Left, Planned, RankNews
from spiderfs.core.policy import Key
from spiderfs.simulation.teacher import NEVER


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
    """Gives news of ranks to an engine, each before its access; the news are in that order."""

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
            case Come(rank, course_id, epoch, dispatched, taken):
                self._engine.come(rank, course_id, epoch, dispatched, taken, now_s)
                self._take(rank, course_id, epoch, taken)
            case Handed():
                self._hand(news)
            case Left(rank):
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

    def _hand(self, handed: Handed) -> None:
        rank = handed.rank, handed.course_id
        reader = self._engine.schedule.readers.get(rank)
        if reader is None or reader.epoch.number != handed.epoch or reader.epoch.repeats:
            return
        epoch, shared = reader.epoch, self._shared(handed.course_id)
        sharing = self._sharing.get(rank)
        if sharing is None or sharing.epoch is not epoch:
            self._sharing[rank] = _Sharing(epoch, handed.position)
            shared.begin(rank, handed.course_id, np.unique(epoch.order[handed.position :]))
            self._engine.owing_changed()
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
            self._engine.owing_changed()

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
