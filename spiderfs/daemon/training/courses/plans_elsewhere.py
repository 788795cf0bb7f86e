"""Plans of jobs on other nodes: what the home of a sample hears of them, and tells the other homes of its own.

Where nodes share out the samples (`sources/members.py`), several jobs may read one list, each on its node. A home that
knows all their plans keeps, of the samples that it has for all, those that any of them reads next. So when a reader
begins an epoch its node sends each home that part of the plan which names that home's samples, 4 bytes a draw, and a
hundred times an epoch how far the reader has come; by the streams of `cluster`, one for each home and list. Parts go in
pieces, and none goes to a stream in which as many wait as are sure not to push each other out: a home without a
trainer of the list hears nothing, and its stream stays small. What a home hears it notes, and ranks its members by,
some samples at a time, for there are millions (`core/plans/elsewhere.py`).

All of it is soft state. What is lost is sent again with the next epoch; a reader of which nothing was heard for
SILENT_S is forgotten, if the server could be heard meanwhile; and whatever a plan names wrongly costs room at its home,
and nothing else. Only a home whose own trainers have declared a list hears of plans for it: a list is known by the hash
of its paths and labels.

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
from spiderfs.cluster.messages import PlanPiece
from spiderfs.core.engine import Engine
from spiderfs.core.homes import Homes
from spiderfs.core.plans.elsewhere import HomeSamples, PlanPart
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
# A training that pauses is heard of all the same, and one whose node says nothing is forgotten. A server that is back
# may be noticed by one node half a minute later than by another (`cluster/link.py`).
AGAIN_S, SILENT_S = 10.0, 45.0
# A piece is 256 KiB: a stream holds 128 of them (`cluster/stream.py`). No node adds one to FEW or more messages, so
# that as many nodes may do so at the same time as have room beside these.
PIECE_DRAWS, FEW = 1 << 16, 32
# What is for a stream that has no room for so long is given up; it is looked for this often, for to be told how many
# messages there are costs two of them.
ROOM_S, ROOM_LOOK_S = 5.0, 0.25
# How many members are ranked anew at a time, in some milliseconds, and how many times as long the loop is left alone.
RANKED, RESTS = 500, 2.0

Reader = tuple[int, str]
"""A trainer's number, and the name that it has given the list."""


class _Kept(NamedTuple):
    """The samples of a list whose home is here, by this edition of the homes."""

    list: KnownList
    edition: int
    samples: HomeSamples


@dataclass
class _Queue:
    """What waits for a stream, since when nothing of it could go, and when room was looked for in vain last."""

    messages: deque[Message] = field(default_factory=deque)
    since_s: float = 0.0
    looked_s: float = -math.inf


@dataclass
class _Told:
    """What others have been told of a reader's epoch: by home, the positions that name its samples."""

    list: KnownList
    epoch: int
    ordered: int
    """How far the reader was when others were told of the order."""
    positions: dict[str, npt.NDArray[np.uint32]]
    dispatched: float = -math.inf
    told_s: float = 0.0


