"""Plans of trainers: the engine's schedule takes them over, as long as the option `plan` says so.

A plan goes on until its epoch or its trainer ends. With plans the cache is shared in another way
(`core/teaching.py`), and the prefetcher has work. All state belongs to the manager's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from spiderfs.core.planned_epoch import PlannedEpoch
from spiderfs.core.teaching import Teaching
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.known_list import KnownList
from spiderfs.options.model import Options
from spiderfs.protocol import Plan


class Plans:
    """`wake_prefetcher` is called when a plan has come. Trainers are named by their numbers."""

    def __init__(
        self, cache: CacheControl, teaching: Teaching, options: Options, wake_prefetcher: Callable[[], None]
    ) -> None:
        self._cache = cache
        self._teaching = teaching
        self._wake_prefetcher = wake_prefetcher
        self.followed = options.plan
        """Whether plans are followed: the option `plan`."""

    async def take(self, trainer: int, name: str, known_list: KnownList, plan: Plan) -> None:
        """Take over the plan of an epoch of a trainer's list; sorting it takes a thread."""
        order = known_list.one_of_file[plan.order]
        epoch = await trio.to_thread.run_sync(
            PlannedEpoch, plan.epoch, known_list.keys, known_list.index_of, order, plan.position
        )
        # The option may have changed while the plan was sorted.
        if not self.followed:
            return
        self._cache.engine.plan(trainer, name, epoch, time.time(), plan.begun)
        self._cache.apply(self._teaching.schedule_changed())
        self._wake_prefetcher()

    def epoch_ended(self, trainer: int, epoch: int) -> None:
        """Give up what is left of an epoch."""
        self._cache.engine.end_epoch(trainer, epoch)

    def trainer_left(self, trainer: int) -> None:
        self._cache.engine.unplan(trainer)

    def change(self, options: Options) -> None:
        """Take over live options; with `plan=off` no plan is left."""
        self.followed = options.plan
        if not options.plan:
            for trainer in {trainer for trainer, _ in self._cache.engine.schedule.readers}:
                self._cache.engine.unplan(trainer)
