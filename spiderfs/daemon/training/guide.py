"""Acts on what trainers say: each message goes to those whom it concerns, in the order in which things happen.

The guide decides nothing itself. Changes for readers are published last, so that a worker that sees a redirect
finds the stand-in in the cache.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spiderfs.core.learning.teaching import Teaching
from spiderfs.core.plans.rank_news import Come, Handed, Left, Planned, RankNews
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.courses.courses import Courses
from spiderfs.daemon.training.courses.declared_lists import DeclaredLists
from spiderfs.daemon.training.courses.job_accounts import JobAccounts
from spiderfs.daemon.training.courses.pinboard import Pinboard
from spiderfs.daemon.training.courses.redirect_publisher import RedirectPublisher
from spiderfs.daemon.training.courses.scoring import BatchScoring
from spiderfs.daemon.training.courses.trainers import Trainers
from spiderfs.daemon.training.lists.plans import Plans
from spiderfs.daemon.training.lists.trainer import Declared, SampleList, Trainer
from spiderfs.protocol import Batch, EpochEnd, Exchange, Plan, Progress


@dataclass(frozen=True)
class Guide:
    """The HookSink of a mount (`hook_connection.py`)."""

    cache: CacheControl
    teaching: Teaching
    trainers: Trainers
    accounts: JobAccounts
    courses: Courses
    lists: DeclaredLists
    scoring: BatchScoring
    plans: Plans
    pinboard: Pinboard
    redirects: RedirectPublisher
    note: Callable[[RankNews], None] | None
    """Hears what ranks tell of their plans; None if nobody does."""
    until_names_are_asked: Callable[[], Awaitable[None]]
    """To be awaited when a trainer comes that may be given stand-ins: before its plans are followed, if it says so."""

    async def attached(self, trainer: Trainer) -> None:
        hello = trainer.hello
        # Rank 0 speaks for all; before it comes, any rank does.
        if hello.rank == 0 or not self.trainers.any_of(hello.job):
            self.cache.apply(self.teaching.begin_job(hello.job, hello.epochs, hello.epoch))
        self.trainers.attach(trainer)
        self.accounts.attached(self.trainers.number_of(trainer), hello.job)

    async def samples(self, trainer: Trainer, samples: SampleList) -> Declared:
        declared = await self.lists.declare(trainer, samples)
        await self.redirects.publish_all()
        await self.until_names_are_asked()
        return declared

    async def learn(self, trainer: Trainer, samples: SampleList, batches: Sequence[Batch]) -> None:
        course = self.trainers.course_of(trainer, samples.name)
        self.trainers.teach(trainer, samples.name)
        await self.until_names_are_asked()
        await self.scoring.learn(self.trainers.number_of(trainer), course, batches)
        await self.redirects.publish()

    def thinned(
        self, trainer: Trainer, samples: SampleList, indices: npt.NDArray[np.uint32], count: int
    ) -> npt.NDArray[np.int64]:
        course = self.trainers.course_of(trainer, samples.name)
        return self.scoring.thinned(self.trainers.number_of(trainer), course, indices, count)

    async def epoch_end(self, trainer: Trainer, end: EpochEnd) -> None:
        number = self.trainers.number_of(trainer)
        self.scoring.forget_reads(number)
        self.plans.epoch_ended(number, end.epoch)
        if trainer.rank != 0:
            return
        sigmas = await self.scoring.new_epoch(self.courses.of_job(trainer.job_id))
        await self.pinboard.epoch_ended(trainer.job_id)
        self.cache.apply(self.teaching.epoch_ended(trainer.job_id, end.epoch, sigmas, end.accuracy))
        await self.redirects.publish()

    async def plan(self, trainer: Trainer, samples: SampleList, plan: Plan) -> None:
        course = self.trainers.course_of(trainer, samples.name)
        number = self.trainers.number_of(trainer)
        await self.plans.take(number, samples.name, course.list, plan)
        if self.note is not None and self.plans.followed:
            keys = course.list.inodes[course.list.one_of_file[plan.order]]
            self.note(Planned(number, course.course_id, plan.epoch, plan.position, plan.begun, keys))

    def come(self, trainer: Trainer, progress: Progress) -> None:
        number = self.trainers.number_of(trainer)
        self.plans.come(number, progress)
        if self.note is not None and self.plans.followed:
            course = self.trainers.course_of(trainer, progress.list)
            self.note(Come(number, course.course_id, progress.epoch, progress.dispatched, progress.taken))

    def exchange(self, trainer: Trainer, question: Exchange) -> npt.NDArray[np.uint32]:
        rank = (self.trainers.number_of(trainer), question.list)
        course = self.trainers.course_of(trainer, question.list)
        if self.note is not None:
            keys = course.list.inodes[course.list.one_of_file[question.dispatched]]
            first = question.position - len(keys)
            self.note(Handed(rank[0], course.course_id, question.epoch, first, keys))
        return self.plans.exchange(rank, trainer.job_id, course.list, question)

    async def scores(self, trainer: Trainer, samples: SampleList) -> npt.NDArray[np.float32]:
        return self.scoring.to_draw_by(self.trainers.course_of(trainer, samples.name))

    @property
    def follows_plans(self) -> bool:
        return self.plans.followed

    async def cached(self, trainer: Trainer, samples: SampleList) -> npt.NDArray[np.bool_]:
        members, course = self.cache.engine.members, self.trainers.course_of(trainer, samples.name)
        return np.array([inode in members for inode in course.list.inodes.tolist()], np.bool_)

    async def pin(self, trainer: Trainer, samples: SampleList, indices: npt.NDArray[np.uint32]) -> int:
        course = self.trainers.course_of(trainer, samples.name)
        held = await self.pinboard.pin(trainer, samples.name, course, indices)
        # A pinned sample has no stand-in from now on, and stands in for no other.
        await self.redirects.publish()
        return held

    async def warm_up(self, trainer: Trainer, samples: SampleList, active: bool) -> None:
        self.teaching.warm_up(self.trainers.course_of(trainer, samples.name).course_id, active)
        # A course that warms up has no stand-ins.
        await self.redirects.publish()

    async def detached(self, trainer: Trainer) -> None:
        number = self.trainers.number_of(trainer)
        self.scoring.forget_reads(number)
        self.plans.trainer_left(number)
        if self.note is not None:
            self.note(Left(number))
        self.trainers.detach(trainer)
        await self.pinboard.trainer_left(trainer)
