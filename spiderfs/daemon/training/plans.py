"""Plans of trainers: the engine's schedule takes them over while the option `plan` is on.

A plan goes on until its epoch or its trainer ends. With plans the cache is shared in another way
(`core/feed.py`), and the prefetcher has work. Samples that a training took and whose opens were not reported
are passed on as unseen.

**Ranks that exchange samples** ask before each batch which ones to take in the places of the next ones
(`core/plans/exchange.py`). What a rank is given changes places in its plan with what it wanted, here at once and there
when it dispatches. So the plan stays what the rank will read; but nothing is fetched ahead beyond what was dispatched,
because the rest is going to change. If an answer comes too late, the rank's next question says what it has dispatched,
and the plan is put right.

All state belongs to the manager's event loop.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import trio

from spiderfs.core.engine import Engine
from spiderfs.core.feed import PolicyFeed
from spiderfs.core.plans.exchange import Exchanged, SharedList
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Key
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.trainer import KnownList
from spiderfs.linux import steady_clock
from spiderfs.options.model import Options
from spiderfs.protocol import Exchange, Plan, Progress

Rank = tuple[int, str]
"""A trainer's number, and the name that it has given the list."""


@dataclass
class _Exchanging:
    """What a rank has reported of the epoch that it exchanges: how many samples were dispatched, and how many taken.

    A report of what was taken may overtake a question that says what was dispatched. So only `consumed` of the samples
    that were taken are known, and their reservations are over.
    """

    epoch: PlannedEpoch
    dispatched: int
    taken: int
    consumed: int


class Sharing:
    """`chance` gives random numbers from 0 up to, but not including, 1. `cacheable` is as in `SharedList`."""

    def __init__(self, engine: Engine, chance: Callable[[], float], cacheable: Callable[[Key], bool]) -> None:
        self._engine, self._chance, self._cacheable = engine, chance, cacheable
        self._digests: dict[Rank, str] = {}
        self._exchanging: dict[Rank, _Exchanging] = {}
        self._before: dict[str, Exchanged] = {}
        """By job, what was exchanged in epochs and by trainers that are over."""

    def ask(
        self,
        rank: Rank,
        job: str,
        known_list: KnownList,
        question: Exchange,
        ready: npt.NDArray[np.bool_] | None = None,
    ) -> npt.NDArray[np.uint32]:
        """What the rank is to take for each sample wanted; empty: as planned. `ready` is as in `SharedList.ask`."""
        reader = self._engine.schedule.readers.get(rank)
        first = question.position - len(question.dispatched)
        if reader is None or reader.epoch.number != question.epoch or reader.epoch.repeats:
            return np.empty(0, np.uint32)
        shared = self._shared(rank, known_list)
        handed = question.dispatched.tolist()
        self._put(reader.epoch, first, handed)
        known = self._exchanging.get(rank)
        # After a question that was lost, what was dispatched meanwhile is pending no more.
        if known is None or known.epoch is not reader.epoch or known.dispatched != first:
            self._keep_counts(rank, shared)
            known = self._exchanging[rank] = _Exchanging(reader.epoch, first, first, first)
            shared.begin(rank, job, np.unique(reader.epoch.order[first:]))
            self._engine.rerank()
        members, counts = self._engine.members, shared.ranks[rank].counts
        for sample in shared.dispatched(rank, handed):
            member = members.get(shared.keys[sample])
            counts.saved_bytes += 0 if member is None else member.size
        known.dispatched = question.position
        self._take(rank, question.taken)
        given = shared.ask(rank, question.wanted.tolist(), ready)
        self._put(reader.epoch, question.position, given)
        if ready is not None:
            for position, sample in enumerate(given, question.position):
                if ready[sample]:
                    self._engine.served(reader.epoch, position)
        readers = self._engine.schedule.readers
        for owner in shared.ranks:
            if owner in readers:
                readers[owner].exchanges = shared.active and owner in self._exchanging
        return np.array(given, np.uint32)

    def progressed(self, rank: Rank, progress: Progress) -> None:
        """A rank's loop has taken more of its samples."""
        if (known := self._exchanging.get(rank)) is not None and known.epoch.number == progress.epoch:
            self._take(rank, progress.taken)

    def planned(self, rank: Rank, plan: Plan) -> None:
        """A rank has begun an epoch, or with an empty plan breaks one off."""
        if plan.begun and not len(plan.order):
            self._end(rank)

    def stop(self) -> None:
        """Plans are followed no more, so nothing is exchanged."""
        for trainer in {trainer for trainer, _ in self._digests}:
            self.trainer_left(trainer)

    def files_changed(self, changed: str) -> None:
        """The samples of the list with this digest are other files now: it is shared again as its ranks ask on."""
        for rank in [rank for rank, digest in self._digests.items() if digest == changed]:
            self._leave(rank)

    def trainer_left(self, trainer: int) -> None:
        for rank in [rank for rank in self._digests if rank[0] == trainer]:
            self._leave(rank)

    def keep_only(self, jobs: Collection[str]) -> None:
        """Forget what was exchanged for all other jobs."""
        self._before = {job: counts for job, counts in self._before.items() if job in jobs}

    def counts(self, job: str) -> Exchanged:
        total = Exchanged() + self._before.get(job, Exchanged())
        for shared in self._engine.exchange_pending.lists.values():
            for rank in shared.ranks.values():
                if rank.job == job:
                    total += rank.counts
        return total

    def _shared(self, rank: Rank, known_list: KnownList) -> SharedList:
        """The list, shared from now on; a name may mean another list than before."""
        if self._digests.get(rank) not in (None, known_list.digest):
            self._leave(rank)
        self._digests[rank] = known_list.digest
        lists = self._engine.exchange_pending.lists
        if known_list.digest not in lists:
            keys, index_of, changed = known_list.keys, known_list.index_of, self._engine.exchange_pending.changed
            shared = SharedList(keys, index_of, self._chance, changed, cacheable=self._cacheable)
            self._engine.share(known_list.digest, shared)
        return self._list_of(rank)

    def _list_of(self, rank: Rank) -> SharedList:
        return self._engine.exchange_pending.lists[self._digests[rank]]

    def _leave(self, rank: Rank) -> None:
        """A rank shares its list no more; the last one takes the list with it."""
        self._end(rank)
        digest = self._digests.pop(rank)
        if digest not in self._digests.values():
            self._engine.exchange_pending.remove(digest)

    def _end(self, rank: Rank) -> None:
        if self._exchanging.pop(rank, None) is not None:
            shared = self._list_of(rank)
            self._keep_counts(rank, shared)
            shared.end(rank)
            self._engine.rerank()

    def _keep_counts(self, rank: Rank, shared: SharedList) -> None:
        if (ended := shared.ranks.get(rank)) is not None:
            job = str(ended.job)
            self._before[job] = self._before.get(job, Exchanged()) + ended.counts

    def _take(self, rank: Rank, taken: int) -> None:
        known = self._exchanging[rank]
        known.taken = max(known.taken, taken)
        known.consumed += self._list_of(rank).taken(rank, known.taken - known.consumed)

    def _put(self, epoch: PlannedEpoch, position: int, samples: Sequence[int]) -> None:
        """Have the plan name these samples from a position on."""
        for sample in samples:
            for key in epoch.swap(position, sample):
                self._engine.exchange_pending.changed(key)
            position += 1


