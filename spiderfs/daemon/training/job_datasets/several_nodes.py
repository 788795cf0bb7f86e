"""One training on several nodes, and several jobs on one list: scores and remote plans, by streams of a server.

**Scores** (`SeveralNodes`). The mount of rank 0 scores the rows of all ranks, because a score depends on all others.
The others send it their rows, matched with the samples that were served, and apply the scores and hubs that it returns.
A mount that has received no scores scores the rows of its own ranks; one that has received some keeps these, because
scores of a part of the rows are worse than older ones of all. The rows of one epoch have to be scored alike. So rank
0's end of an epoch takes effect when all ranks on other nodes have sent `RankEnded`, or after LATE_S; rows of the next
epoch wait until then. No trainer waits: it gets the current scores.

**Plans** (`RemotePlans`). A home with the plans of all jobs keeps the samples with the earliest next use. When a reader
begins an epoch, its node sends each home the part of the plan with that home's samples, 4 bytes a draw, then its
progress a hundred times an epoch, and a new order ten times if it exchanges. (Two nodes with two jobs each, a fifth
cached on each, fetched 0.215 of what they read with the first order alone, 0.237 without plans, 0.179 with ten updates,
and 0.166 with twenty.) All of it is soft state: a reader is forgotten after SILENT_S without a message, and a wrong
plan costs room at the home and nothing else. Only a home whose own trainers have declared a list (a hash of paths and
labels) reads its plans.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt
import trio

from spiderfs.cluster import Link, LinkStatus, PlanPiece, RankEnded, SharedHub, SharedScores, unpacked
from spiderfs.core.engine import Engine
from spiderfs.core.homes import Homes
from spiderfs.core.plans.remote import HomeSamples, PlanPart
from spiderfs.daemon.training.job_datasets.job_datasets import JobDataset, JobDatasets
from spiderfs.daemon.training.job_datasets.trainers import Trainers
from spiderfs.daemon.training.trainer import KnownList, Trainer
from spiderfs.errors import ProtocolError, SpiderfsError
from spiderfs.linux import steady_clock
from spiderfs.metrics import Counters
from spiderfs.protocol import Batch, Message, Plan, Progress, encode
from spiderfs.sources.node_names import HERE

_STREAM = "spiderfs:plans"
# How often the readers' progress is looked at; it is sent when they are this share of an epoch further. Once in a fifth
# of an epoch would cost .05 of the data set (three jobs, a fifth cached on each node).
LOOK_S, PROGRESS_SHARE = 0.25, 0.01
# An order that exchanges have changed is sent again as often.
ORDER_SHARE = 0.1
# The progress of a training that pauses is sent again after the first time, and a reader whose node sends nothing is
# forgotten after the second. One node may notice half a minute later than another that a server is back
# (`spiderfs/cluster.py`).
AGAIN_S, SILENT_S = 10.0, 45.0
# A piece is 256 KiB: a stream holds 128 of them (`spiderfs/cluster.py`). No node adds one to FEW or more messages, so
# that as many nodes may do so at the same time as have room beside these.
PIECE_DRAWS, FEW = 1 << 16, 32
# Messages for a stream that has no room for so long are given up. Room is looked for no more often than this, because
# to ask how many messages there are costs as much as two of them.
ROOM_S, ROOM_LOOK_S = 5.0, 0.25
# How many members are ranked again at a time, in some milliseconds, and how many times as long the loop is left alone.
RANKED, RESTS = 500, 2.0

Reader = tuple[int, str]
"""A trainer's number, and the name that it has given the list."""


@dataclass
class _Queue:
    """Since when nothing of a stream could go, what waits for it, and when room was looked for in vain last."""

    since_s: float
    messages: deque[Message] = field(default_factory=deque)
    looked_s: float = -math.inf


@dataclass
class _OutgoingPlan:
    """What other nodes have received of a reader's epoch: by home, the positions that name its samples."""

    list: KnownList
    epoch: int
    ordered: int
    """How far the reader was when the order was sent."""
    positions: dict[str, npt.NDArray[np.uint32]]
    dispatched: float = -math.inf
    sent_s: float = -math.inf


@dataclass
class _IncomingPlan:
    """When the last message of a reader on another node came, and the pieces of its plan; None if one is lost."""

    epoch: int
    at_s: float
    pieces: list[npt.NDArray[np.uint32]] | None = None
    draws: int = 0
    """How many have come."""


