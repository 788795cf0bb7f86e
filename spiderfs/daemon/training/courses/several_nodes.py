"""One training on several nodes, each with a mount of its own: who scores its rows, and how the others hear of that.

The mount that has rank 0 scores the rows of all ranks, for a score says where a sample lies among all others. The
others send it their rows, matched with the samples that were served (`scoring.py`), and take the scores and hubs that
it makes. All of that goes by streams of a server (`cluster/`): one of rows and one of scores for each scoring and
course, whose id is the same on all nodes.

Nothing depends on the server, nor on the other mounts. One that has heard no scores of a course scores the rows of its
own ranks, as it would without the option; one that has heard some keeps these, and learns nothing new meanwhile: the
scores of a part of the rows say less than the old ones of all.

Rows come some time after they were made, and those of one epoch have to be scored alike. So a word from each rank
follows its last row of an epoch, and rank 0's end of the epoch takes effect when all ranks elsewhere have said it, or
after LATE_S. Rows of the next epoch wait for that. No trainer does: it gets the scores of the moment.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import trio

from spiderfs.cluster.link import Link, LinkStatus
from spiderfs.cluster.messages import RankEnded, SharedHub, SharedScores, unpacked
from spiderfs.daemon.training.courses.courses import Course, Courses
from spiderfs.daemon.training.courses.plans_elsewhere import PlansElsewhere
from spiderfs.daemon.training.courses.trainers import Trainers
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.errors import ProtocolError, SpiderfsError
from spiderfs.metrics import Counters
from spiderfs.protocol import Batch, Message, encode

log = logging.getLogger(__name__)

# A user of the server may be limited to `spiderfs:*`.
_ROWS, _SCORES = "spiderfs:rows", "spiderfs:scores"
# No trainer of this mount has this number.
_NOBODY = 0
# As of a full disk. A trainer would be told of them; the manager goes on.
_FAILURES = (SpiderfsError, OSError)
# Rows that come this long after an end of an epoch count for the next one. Meanwhile the next one's wait in backlogs,
# which have room for three seconds.
LATE_S = 2.0


class Learner(Protocol):
    """What learns from the messages of other nodes; `scoring` is the one that the present policy goes by."""

    @property
    def scoring(self) -> str: ...

    async def learn(self, trainer: int, course: Course, batches: Sequence[Batch]) -> None: ...

    async def adopt(self, course: Course, scores: SharedScores, hubs: Iterable[SharedHub]) -> None: ...


@dataclass
class _Ending:
    """An epoch that rank 0 has ended, and not all ranks elsewhere."""

    epoch: int
    act: Callable[[], Awaitable[None]]
    all_ended: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)


@dataclass
class _Job:
    """How far the ranks of a job are, as this node has heard."""

    sent_to: str | None = None
    """The stream to which the last rows of this node's ranks went."""
    epoch: int | None = None
    """The epoch whose rows are scored now."""
    ended: dict[int, int] = field(default_factory=dict)
    """The last epoch that each rank elsewhere has ended."""
    ending: _Ending | None = None
    early: list[tuple[Course, Batch]] = field(default_factory=list)
    """Rows of ranks elsewhere that are of a later epoch."""


