"""Plans of jobs on other nodes: what the home of a sample hears of them, and tells the other homes of its own.

Where nodes share out the samples (`sources/members.py`), several jobs may read one list, each on its node. A home that
knows all their plans keeps, of the samples that it has for all, those that any of them reads next. So a node sends each
home that part of its plans which names that home's samples, 4 bytes a draw, and a hundred times an epoch how far its
readers have come; by the streams of `cluster`, one for each home and list.

All of it is soft state. What is lost is sent again with the next epoch; a reader of which nothing was heard for
SILENT_S is forgotten; and whatever a plan names wrongly costs room at its home, and nothing else. Only a home whose own
trainers have declared a list hears of plans for it: a list is known by the hash of its paths and labels.

A rank that exchanges samples reads in another order than its plan had. So its homes hear ten times an epoch what the
order is by then. (Two nodes with two jobs each, a fifth cached on each: they fetched 0.215 of what they read where
homes heard of the first order alone, 0.237 where they heard of none, 0.179 so, and 0.166 with twice as many words.)
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import trio

from spiderfs.cluster.link import Link
from spiderfs.core.engine import Engine
from spiderfs.core.homes import Homes
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.plans.schedule import LATER_EPOCHS
from spiderfs.core.policy import Key
from spiderfs.daemon.training.courses.courses import Course, Courses
from spiderfs.daemon.training.trainer import KnownList
from spiderfs.linux import steady_clock
from spiderfs.metrics import Counters
from spiderfs.protocol import Message, Plan, Progress, encode
from spiderfs.sources.node_names import HERE

_STREAM = "spiderfs:plans"
# How often it is seen how far readers have come; it is told when they are this share of an epoch further. Once in a
# fifth of an epoch would cost .05 of the data set (three jobs, a fifth cached on each node).
LOOK_S, TOLD_SHARE = 0.25, 0.01
# An order that exchanges have changed is told anew as often.
ORDER_SHARE = 0.1
# A training that pauses is heard of all the same, and one whose node says nothing is forgotten.
AGAIN_S, SILENT_S = 10.0, 30.0
# What finds no room on its link for so long is given up; it is looked for this often.
ROOM_S, ROOM_LOOK_S = 5.0, 0.02

Reader = tuple[int, str]
"""A trainer's number, and the name that it has given the list."""


class _Kept(NamedTuple):
    """The samples of a list whose home is here, under numbers of their own; -1 for all others."""

    list: KnownList
    edition: int
    """Of the homes."""
    number_of: npt.NDArray[np.int64]
    keys: Sequence[Key]
    index_of: dict[Key, int]


class _Said(NamedTuple):
    """What waits for room on the link."""

    stream: str
    message: Message
    given_up_s: float


@dataclass
class _Told:
    """What others have been told of a reader: by epoch and home, the positions that name its samples."""

    list: KnownList
    epochs: dict[int, dict[str, npt.NDArray[np.uint32]]] = field(default_factory=dict)
    ordered: int = 0
    """How far the reader was in its epoch when others were told of the order."""
    progress: tuple[int, int] = (-1, 0)
    told_s: float = 0.0


@dataclass
class _Heard:
    """When a reader elsewhere was heard of last, and in which epoch the schedule has it."""

    epoch: int
    at_s: float


