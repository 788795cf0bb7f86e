"""Plans of trainers: the engine's schedule takes them over, as long as the option `plan` says so.

A plan goes on until its epoch or its trainer ends. With plans the cache is shared in another way
(`core/teaching.py`), and the prefetcher has work. What a training took without an open that anybody heard of, is told
further. All state belongs to the manager's event loop.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import trio

from spiderfs.core.learning.teaching import Teaching
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Key
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.lists.sample_list import KnownList
from spiderfs.daemon.training.lists.sharing import Rank, Sharing
from spiderfs.linux import steady_clock
from spiderfs.options.model import Options
from spiderfs.protocol import Exchange, Plan, Progress


class Plans:
    """`wake_prefetcher` is called when a plan has come, or a reader further in it. Trainers are named by their numbers.

    `read_unseen` is called with samples, each with its trainer, whose opens were not heard of. `size_of` gives the
    bytes of a file, 0 if it is not known.
    """

    def __init__(
        self,
        cache: CacheControl,
        teaching: Teaching,
        options: Options,
        wake_prefetcher: Callable[[], None],
        read_unseen: Callable[[Sequence[tuple[int, int]]], None],
        size_of: Callable[[int], int],
    ) -> None:
        self._cache = cache
        self._teaching = teaching
        self._wake_prefetcher = wake_prefetcher
        self._read_unseen = read_unseen
        self._size_of = size_of
        self._sample_max_bytes = options.sample_max_bytes
        self.sharing = Sharing(cache.engine, random.Random().random, self._cacheable)
        # In an immutable mount the kernel opens files without asking.
        cache.engine.schedule.opens_are_heard = not options.immutable
        self.followed = options.plan
        """Whether plans are followed: the option `plan`."""

    def _cacheable(self, key: Key) -> bool:
        """Whether the cache could hold a file as a sample: larger ones come in blocks, and empty ones have no bytes."""
        assert isinstance(key, int)
        size = self._size_of(key)
        return 0 < size <= self._sample_max_bytes and self._cache.engine.could_keep(key, size)

    async def take(self, trainer: int, known_list: KnownList, plan: Plan) -> None:
        """Take over the plan of an epoch of a trainer's list; sorting it takes a thread."""
        order = known_list.one_of_file[plan.order]
        epoch = await trio.to_thread.run_sync(
            PlannedEpoch, plan.epoch, known_list.keys, known_list.index_of, order, plan.position
        )
        # The option may have changed while the plan was sorted.
        if not self.followed:
            return
        self._cache.engine.plan(trainer, plan.list, epoch, steady_clock.now(), plan.begun)
        self.sharing.planned((trainer, plan.list), plan)
        self._cache.apply(self._teaching.schedule_changed())
        self._wake_prefetcher()

    def come(self, trainer: int, progress: Progress) -> None:
        """A trainer is so far in one of its plans."""
        if not self.followed:
            return
        now_s = steady_clock.now()
        self._cache.engine.come(trainer, progress.list, progress.epoch, progress.dispatched, progress.taken, now_s)
        self.sharing.come((trainer, progress.list), progress)
        self._tell_unseen(now_s)
        self._wake_prefetcher()

    def exchange(self, rank: Rank, job: str, known_list: KnownList, question: Exchange) -> npt.NDArray[np.uint32]:
        """What a rank is to take in the places of the samples that come next; see `Sharing.ask`."""
        given = self.sharing.ask(rank, job, known_list, question)
        self._wake_prefetcher()
        return given

    def tell_unseen(self) -> None:
        """Tell of the last unseen samples of a training that pauses; to be called now and then."""
        self._tell_unseen(steady_clock.now())

    def epoch_ended(self, trainer: int, epoch: int) -> None:
        """Give up what is left of an epoch."""
        self._cache.engine.end_epoch(trainer, epoch)

    def trainer_left(self, trainer: int) -> None:
        self._unplan(trainer)
        self.sharing.trainer_left(trainer)

    def _unplan(self, trainer: int) -> None:
        # What the reader has taken last was read, though nobody will hear whether it was seen.
        self._tell_unseen(math.inf, trainer)
        self._cache.engine.unplan(trainer)

    def _tell_unseen(self, now_s: float, trainer: int | None = None) -> None:
        found: list[tuple[int, int]] = []
        for number, inode in self._cache.engine.unseen(now_s, trainer):
            assert isinstance(number, int)
            assert isinstance(inode, int)
            found.append((number, inode))
        if found:
            self._read_unseen(found)

    def change(self, options: Options) -> None:
        """Take over live options; with `plan=off` no plan is left."""
        self.followed = options.plan
        if not options.plan:
            self.sharing.stop()
            for trainer in {trainer for trainer, _ in self._cache.engine.schedule.readers}:
                assert isinstance(trainer, int)
                self._unplan(trainer)