class SeveralNodes:
    def __init__(self, link: Link | None, courses: Courses, trainers: Trainers, counters: Counters) -> None:
        """Without a `link` nothing is said and nothing heard."""
        self._link = link
        self._courses = courses
        self._trainers = trainers
        self._counters = counters
        # The courses of which another node's scores have come.
        self._scored_elsewhere: set[str] = set()
        self._warned_of: set[tuple[str, str]] = set()
        self._jobs: defaultdict[str, _Job] = defaultdict(_Job)
        self._nursery: trio.Nursery | None = None

    def link_status(self) -> LinkStatus | None:
        return None if self._link is None else self._link.status()

    # -- what this node says

    def follows(self, course: Course) -> bool:
        """Whether another node is to score the rows of this course, which this one sends it."""
        return self._link is not None and self._trainers.scores_for_all(course.job_id) is False

    def send(self, course: Course, scoring: str, batches: Sequence[Batch]) -> bool:
        """Send rows to the node that scores for all; whether it does so, as far as this one has heard."""
        assert self._link is not None
        rows = sum(len(batch.indices) for batch in batches)
        stream = self._jobs[course.job_id].sent_to = _stream(_ROWS, scoring, course)
        self._link.send(stream, b"".join(map(encode, batches)), rows)
        return course.course_id in self._scored_elsewhere

    def tell(self, course: Course, scoring: str, scores: SharedScores, hubs: Iterable[SharedHub]) -> None:
        """Tell the other nodes of scores, if this one makes them for all."""
        if self._link is not None and len(scores.ids) and self._trainers.scores_for_all(course.job_id):
            self._link.send(_stream(_SCORES, scoring, course), b"".join(map(encode, (scores, *hubs))))

    def say_ended(self, trainer: Trainer, epoch: int) -> None:
        """Tell the node that scores for all that this rank has sent its last row of an epoch."""
        if self._link is not None and (stream := self._jobs[trainer.job_id].sent_to) is not None:
            self._link.send(stream, encode(RankEnded(trainer.rank, epoch)))

    def left(self, trainer: Trainer) -> None:
        """A trainer has gone. With rank 0 goes what was heard of its job: it may begin again at an earlier epoch."""
        if trainer.rank == 0:
            self._jobs.pop(trainer.job_id, None)
        self.look_again()

    def look_again(self) -> None:
        """What this node wants to hear may be something else now."""
        if self._link is not None:
            self._link.look_again()

    # -- what it hears

    async def once_all_ended(self, job_id: str, epoch: int, act: Callable[[], Awaitable[None]]) -> None:
        """Have `act` called when the job's ranks elsewhere have ended this epoch too: now, or by `run`, and soon."""
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
        return all(job.ended.get(rank, -1) >= epoch for rank in self._trainers.ranks_elsewhere(job_id))

    async def _end(self, job_id: str, job: _Job, ending: _Ending) -> None:
        assert self._link is not None
        if self._link.status().up and not self._all_ended(job_id, job, ending.epoch):
            with trio.move_on_after(LATE_S):
                await ending.all_ended.wait()
        try:
            await ending.act()
        except _FAILURES as exc:
            # No trainer is there to be told, and the next epoch goes on.
            log.warning("an epoch of job %s could not be ended (%s)", job_id, exc)
        job.ending, job.epoch = None, ending.epoch + 1
        await self._learn_early(job)
        ending.over.set()

    async def _learn_early(self, job: _Job) -> None:
        early, job.early = job.early, []
        for course, some in groupby(early, lambda one: one[0]):
            await self._hear_rows(course, [batch for _, batch in some])

    async def _end_waiting(self, job: _Job, early: list[tuple[Course, Batch]]) -> None:
        """Rank 0 may end no epochs, or count them otherwise: then its end is waited for no more."""
        await trio.sleep(LATE_S)
        if job.early is early and job.ending is None:
            job.epoch = max(batch.epoch for _, batch in early)
            await self._learn_early(job)

    async def run(
        self, learner: Learner, publish: Callable[[], Awaitable[None]], plans: PlansElsewhere | None = None
    ) -> None:
        """Hear the other nodes, and `publish` what readers are to know of it, for as long as the mount lasts.

        `plans` has its own streams, if plans are shared.
        """
        self._learner = learner

        def planned() -> dict[str, Course]:
            return {} if plans is None else plans.wanted()

        def wanted() -> dict[str, Course]:
            return self._wanted(learner.scoring) | planned()

        async def heard(stream: str, messages: Sequence[bytes]) -> bool:
            of_plans = planned()
            course = (self._wanted(learner.scoring) | of_plans).get(stream)
            if course is None:
                return False
            parts = []
            for message in messages:
                parts.append(self._unpacked(course, message))
                # Requests of trainers come between: a hundred messages may have 30 MB.
                await trio.lowlevel.checkpoint()
            if plans is not None and stream in of_plans:
                await plans.hear(course.list, [part for some in parts for part in some])
                return True
            if stream.startswith(_ROWS):
                await self._hear_rows(course, [part for some in parts for part in some])
            else:
                await self._hear_scores(learner, course, parts)
            await publish()
            # Nobody else has to hear the rows that are scored here.
            return stream.startswith(_ROWS)

        if self._link is not None:
            async with trio.open_nursery() as self._nursery:
                if plans is not None:
                    self._nursery.start_soon(plans.run)
                await self._link.run(wanted, heard)

    def _wanted(self, scoring: str) -> dict[str, Course]:
        """The courses of which something is to be heard now, by their streams."""
        # What was heard of a job that is over says nothing of one that comes back.
        self._scored_elsewhere.intersection_update(course.course_id for course in self._courses)
        for job_id in self._jobs.keys() - {course.job_id for course in self._courses}:
            del self._jobs[job_id]
        found = {}
        for course in self._courses:
            scores_for_all = self._trainers.scores_for_all(course.job_id)
            if scores_for_all is not None:
                found[_stream(_ROWS if scores_for_all else _SCORES, scoring, course)] = course
        return found

    async def _hear_rows(self, course: Course, heard: Sequence[Message]) -> None:
        job, in_turn = self._jobs[course.job_id], list[Batch]()
        for part in heard:
            if isinstance(part, RankEnded):
                job.ended[part.rank] = part.epoch
            elif isinstance(part, Batch) and job.epoch is not None and part.epoch > job.epoch:
                job.early.append((course, part))
                if len(job.early) == 1 and self._nursery is not None:
                    self._nursery.start_soon(self._end_waiting, job, job.early)
            elif isinstance(part, Batch):
                in_turn.append(part)
        for _, alike in groupby(in_turn, lambda batch: (batch.embeddings.shape[1], batch.losses is None)):
            some = list(alike)
            try:
                await self._learner.learn(_NOBODY, course, some)
            except _FAILURES as exc:
                self._warn_once(course, "rows that other mounts of job %s have sent are left out (%s)", exc)
                continue
            self._counters.add("cluster_rows_heard", sum(len(batch.indices) for batch in some))
        if job.ending is not None and self._all_ended(course.job_id, job, job.ending.epoch):
            job.ending.all_ended.set()

    async def _hear_scores(self, learner: Learner, course: Course, heard: Sequence[Sequence[Message]]) -> None:
        for parts in heard:
            hubs = [part for part in parts if isinstance(part, SharedHub)]
            for scores in (part for part in parts if isinstance(part, SharedScores)):
                self._scored_elsewhere.add(course.course_id)
                try:
                    await learner.adopt(course, scores, hubs)
                except _FAILURES as exc:
                    self._warn_once(course, "scores that another mount of job %s has sent are left out (%s)", exc)
                    continue
                self._counters.add("cluster_scores_heard", len(scores.ids))

    def _unpacked(self, course: Course, message: bytes) -> list[Message]:
        """The parts of a message; none if it is wrong."""
        try:
            return unpacked(message, len(course.list.keys))
        except ProtocolError as exc:
            self._warn_once(course, "what another mount of job %s has sent is of no use (%s)", exc)
            return []

    def _warn_once(self, course: Course, text: str, exc: Exception) -> None:
        """Tell the log of a trouble once for each course: it may come with every message."""
        if (course.course_id, text) not in self._warned_of:
            self._warned_of.add((course.course_id, text))
            log.warning(text, course.job_id, exc)


def _stream(what: str, scoring: str, course: Course) -> str:
    return f"{what}:{scoring}:{course.course_id}"