class PlansElsewhere:
    """`followed` says whether plans are followed now."""

    def __init__(
        self,
        link: Link,
        homes: Homes,
        engine: Engine,
        courses: Courses,
        counters: Counters,
        followed: Callable[[], bool],
    ) -> None:
        self._link = link
        self._homes = homes
        self._engine = engine
        self._courses = courses
        self._counters = counters
        self._followed = followed
        self._told: dict[Reader, _Told] = {}
        self._said: deque[_Said] = deque()
        self._to_say = trio.Event()
        self._telling = trio.Lock()
        self._heard: dict[str, _Heard] = {}
        self._kept: dict[str, _Kept] = {}
        self._changed = trio.Event()

    # -- what this node says

    async def tell(self, trainer: int, known_list: KnownList, plan: Plan) -> None:
        """Tell each home of its part of a plan that the engine has now."""
        if not self._own:
            return
        order = known_list.one_of_file[plan.order]
        others = {place: home for place, home in enumerate(self._homes.members) if home and place != self._homes.own}

        def parts() -> dict[str, npt.NDArray[np.uint32]]:
            place_of = np.where(known_list.inodes != 0, self._homes.of_all(known_list.inodes), -1)[order]
            return {home: np.flatnonzero(place_of == place).astype(np.uint32) for place, home in others.items()}

        # What is told later may not pass by: a lower epoch begins another training.
        async with self._telling:
            positions = await trio.to_thread.run_sync(parts)
        told = self._told.get((trainer, plan.list))
        if told is None or told.list.digest != known_list.digest:
            told = self._told[trainer, plan.list] = _Told(known_list)
        epochs = {**told.epochs, plan.epoch: positions}
        # As many as the schedule keeps, here and at the homes: of later ones they are told when these begin.
        kept = sorted(epoch for epoch in epochs if epoch >= plan.epoch or not plan.begun)[: 1 + LATER_EPOCHS]
        told.list, told.epochs = known_list, {epoch: epochs[epoch] for epoch in kept}
        if plan.begun:
            told.ordered = plan.position
        if plan.epoch not in kept:
            return
        for home, its in positions.items():
            start = int(np.searchsorted(its, plan.position))
            self._send(home, told, Plan(self._name((trainer, plan.list)), plan.epoch, start, plan.begun, order[its]))
        self._changed.set()

    @property
    def _own(self) -> str:
        """This node's name; empty while it is no member, or where the homes are no nodes."""
        own = self._homes.members[self._homes.own]
        return "" if own == HERE else own

    def _send(self, home: str, told: _Told, message: Message) -> None:
        self._said.append(_Said(_stream(home, told.list.digest), message, steady_clock.now() + ROOM_S))
        self._to_say.set()

    async def _say_all(self) -> None:
        """Give the link what is said, in order: parts of long plans would push out each other, and trainers' rows."""
        while True:
            if not self._said:
                self._to_say = trio.Event()
                await self._to_say.wait()
            stream, message, given_up_s = self._said.popleft()
            frame = encode(message)
            while not (has_room := self._link.has_room(frame)) and steady_clock.now() < given_up_s:
                await trio.sleep(ROOM_LOOK_S)
            if has_room:
                self._link.send(stream, frame)
            elif isinstance(message, Plan):
                self._counters.add("cluster_plans_lost")
            # Requests of trainers come between long parts.
            await trio.lowlevel.checkpoint()

    def _name(self, reader: Reader) -> str:
        return f"{self._own} {reader[0]} {zlib.crc32(reader[1].encode()):08x}"

    async def _tell_progress(self, reader: Reader, now_s: float) -> None:
        told, planned = self._told[reader], self._engine.schedule.readers.get(reader)
        if planned is None:
            for home in next(iter(told.epochs.values())):
                self._send(home, told, Plan(self._name(reader), 0, 0, True, np.empty(0, np.uint32)))
            del self._told[reader]
            return
        number, dispatched = planned.epoch.number, planned.dispatched
        before = told.progress[1] if told.progress[0] == number else -math.inf
        step = 1 if dispatched == len(planned.epoch) else max(1, TOLD_SHARE * len(planned.epoch))
        if dispatched < before + step and now_s < told.told_s + AGAIN_S:
            return
        told.progress, told.told_s = (number, dispatched), now_s
        told.epochs = {epoch: parts for epoch, parts in told.epochs.items() if epoch >= number} or told.epochs
        ordered = told.ordered + ORDER_SHARE * len(planned.epoch)
        if planned.exchanges and ordered <= dispatched < len(planned.epoch):
            plan = Plan(reader[1], number, dispatched, True, planned.epoch.order.copy())
            await self.tell(reader[0], told.list, plan)
        for home, positions in told.epochs.get(number, {}).items():
            # What is dispatched was asked for, or will be at once.
            come = int(np.searchsorted(positions, dispatched))
            self._send(home, told, Progress(self._name(reader), number, come, come))

    # -- what it hears

    def wanted(self) -> dict[str, Course]:
        """For each list of which plans are to be heard now a course of it, by its stream."""
        follows = self._own and self._followed()
        by_digest = {course.list.digest: course for course in self._courses} if follows else {}
        self._kept = {digest: kept for digest, kept in self._kept.items() if digest in by_digest}
        return {_stream(self._own, digest): course for digest, course in by_digest.items()}

    async def hear(self, known_list: KnownList, heard: Sequence[Message]) -> None:
        now_s, changed = steady_clock.now(), False
        for part in heard:
            match part:
                case Plan(begun=True, order=order) if not len(order):
                    changed |= self._forget([part.list])
                case Plan():
                    epoch = await trio.to_thread.run_sync(self._planned, known_list, part)
                    self._engine.plan_elsewhere(part.list, epoch, now_s, part.begun)
                    self._counters.add("cluster_plans_heard")
                    changed = True
                    known = self._heard.get(part.list)
                    in_epoch = part.epoch if known is None or part.begun else known.epoch
                    self._heard[part.list] = _Heard(in_epoch, now_s)
                # Of another epoch, it says that the plan that its home has is none of its reader's any more.
                case Progress() if (known := self._heard.get(part.list)) is not None and known.epoch == part.epoch:
                    self._engine.progressed_elsewhere(part.list, part.epoch, part.dispatched, now_s)
                    known.at_s = now_s
        # Once for all that came: with many nodes and members it takes seconds.
        if changed:
            self._engine.rank_anew()
        self._changed.set()

    def _planned(self, known_list: KnownList, plan: Plan) -> PlannedEpoch:
        kept, edition = self._kept.get(known_list.digest), self._homes.edition
        if kept is None or kept.list is not known_list or kept.edition != edition:
            here = (known_list.inodes != 0) & (self._homes.of_all(known_list.inodes) == self._homes.own)
            number_of = np.where(here, np.cumsum(here) - 1, -1)
            keys: list[Key] = known_list.inodes[here].tolist()
            kept = self._kept[known_list.digest] = _Kept(
                known_list, edition, number_of, keys, dict(zip(keys, range(len(keys)), strict=True))
            )
        numbers = kept.number_of[plan.order]
        # A node that goes by another list of members names samples of other homes too.
        order = numbers[numbers >= 0].astype(np.uint32)
        start = int((numbers[: plan.position] >= 0).sum())
        return PlannedEpoch(plan.epoch, kept.keys, kept.index_of, order, start)

    def _forget(self, readers: Sequence[str]) -> bool:
        """Drop these readers' plans; whether any had one: then the caller ranks the members anew, once for all."""
        known = [reader for reader in readers if self._heard.pop(reader, None) is not None]
        for reader in known:
            self._engine.unplan_elsewhere(reader)
        return bool(known)

    # -- now and then

    async def run(self) -> None:
        """Tell how far readers have come, and forget those of silent nodes, for as long as the mount lasts."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._say_all)
            await self._look_all()

    async def _look_all(self) -> None:
        while True:
            self._changed = trio.Event()
            if not self._told and not self._heard:
                await self._changed.wait()
            now_s = steady_clock.now()
            for reader in list(self._told):
                await self._tell_progress(reader, now_s)
            followed, heard = self._followed(), self._heard.items()
            if self._forget([reader for reader, last in heard if now_s > last.at_s + SILENT_S or not followed]):
                self._engine.rank_anew()
            await trio.sleep(LOOK_S)


def _stream(home: str, digest: str) -> str:
    return f"{_STREAM}:{home}:{digest}"