@dataclass
class _Heard:
    """When a reader elsewhere was heard of last, and the pieces of its plan that have come; None if one is lost."""

    epoch: int
    at_s: float
    pieces: list[npt.NDArray[np.uint32]] | None = None
    draws: int = 0
    """How many have come."""


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
        self._queues: dict[str, _Queue] = {}
        self._to_say = trio.Event()
        self._telling = trio.Lock()
        self._heard: dict[str, _Heard] = {}
        self._kept: dict[str, _Kept] = {}
        self._changed, self._to_rank = trio.Event(), trio.Event()

    # -- what this node says

    async def tell(self, trainer: int, known_list: KnownList, plan: Plan) -> None:
        """Tell each home of its part of a plan that the engine has now, if its epoch begins."""
        # Of a later epoch a home would know what it knows of all its samples: that somebody reads them some time.
        if not self._own or not plan.begun:
            return
        others = {place: home for place, home in enumerate(self._homes.members) if home and place != self._homes.own}

        def parts() -> tuple[npt.NDArray[np.uint32], dict[str, npt.NDArray[np.uint32]]]:
            order = known_list.one_of_file[plan.order]
            place_of = np.where(known_list.inodes != 0, self._homes.of_all(known_list.inodes), -1).astype(np.int16)
            places = place_of[order]
            return order, {home: np.flatnonzero(places == place).astype(np.uint32) for place, home in others.items()}

        # What is told later may not pass by: a lower epoch begins another training.
        async with self._telling:
            order, positions = await trio.to_thread.run_sync(parts)
        named = {home: its for home, its in positions.items() if len(its)}
        self._told[trainer, plan.list] = _Told(known_list, plan.epoch, plan.position, named)
        name = self._name((trainer, plan.list))
        for home in positions.keys() - named.keys():
            self._say_no_plan(home, known_list, name, plan.epoch)
        for home, its in named.items():
            start = int(np.searchsorted(its, plan.position))
            stream = _stream(home, known_list.digest)
            for first in range(0, len(its), PIECE_DRAWS):
                piece = order[its[first : first + PIECE_DRAWS]]
                self._say(stream, PlanPiece(name, plan.epoch, start, len(its), first, piece))
        self._changed.set()

    @property
    def _own(self) -> str:
        """This node's name; empty while it is no member, or where the homes are no nodes."""
        own = self._homes.members[self._homes.own]
        return "" if own == HERE else own

    def _say(self, stream: str, message: Message) -> None:
        if stream not in self._queues:
            self._queues[stream] = _Queue(since_s=steady_clock.now())
        self._queues[stream].messages.append(message)
        self._to_say.set()

    def _say_no_plan(self, home: str, known_list: KnownList, reader: str, epoch: int) -> None:
        self._say(_stream(home, known_list.digest), PlanPiece(reader, epoch, 0, 0, 0, np.empty(0, np.uint32)))

    async def _say_all(self) -> None:
        """Send what waits, for each stream in order, and in turn for all: one without room keeps no other waiting."""
        while True:
            if not self._queues:
                self._to_say = trio.Event()
                await self._to_say.wait()
            is_moving = False
            for stream, queue in list(self._queues.items()):
                is_moving |= await self._say_next(stream, queue)
            if not is_moving:
                await trio.sleep(ROOM_LOOK_S)

    async def _say_next(self, stream: str, queue: _Queue) -> bool:
        message, now_s = queue.messages[0], steady_clock.now()
        if isinstance(message, Progress):
            self._link.send(stream, encode(message))
            # Nothing waited for it.
            await trio.lowlevel.checkpoint()
        elif now_s < queue.looked_s + ROOM_LOOK_S:
            await trio.lowlevel.checkpoint()
            return False
        elif not await self._link.offer(stream, encode(message), FEW):
            queue.looked_s = now_s
            if now_s > queue.since_s + ROOM_S:
                self._give_up(stream)
            return False
        queue.messages.popleft()
        queue.since_s = now_s
        if not queue.messages:
            del self._queues[stream]
        return True

    def _give_up(self, stream: str) -> None:
        """Say no more of the plans that wait for a stream: nobody hears it, or the server fails."""
        given_up = self._queues.pop(stream).messages
        lost = {(said.reader, said.epoch) for said in given_up if isinstance(said, PlanPiece) and said.draws}
        for reader, told in self._told.items():
            if (self._name(reader), told.epoch) in lost:
                told.positions = {
                    home: its for home, its in told.positions.items() if _stream(home, told.list.digest) != stream
                }
        if not self._link.status().up:
            self._counters.add("cluster_plans_lost", len(lost))
            return
        for name, epoch in sorted(lost):
            # A home that hears all the same, and is slow, counts them by this.
            self._link.send(stream, encode(Progress(name, epoch, 0, 0)))

    def _name(self, reader: Reader) -> str:
        return f"{self._own} {reader[0]} {zlib.crc32(reader[1].encode()):08x}"

    async def _tell_progress(self, reader: Reader, now_s: float) -> None:
        told, planned = self._told[reader], self._engine.schedule.readers.get(reader)
        if planned is None:
            for home in told.positions:
                self._say_no_plan(home, told.list, self._name(reader), told.epoch)
            del self._told[reader]
            return
        dispatched = planned.dispatched
        step = 1 if dispatched == len(planned.epoch) else max(1, TOLD_SHARE * len(planned.epoch))
        if planned.epoch.number != told.epoch or (
            dispatched < told.dispatched + step and now_s < told.told_s + AGAIN_S
        ):
            return
        ordered = told.ordered + ORDER_SHARE * len(planned.epoch)
        if planned.exchanges and ordered <= dispatched < len(planned.epoch):
            plan = Plan(reader[1], told.epoch, dispatched, True, planned.epoch.order.copy())
            await self.tell(reader[0], told.list, plan)
            return
        told.dispatched, told.told_s = dispatched, now_s
        for home, positions in told.positions.items():
            # What is dispatched was asked for, or will be at once.
            come = int(np.searchsorted(positions, dispatched))
            self._say(_stream(home, told.list.digest), Progress(self._name(reader), told.epoch, come, come))

    # -- what it hears

    def wanted(self) -> dict[str, Course]:
        """For each list of which plans are to be heard now a course of it, by its stream."""
        follows = self._own and self._followed()
        by_digest = {course.list.digest: course for course in self._courses} if follows else {}
        self._kept = {digest: kept for digest, kept in self._kept.items() if digest in by_digest}
        return {_stream(self._own, digest): course for digest, course in by_digest.items()}

    async def hear(self, known_list: KnownList, heard: Sequence[Message]) -> None:
        for part in heard:
            now_s = steady_clock.now()
            match part:
                case PlanPiece(draws=0):
                    self._forget(part.reader)
                case PlanPiece():
                    order = self._order_with(part, now_s)
                    if order is not None:
                        await self._take(known_list, part, order)
                case Progress(list=reader, epoch=epoch, dispatched=position):
                    known = self._heard.get(reader)
                    if self._engine.progressed_elsewhere(reader, epoch, position, now_s):
                        if known is not None:
                            known.at_s = now_s
                    elif known is None or known.epoch <= epoch:
                        # The plan that its home has is none of its reader's any more.
                        self._engine.unplan_elsewhere(reader)
                        if known is None or known.epoch < epoch:
                            # All pieces of its plan are lost.
                            known = self._heard[reader] = _Heard(epoch, now_s)
                            self._counters.add("cluster_plans_lost")
                        known.at_s = now_s
            self._to_rank.set()
            await trio.lowlevel.checkpoint()
        self._changed.set()

    def _order_with(self, piece: PlanPiece, now_s: float) -> npt.NDArray[np.uint32] | None:
        """The draws of a plan that is whole with this piece."""
        known = self._heard.get(piece.reader)
        if piece.first == 0:
            if known is not None and known.pieces:
                # The rest of the plan before has not come.
                self._counters.add("cluster_plans_lost")
            known = self._heard[piece.reader] = _Heard(piece.epoch, now_s, [])
        if known is None or known.epoch != piece.epoch or known.draws != piece.first or known.pieces is None:
            if known is None or known.epoch != piece.epoch or known.pieces is not None:
                self._heard[piece.reader] = _Heard(piece.epoch, now_s)
                self._counters.add("cluster_plans_lost")
            return None
        known.at_s = now_s
        known.pieces.append(piece.order)
        known.draws += len(piece.order)
        if known.draws < piece.draws:
            return None
        order, known.pieces = np.concatenate(known.pieces), []
        return order

    async def _take(self, known_list: KnownList, last: PlanPiece, order: npt.NDArray[np.uint32]) -> None:
        known = self._heard.get(last.reader)
        part = await trio.to_thread.run_sync(self._planned, known_list, last, order)
        if self._heard.get(last.reader) is not known:
            # It was forgotten meanwhile.
            return
        for _ in self._engine.plan_elsewhere(last.reader, part, steady_clock.now()):
            await trio.lowlevel.checkpoint()
        self._counters.add("cluster_plans_heard")

    def _planned(self, known_list: KnownList, plan: PlanPiece, named: npt.NDArray[np.uint32]) -> PlanPart:
        kept, edition = self._kept.get(known_list.digest), self._homes.edition
        if kept is None or kept.list is not known_list or kept.edition != edition:
            here = (known_list.inodes != 0) & (self._homes.of_all(known_list.inodes) == self._homes.own)
            samples = HomeSamples(known_list.keys, known_list.index_of, here)
            kept = self._kept[known_list.digest] = _Kept(known_list, edition, samples)
        numbers = kept.samples.number_of[named]
        # A node that goes by another list of members names samples of other homes too.
        known = np.flatnonzero(numbers >= 0).astype(np.uint32)
        told = known if len(known) < len(numbers) else None
        return PlanPart(kept.samples, plan.epoch, numbers[known].astype(np.uint32), plan.start, told)

    def _forget(self, reader: str) -> None:
        """Drop a reader's plan, if it has one."""
        self._heard.pop(reader, None)
        self._engine.unplan_elsewhere(reader)
        self._to_rank.set()

    # -- now and then

    async def run(self) -> None:
        """Tell how far readers have come, and forget those of silent nodes, for as long as the mount lasts."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._say_all)
            nursery.start_soon(self._rank_all)
            await self._look_all()

    async def _rank_all(self) -> None:
        """Rank members whose next use is another one, when something is heard, or when paces have been compared."""
        while True:
            self._to_rank = trio.Event()
            began_s = steady_clock.now()
            while self._engine.rank_some(RANKED):
                await trio.sleep(RESTS * (steady_clock.now() - began_s))
                began_s = steady_clock.now()
            with trio.move_on_after(AGAIN_S):
                await self._to_rank.wait()

    async def _look_all(self) -> None:
        while True:
            self._changed = trio.Event()
            if not self._told and not self._heard:
                await self._changed.wait()
            now_s = steady_clock.now()
            for reader in list(self._told):
                await self._tell_progress(reader, now_s)
            followed, hears = self._followed(), self._link.status().up
            for name, last in list(self._heard.items()):
                if not hears:
                    last.at_s = now_s
                if now_s > last.at_s + SILENT_S or not followed:
                    self._forget(name)
            await trio.sleep(LOOK_S)


def _stream(home: str, digest: str) -> str:
    return f"{_STREAM}:{home}:{digest}"