class RemotePlans:
    """`followed` says whether plans are followed now."""

    def __init__(
        self,
        link: Link,
        homes: Homes,
        engine: Engine,
        job_datasets: JobDatasets,
        counters: Counters,
        followed: Callable[[], bool],
    ) -> None:
        self._link, self._homes, self._engine = link, homes, engine
        self._job_datasets, self._counters, self._followed = job_datasets, counters, followed
        self._outgoing: dict[Reader, _OutgoingPlan] = {}
        self._queues: dict[str, _Queue] = {}
        self._to_send = trio.Event()
        self._sending = trio.Lock()
        self._incoming: dict[str, _IncomingPlan] = {}
        # By its digest: a list, and its samples whose home is here by this edition of the homes.
        self._kept: dict[str, tuple[KnownList, int, HomeSamples]] = {}
        self._changed, self._to_rank = trio.Event(), trio.Event()

    async def send(self, trainer: int, known_list: KnownList, plan: Plan) -> None:
        """Send each home its part of a plan that the engine has now, if its epoch begins."""
        # The plan of a later epoch says of a home's samples only that they will be read some time, as all of them are.
        if not self._own or not plan.begun:
            return
        others = {place: home for place, home in enumerate(self._homes.members) if home and place != self._homes.own}

        def parts() -> tuple[npt.NDArray[np.uint32], dict[str, npt.NDArray[np.uint32]]]:
            order = known_list.one_of_file[plan.order]
            place_of = np.where(known_list.inodes != 0, self._homes.of_all(known_list.inodes), -1).astype(np.int16)
            places = place_of[order]
            return order, {home: np.flatnonzero(places == place).astype(np.uint32) for place, home in others.items()}

        # Plans are sent in order: a lower epoch begins another training.
        async with self._sending:
            order, positions = await trio.to_thread.run_sync(parts)
        named = {home: its for home, its in positions.items() if len(its)}
        self._outgoing[trainer, plan.list] = _OutgoingPlan(known_list, plan.epoch, plan.position, named)
        name = self._name((trainer, plan.list))
        for home in positions.keys() - named.keys():
            self._send_no_plan(home, known_list, name, plan.epoch)
        for home, its in named.items():
            start = int(np.searchsorted(its, plan.position))
            stream = _plan_stream(home, known_list.digest)
            for first in range(0, len(its), PIECE_DRAWS):
                piece = order[its[first : first + PIECE_DRAWS]]
                self._enqueue(stream, PlanPiece(name, plan.epoch, start, len(its), first, piece))
        self._changed.set()

    @property
    def _own(self) -> str:
        """This node's name; empty while it is no member, or where the homes are no nodes."""
        own = self._homes.members[self._homes.own]
        return "" if own == HERE else own

    def _enqueue(self, stream: str, message: Message) -> None:
        if stream not in self._queues:
            self._queues[stream] = _Queue(since_s=steady_clock.now())
        self._queues[stream].messages.append(message)
        self._to_send.set()

    def _send_no_plan(self, home: str, known_list: KnownList, reader: str, epoch: int) -> None:
        self._enqueue(_plan_stream(home, known_list.digest), PlanPiece(reader, epoch, 0, 0, 0, np.empty(0, np.uint32)))

    async def _send_all(self) -> None:
        """Send what waits, for each stream in order, and in turn for all: one without room keeps no other waiting."""
        while True:
            if not self._queues:
                self._to_send = trio.Event()
                await self._to_send.wait()
            is_moving = False
            for stream, queue in list(self._queues.items()):
                is_moving |= await self._send_next(stream, queue)
            if not is_moving:
                await trio.sleep(ROOM_LOOK_S)

    async def _send_next(self, stream: str, queue: _Queue) -> bool:
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
        """Drop the plans that wait for a stream: no one reads it, or the server fails."""
        given_up = self._queues.pop(stream).messages
        lost = {(piece.reader, piece.epoch) for piece in given_up if isinstance(piece, PlanPiece) and piece.draws}
        for reader, sent in self._outgoing.items():
            if (self._name(reader), sent.epoch) in lost:
                sent.positions = {
                    home: its for home, its in sent.positions.items() if _plan_stream(home, sent.list.digest) != stream
                }
        if not self._link.status().up:
            self._counters.add("cluster_plans_lost", len(lost))
            return
        for name, epoch in sorted(lost):
            # A home that does read the stream, and is slow, counts them by this.
            self._link.send(stream, encode(Progress(name, epoch, 0, 0)))

    def _name(self, reader: Reader) -> str:
        return f"{self._own} {reader[0]} {zlib.crc32(reader[1].encode()):08x}"

    async def _send_progress(self, reader: Reader, now_s: float) -> None:
        sent, planned = self._outgoing[reader], self._engine.schedule.readers.get(reader)
        if planned is None:
            for home in sent.positions:
                self._send_no_plan(home, sent.list, self._name(reader), sent.epoch)
            del self._outgoing[reader]
            return
        dispatched = planned.dispatched
        step = 1 if dispatched == len(planned.epoch) else max(1, PROGRESS_SHARE * len(planned.epoch))
        if planned.epoch.number != sent.epoch or (
            dispatched < sent.dispatched + step and now_s < sent.sent_s + AGAIN_S
        ):
            return
        ordered = sent.ordered + ORDER_SHARE * len(planned.epoch)
        if planned.exchanges and ordered <= dispatched < len(planned.epoch):
            plan = Plan(reader[1], sent.epoch, dispatched, True, planned.epoch.order.copy())
            await self.send(reader[0], sent.list, plan)
            return
        sent.dispatched, sent.sent_s = dispatched, now_s
        for home, positions in sent.positions.items():
            # What is dispatched was asked for, or will be at once.
            come = int(np.searchsorted(positions, dispatched))
            self._enqueue(_plan_stream(home, sent.list.digest), Progress(self._name(reader), sent.epoch, come, come))

    def wanted(self) -> dict[str, JobDataset]:
        """A job dataset of each list whose plans are to be received now, by its stream."""
        follows = self._own and self._followed()
        by_digest = {job_dataset.list.digest: job_dataset for job_dataset in self._job_datasets} if follows else {}
        self._kept = {digest: kept for digest, kept in self._kept.items() if digest in by_digest}
        return {_plan_stream(self._own, digest): job_dataset for digest, job_dataset in by_digest.items()}

    async def receive(self, known_list: KnownList, messages: Sequence[Message]) -> None:
        for part in messages:
            now_s = steady_clock.now()
            match part:
                case PlanPiece(draws=0):
                    self._forget(part.reader)
                case PlanPiece():
                    if (order := self._order_with(part, now_s)) is not None:
                        await self._take(known_list, part, order)
                case Progress(list=reader, epoch=epoch, dispatched=position):
                    known = self._incoming.get(reader)
                    if self._engine.schedule.remote.progressed(reader, epoch, position, now_s):
                        if known is not None:
                            known.at_s = now_s
                    elif known is None or known.epoch <= epoch:
                        # The plan that its home has is none of its reader's any more.
                        self._engine.schedule.remote.drop(reader)
                        if known is None or known.epoch < epoch:
                            # All pieces of its plan are lost.
                            known = self._incoming[reader] = _IncomingPlan(epoch, now_s)
                            self._counters.add("cluster_plans_lost")
                        known.at_s = now_s
            self._to_rank.set()
            await trio.lowlevel.checkpoint()
        self._changed.set()

    def _order_with(self, piece: PlanPiece, now_s: float) -> npt.NDArray[np.uint32] | None:
        """The draws of a plan that is whole with this piece."""
        known = self._incoming.get(piece.reader)
        if piece.first == 0:
            if known is not None and known.pieces:
                # The rest of the plan before has not come.
                self._counters.add("cluster_plans_lost")
            known = self._incoming[piece.reader] = _IncomingPlan(piece.epoch, now_s, [])
        if known is None or known.epoch != piece.epoch or known.draws != piece.first or known.pieces is None:
            if known is None or known.epoch != piece.epoch or known.pieces is not None:
                self._incoming[piece.reader] = _IncomingPlan(piece.epoch, now_s)
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
        known = self._incoming.get(last.reader)
        part = await trio.to_thread.run_sync(self._planned, known_list, last, order)
        if self._incoming.get(last.reader) is not known:
            # It was forgotten meanwhile.
            return
        for _ in self._engine.schedule.remote.plan(last.reader, part, steady_clock.now()):
            await trio.lowlevel.checkpoint()
        self._counters.add("cluster_plans_received")

    def _planned(self, known_list: KnownList, plan: PlanPiece, named: npt.NDArray[np.uint32]) -> PlanPart:
        kept, edition = self._kept.get(known_list.digest), self._homes.edition
        if kept is None or kept[:2] != (known_list, edition):
            here = (known_list.inodes != 0) & (self._homes.of_all(known_list.inodes) == self._homes.own)
            kept = known_list, edition, HomeSamples(known_list.keys, known_list.index_of, here)
            self._kept[known_list.digest] = kept
        numbers = kept[2].number_of[named]
        # A node that goes by another list of members names samples of other homes too.
        known = np.flatnonzero(numbers >= 0).astype(np.uint32)
        in_plan = known if len(known) < len(numbers) else None
        return PlanPart(kept[2], plan.epoch, numbers[known].astype(np.uint32), plan.start, in_plan)

    def _forget(self, reader: str) -> None:
        self._incoming.pop(reader, None)
        self._engine.schedule.remote.drop(reader)
        self._to_rank.set()

    async def run(self) -> None:
        """Send readers' progress, and forget readers of silent nodes, for as long as the mount lasts."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_all)
            nursery.start_soon(self._rank_all)
            await self._look_all()

    async def _rank_all(self) -> None:
        """Rank members whose next use has changed, when a message came, or when paces have been compared."""
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
            if not self._outgoing and not self._incoming:
                await self._changed.wait()
            now_s = steady_clock.now()
            for reader in list(self._outgoing):
                await self._send_progress(reader, now_s)
            followed, is_up = self._followed(), self._link.status().up
            for name, last in list(self._incoming.items()):
                if not is_up:
                    last.at_s = now_s
                if now_s > last.at_s + SILENT_S or not followed:
                    self._forget(name)
            await trio.sleep(LOOK_S)


def _plan_stream(home: str, digest: str) -> str:
    return f"{_STREAM}:{home}:{digest}"


log = logging.getLogger(__name__)

# A user of the server may be limited to `spiderfs:*`.
_ROWS, _SCORES = "spiderfs:rows", "spiderfs:scores"
# No trainer of this mount has this number.
_NO_TRAINER = 0
# As of a full disk. A trainer would get them as errors; the manager goes on.
_FAILURES = (SpiderfsError, OSError)
# Rows that come this long after an end of an epoch count for the next one. Meanwhile the next one's wait in backlogs,
# which have room for three seconds.
LATE_S = 2.0


class Learner(Protocol):
    """What learns from the messages of other nodes; `scoring` is the one that the present policy goes by."""

    @property
    def scoring(self) -> str: ...

    async def learn(self, trainer: int, job_dataset: JobDataset, batches: Sequence[Batch]) -> None: ...

    async def adopt(self, job_dataset: JobDataset, scores: SharedScores, hubs: Iterable[SharedHub]) -> None: ...


@dataclass
class _Ending:
    """An epoch that rank 0 has ended, and not all ranks on other nodes."""

    epoch: int
    act: Callable[[], Awaitable[None]]
    all_ended: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)


@dataclass
class _Job:
    """How far the ranks of a job are, as far as this node has received it."""

    sent_to: str | None = None
    """The stream to which the last rows of this node's ranks went."""
    epoch: int | None = None
    """The epoch whose rows are scored now."""
    ended: dict[int, int] = field(default_factory=dict)
    """The last epoch that each rank on other nodes has ended."""
    ending: _Ending | None = None
    early: list[tuple[JobDataset, Batch]] = field(default_factory=list)
    """Rows of ranks on other nodes that are of a later epoch."""


