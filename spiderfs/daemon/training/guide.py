"""Acts on what trainers say: each message goes to those whom it concerns, in the order in which things happen.

The guide decides nothing itself. Changes for readers are published last, so that a worker that sees a redirect
finds the stand-in in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spiderfs.core.teaching import Teaching
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.declared_lists import DeclaredLists
from spiderfs.daemon.training.pinboard import Pinboard
from spiderfs.daemon.training.plans import Plans
from spiderfs.daemon.training.redirect_publisher import RedirectPublisher
from spiderfs.daemon.training.scoring import BatchScoring
from spiderfs.daemon.training.trainer import SampleList, Trainer
from spiderfs.daemon.training.trainers import Trainers
from spiderfs.protocol import Batch, EpochEnd, Plan


@dataclass(frozen=True)
class Guide:
    """The HookSink of a mount (`hook_connection.py`)."""

    cache: CacheControl
    teaching: Teaching
    trainers: Trainers
    lists: DeclaredLists
    scoring: BatchScoring
    plans: Plans
    pinboard: Pinboard
    redirects: RedirectPublisher

    async def attached(self, trainer: Trainer) -> None:
        self.trainers.attach(trainer)

    async def samples(self, trainer: Trainer, samples: SampleList) -> int:
        unknown = await self.lists.declare(trainer, samples)
        await self.redirects.publish_all()
        return unknown

    async def learn(self, trainer: Trainer, samples: SampleList, batches: Sequence[Batch]) -> None:
        known_list = self.trainers.list_of(trainer, samples.name)
        self.trainers.teach(trainer, samples.name)
        await self.scoring.learn(self.trainers.number_of(trainer), known_list, batches)
        await self.redirects.publish()

    def thinned(
        self, trainer: Trainer, samples: SampleList, indices: npt.NDArray[np.uint32], count: int
    ) -> npt.NDArray[np.int64]:
        known_list = self.trainers.list_of(trainer, samples.name)
        return self.scoring.thinned(self.trainers.number_of(trainer), known_list, indices, count)

    async def epoch_end(self, trainer: Trainer, end: EpochEnd) -> None:
        number = self.trainers.number_of(trainer)
        self.scoring.forget_reads(number)
        self.plans.epoch_ended(number, end.epoch)
        if trainer.rank != 0:
            return
        known_lists = self.trainers.lists_of(trainer)
        sigmas = await self.scoring.new_epoch(known_lists)
        await self.pinboard.epoch_ended()
        for known_list in known_lists:
            spread = {course_id: sigma for course_id, sigma in sigmas.items() if course_id == known_list.course_id}
            self.cache.apply(self.teaching.epoch_ended(known_list.job_id, end.epoch, spread, end.accuracy))
        await self.redirects.publish()

    async def plan(self, trainer: Trainer, samples: SampleList, plan: Plan) -> None:
        known_list = self.trainers.list_of(trainer, samples.name)
        await self.plans.take(self.trainers.number_of(trainer), samples.name, known_list, plan)

    async def scores(self, trainer: Trainer, samples: SampleList) -> npt.NDArray[np.float32]:
        return self.scoring.to_draw_by(self.trainers.list_of(trainer, samples.name))

    @property
    def follows_plans(self) -> bool:
        return self.plans.followed

    async def cached(self, trainer: Trainer, samples: SampleList) -> npt.NDArray[np.bool_]:
        members, known_list = self.cache.engine.members, self.trainers.list_of(trainer, samples.name)
        return np.array([inode in members for inode in known_list.inodes.tolist()], np.bool_)

    async def pin(self, trainer: Trainer, samples: SampleList, indices: npt.NDArray[np.uint32]) -> int:
        known_list = self.trainers.list_of(trainer, samples.name)
        held = await self.pinboard.pin(trainer, samples.name, known_list, indices)
        # A pinned sample has no stand-in from now on, and stands in for no other.
        await self.redirects.publish()
        return held

    async def detached(self, trainer: Trainer) -> None:
        number = self.trainers.number_of(trainer)
        self.scoring.forget_reads(number)
        self.plans.trainer_left(number)
        self.trainers.detach(trainer)
        await self.pinboard.trainer_left(trainer)