class Plans:
    """`wake_prefetcher` is called when a plan has come, or a reader further in it. Trainers are named by their numbers.

    `read_unseen` is called with samples, each with its trainer, whose opens were not reported. `size_of` gives the
    bytes of a file, 0 if it is not known.
    """

    def __init__(
        self,
        cache: CacheControl,
        feed: PolicyFeed,
        options: Options,
        wake_prefetcher: Callable[[], None],
        read_unseen: Callable[[Sequence[tuple[int, int]]], None],
        size_of: Callable[[int], int],
    ) -> None:
        self._cache, self._feed, self._wake_prefetcher = cache, feed, wake_prefetcher
        self._read_unseen, self._size_of = read_unseen, size_of
        self._sample_max_bytes = options.sample_max_bytes
        self.sharing = Sharing(cache.engine, random.Random().random, self._cacheable)
        # In an immutable mount the kernel opens files without asking.
        cache.engine.schedule.opens_are_reported = not options.immutable
        self.followed = options.plan
        """Whether plans are followed: the option `plan`."""

    def _cacheable(self, key: Key) -> bool:
        """Whether the cache could hold a file as a sample: larger ones come in blocks, and empty ones have no bytes."""
        assert isinstance(key, int)
        size = self._size_of(key)
        return 0 < size <= self._sample_max_bytes and self._cache.engine.could_keep(key, size)

    async def take(self, trainer: int, known_list: KnownList, plan: Plan) -> None:
        """Take over the plan of an epoch of a trainer's list; sorting it takes a thread."""

        def planned() -> PlannedEpoch:
            order = known_list.one_of_file[plan.order]
            return PlannedEpoch(plan.epoch, known_list.keys, known_list.index_of, order, plan.position)

        epoch = await trio.to_thread.run_sync(planned)
        # The option may have changed while the plan was sorted.
        if not self.followed:
            return
        self._cache.engine.plan(trainer, plan.list, epoch, steady_clock.now(), plan.begun)
        self.sharing.planned((trainer, plan.list), plan)
        self._cache.apply(self._feed.schedule_changed())
        self._wake_prefetcher()

    def progressed(self, trainer: int, progress: Progress) -> None:
        """A trainer is so far in one of its plans."""
        if not self.followed:
            return
        now_s = steady_clock.now()
        self._cache.engine.progressed(
            trainer, progress.list, progress.epoch, progress.dispatched, progress.taken, now_s
        )
        self.sharing.progressed((trainer, progress.list), progress)
        self.report_unseen(now_s)
        self._wake_prefetcher()

    def trainer_left(self, trainer: int) -> None:
        self._unplan(trainer)
        self.sharing.trainer_left(trainer)

    def _unplan(self, trainer: int) -> None:
        # What the reader has taken last was read, though it will not be known whether it was seen.
        self.report_unseen(math.inf, trainer)
        self._cache.engine.unplan(trainer)

    def report_unseen(self, now_s: float, trainer: int | None = None) -> None:
        """Pass on what was taken unseen, by one trainer or all; to be called now and then, for trainings that pause."""
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