class SeveralNodes:
    def __init__(self, link: Link | None, job_datasets: JobDatasets, trainers: Trainers, counters: Counters) -> None:
        """Without a `link` nothing is sent and nothing received."""
        self._link, self._job_datasets, self._trainers = link, job_datasets, trainers
        self._counters = counters
        # The job datasets of which another node's scores have come.
        self._scored_remotely: set[str] = set()
        self._warned_of: set[tuple[str, str]] = set()
        self._jobs: defaultdict[str, _Job] = defaultdict(_Job)
        self._nursery: trio.Nursery | None = None

    def link_status(self) -> LinkStatus | None:
        return None if self._link is None else self._link.status()

    def follows(self, job_dataset: JobDataset) -> bool:
        """Whether another node is to score the rows of this job dataset, which this one sends it."""
        return self._link is not None and self._trainers.scores_for_all(job_dataset.job_id) is False

    def send(self, job_dataset: JobDataset, scoring: str, batches: Sequence[Batch]) -> bool:
        """Send rows to the node that scores for all; returns whether scores of it have come."""
        assert self._link is not None
        rows = sum(len(batch.indices) for batch in batches)
        stream = self._jobs[job_dataset.job_id].sent_to = _stream(_ROWS, scoring, job_dataset)
        self._link.send(stream, b"".join(map(encode, batches)), rows)
        return job_dataset.job_dataset_id in self._scored_remotely

    def publish(self, job_dataset: JobDataset, scoring: str, scores: SharedScores, hubs: Iterable[SharedHub]) -> None:
        """Send scores to the other nodes, if this one makes them for all."""
        if self._link is not None and len(scores.ids) and self._trainers.scores_for_all(job_dataset.job_id):
            self._link.send(_stream(_SCORES, scoring, job_dataset), b"".join(map(encode, (scores, *hubs))))

    def send_ended(self, trainer: Trainer, epoch: int) -> None:
        """Let the node that scores for all know that this rank has sent its last row of an epoch."""
        if self._link is not None and (stream := self._jobs[trainer.job_id].sent_to) is not None:
            self._link.send(stream, encode(RankEnded(trainer.rank, epoch)))

    def left(self, trainer: Trainer) -> None:
        """A trainer has gone. With rank 0 goes what was received of its job: it may begin again at an earlier epoch."""
        if trainer.rank == 0:
            self._jobs.pop(trainer.job_id, None)
        self.look_again()

    def look_again(self) -> None:
        """The streams that this node wants to receive may have changed."""
        if self._link is not None:
            self._link.look_again()

    async def once_all_ended(self, job_id: str, epoch: int, act: Callable[[], Awaitable[None]]) -> None:
        """Have `act` called when the job's ranks on other nodes have ended this epoch too: now, or soon, by `run`."""
        if self._nursery is None or not self._trainers.scores_for_all(job_id):
            await act()
            return
        job = self._jobs[job_id]
        if job.ending is not None:
            job.ending.all_ended.set()
            await job.ending.over.wait()
        job.ending = _Ending(epoch, act)
        self._nursery.start_soon(self._end, job_id, job, job.ending)

    async def until_in_turn(self, job_id: str, epoch: int) -> None:
        """Wait until rows of this epoch, of a rank of this node, are to be scored."""
        if self._link is not None:
            job = self._jobs[job_id]
            if job.ending is not None and epoch > job.ending.epoch:
                await job.ending.over.wait()
            job.epoch = epoch if job.epoch is None else max(job.epoch, epoch)

    def _all_ended(self, job_id: str, job: _Job, epoch: int) -> bool:
        return all(job.ended.get(rank, -1) >= epoch for rank in self._trainers.remote_ranks(job_id))

    async def _end(self, job_id: str, job: _Job, ending: _Ending) -> None:
        assert self._link is not None
        if self._link.status().up and not self._all_ended(job_id, job, ending.epoch):
            with trio.move_on_after(LATE_S):
                await ending.all_ended.wait()
        try:
            await ending.act()
        except _FAILURES as exc:
            # No trainer waits for an answer, and the next epoch goes on.
            log.warning("an epoch of job %s could not be ended (%s)", job_id, exc)
        job.ending, job.epoch = None, ending.epoch + 1
        await self._learn_early(job)
        ending.over.set()

    async def _learn_early(self, job: _Job) -> None:
        early, job.early = job.early, []
        for job_dataset, some in groupby(early, lambda one: one[0]):
            await self._receive_rows(job_dataset, [batch for _, batch in some])

    async def _end_waiting(self, job: _Job, early: list[tuple[JobDataset, Batch]]) -> None:
        """Rank 0 may end no epochs, or count them otherwise: then its end is waited for no more."""
        await trio.sleep(LATE_S)
        if job.early is early and job.ending is None:
            job.epoch = max(batch.epoch for _, batch in early)
            await self._learn_early(job)

    async def run(
        self, learner: Learner, publish: Callable[[], Awaitable[None]], plans: RemotePlans | None = None
    ) -> None:
        """Receive from other nodes while the mount lasts, and `publish` what readers are to know; `plans` if shared."""
        self._learner = learner

        def planned() -> dict[str, JobDataset]:
            return {} if plans is None else plans.wanted()

        def wanted() -> dict[str, JobDataset]:
            return self._wanted(learner.scoring) | planned()

        async def receive(stream: str, messages: Sequence[bytes]) -> bool:
            of_plans = planned()
            if (job_dataset := (self._wanted(learner.scoring) | of_plans).get(stream)) is None:
                return False
            parts = []
            for message in messages:
                parts.append(self._unpacked(job_dataset, message))
                # Requests of trainers come between: a hundred messages may have 30 MB.
                await trio.lowlevel.checkpoint()
            if plans is not None and stream in of_plans:
                await plans.receive(job_dataset.list, [part for some in parts for part in some])
                return True
            if stream.startswith(_ROWS):
                await self._receive_rows(job_dataset, [part for some in parts for part in some])
            else:
                await self._receive_scores(learner, job_dataset, parts)
            await publish()
            # No one else has to receive the rows that are scored here.
            return stream.startswith(_ROWS)

        if self._link is not None:
            async with trio.open_nursery() as self._nursery:
                if plans is not None:
                    self._nursery.start_soon(plans.run)
                await self._link.run(wanted, receive)

    def _wanted(self, scoring: str) -> dict[str, JobDataset]:
        """The job datasets of which something is to be received now, by their streams."""
        # What was received of a job that is over says nothing of one that comes back.
        self._scored_remotely.intersection_update(job_dataset.job_dataset_id for job_dataset in self._job_datasets)
        for job_id in self._jobs.keys() - {job_dataset.job_id for job_dataset in self._job_datasets}:
            del self._jobs[job_id]
        found = {}
        for job_dataset in self._job_datasets:
            if (scores_for_all := self._trainers.scores_for_all(job_dataset.job_id)) is not None:
                found[_stream(_ROWS if scores_for_all else _SCORES, scoring, job_dataset)] = job_dataset
        return found

    async def _receive_rows(self, job_dataset: JobDataset, messages: Sequence[Message]) -> None:
        job, in_turn = self._jobs[job_dataset.job_id], list[Batch]()
        for part in messages:
            if isinstance(part, RankEnded):
                job.ended[part.rank] = part.epoch
            elif isinstance(part, Batch) and job.epoch is not None and part.epoch > job.epoch:
                job.early.append((job_dataset, part))
                if len(job.early) == 1 and self._nursery is not None:
                    self._nursery.start_soon(self._end_waiting, job, job.early)
            elif isinstance(part, Batch):
                in_turn.append(part)
        for _, alike in groupby(in_turn, lambda batch: (batch.embeddings.shape[1], batch.losses is None)):
            some = list(alike)
            try:
                await self._learner.learn(_NO_TRAINER, job_dataset, some)
            except _FAILURES as exc:
                self._warn_once(job_dataset, "rows that other mounts of job %s have sent are left out (%s)", exc)
                continue
            self._counters.add("cluster_rows_received", sum(len(batch.indices) for batch in some))
        if job.ending is not None and self._all_ended(job_dataset.job_id, job, job.ending.epoch):
            job.ending.all_ended.set()

    async def _receive_scores(
        self, learner: Learner, job_dataset: JobDataset, messages: Sequence[Sequence[Message]]
    ) -> None:
        for parts in messages:
            hubs = [part for part in parts if isinstance(part, SharedHub)]
            for scores in (part for part in parts if isinstance(part, SharedScores)):
                self._scored_remotely.add(job_dataset.job_dataset_id)
                try:
                    await learner.adopt(job_dataset, scores, hubs)
                except _FAILURES as exc:
                    self._warn_once(job_dataset, "scores that another mount of job %s has sent are left out (%s)", exc)
                    continue
                self._counters.add("cluster_scores_received", len(scores.ids))

    def _unpacked(self, job_dataset: JobDataset, message: bytes) -> list[Message]:
        """The parts of a message; none if it is wrong."""
        try:
            return unpacked(message, len(job_dataset.list.keys))
        except ProtocolError as exc:
            self._warn_once(job_dataset, "a message of another mount of job %s is invalid (%s)", exc)
            return []

    def _warn_once(self, job_dataset: JobDataset, text: str, exc: Exception) -> None:
        """Log a trouble once for each job dataset: it may come with every message."""
        if (job_dataset.job_dataset_id, text) not in self._warned_of:
            self._warned_of.add((job_dataset.job_dataset_id, text))
            log.warning(text, job_dataset.job_id, exc)


def _stream(what: str, scoring: str, job_dataset: JobDataset) -> str:
    return f"{what}:{scoring}:{job_dataset.job_dataset_id}"
