"""Prefetches the samples that plans name, those that are needed sooner first.

The prefetcher looks at a window of each reader's plan. Between readers the earlier deadline decides, so a slow reader
cannot hold up a fast one. Each mode of a mount has a backend: it fetches samples into the store (`fetch_ahead.py`), or
has a process make the kernel read them (`push_ahead.py`). The backend decides how long the window is, and what is worth
prefetching. The number of fetches at a time follows the speed of the source (`core/plans/fetch_limits.py`). When a
reader has to wait for a file, its worker fetches the file: a miss never queues behind the fetches ahead.

All state belongs to the manager's event loop. Samples that have arrived go to the cache control together, once a turn.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import trio

from spiderfs.archives.source import ArchiveSource
from spiderfs.core.events import FETCHED, FORGOTTEN, PUSHED, UNSTORED, Access
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.plans.schedule import PlannedReader
from spiderfs.daemon.caching import prefetch_backend
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.fetch_ahead import FetchAhead, Neighbours
from spiderfs.daemon.caching.planned_reads import PlannedReads
from spiderfs.daemon.caching.prefetch_backend import Admission, PrefetchBackend, PrefetchResult, first_fetches
from spiderfs.daemon.caching.push_ahead import PushAhead
from spiderfs.errors import SpiderfsError
from spiderfs.linux import steady_clock
from spiderfs.options.model import Options
from spiderfs.protocol.extents import extent_of
from spiderfs.store.store import ContentKey
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.on_demand import Supply

log = logging.getLogger(__name__)

# How often all samples are looked at again: some have left the cache, and for others there is room now.
_LOOK_AGAIN_S = 0.25
# How long a file that could not be fetched is left to its reader.
_FAILED_PAUSE_S = 10.0
# How long nothing is fetched ahead after the store has failed.
_STORE_PAUSE_S = 1.0
# A source that was idle within this time could have served more fetches.
_LATELY_S = 0.5
# A job that exchanges samples is to have this many cached ones to choose from, or a hundredth of the cache if that is
# less: what it has beyond that takes the room of samples that several jobs will read.
_READY = 64
# How many positions are looked at in one turn: 2 ms.
_AT_A_TIME = 2000


class Prefetcher:
    """Prefetches what readers will read; `wakeup` rings when they have come further, or when plans have come.

    `reachable` says whether the source answers, and `has_substitute` whether a cached file can be read in place of an
    inode. Where the options have readers take that at every miss, such an inode is not prefetched. `fetched_ahead` is
    called with a trainer's number, and how many bytes were fetched for it.
    """

    def __init__(
        self,
        cache: CacheControl,
        supply: Supply,
        options: Options,
        wakeup: prefetch_backend.Wakeup,
        reachable: Callable[[], bool],
        has_substitute: Callable[[int], bool],
        fetched_ahead: Callable[[int, int], None],
        push: Callable[[FetchAhead], PushAhead] | None = None,
        archives: ArchiveSource | None = None,
        batches: PlannedReads | None = None,
    ) -> None:
        """What `push` makes replaces fetches into the store while it can. `archives`: for neighbours to come along."""
        self._cache = cache
        self._schedule = cache.engine.schedule
        self._catalogue, self._fetcher = supply.catalogue, supply.fetcher
        self._content, self._counters = supply.content, supply.counters
        self._sample_max_bytes, self._wakeup = options.sample_max_bytes, wakeup
        self._reachable, self._has_substitute = reachable, has_substitute
        self._fetched_ahead = fetched_ahead
        self.rate = prefetch_backend.BackgroundRate(options.background_bandwidth)
        """That of all that no reader waits for; others who fetch such files keep to it too."""
        self.change(options)
        self._cursors: dict[PlannedReader, _Cursor] = {}
        self._looked_at_s = self._full_until_s = self._idle_at_s = -math.inf
        self._arrived: list[int] = []
        self._failed: dict[int, float] = {}
        neighbours = Neighbours(archives, supply.grids, supply.catalogue, cache.engine)
        self._fetch = FetchAhead(
            cache, supply.fetcher, options.fetches, first_fetches(options), neighbours, batches, self._catalogue.size_of
        )
        self._push = None
        if push is not None:
            self._push = push(self._fetch)

    def change(self, options: Options) -> None:
        self._leaves_substitutes = options.substitute_when == "miss"
        self.rate.change(options.background_bandwidth)

    @property
    def pushed_bytes(self) -> int:
        """What waits in the page cache for its readers."""
        return 0 if self._push is None else self._push.waiting_bytes

    @property
    def _backend(self) -> PrefetchBackend:
        return self._fetch if self._push is None or not self._push.able else self._push

    def _backend_of(self, reader: PlannedReader) -> PrefetchBackend:
        """The backend for the samples of a reader: extents are no files that the kernel could read ahead."""
        backend = self._backend
        if backend is self._fetch:
            return backend
        inode = next(filter(None, reader.epoch.keys), 0)
        return backend if extent_of(self._catalogue.path_of(inode)) is None else self._fetch  # type: ignore[arg-type]

    def status(self) -> dict[str, Any]:
        concurrency = self._backend.concurrency
        return {
            "plans": [self._plan_status(*owner, reader) for owner, reader in self._schedule.readers.items()],
            "under_way": self._backend.under_way,
            **{name: getattr(concurrency, name) for name in ("limit", "most", "latency_s", "bytes_per_s")},
        }

    def _plan_status(self, trainer: Hashable, name: str, reader: PlannedReader) -> dict[str, Any]:
        """How a reader with a plan is doing, and the fetches ahead of it; `late_share` is of `opens` and `unseen`."""
        ready = self.ready_ahead(reader)
        return {
            "trainer": trainer,
            "list": name,
            "epoch": reader.epoch.number,
            "dispatched": reader.dispatched,
            "taken": reader.taken,
            "length": len(reader.epoch),
            "epochs_ahead": len(reader.later),
            "trusted": reader.trusted,
            "followed_share": reader.followed_share,
            "samples_per_s": 1 / reader.pace_s if len(reader.epoch) else 0.0,
            "ready_samples": ready,
            "ready_s": ready * reader.pace_s,
            "window_samples": self._backend_of(reader).window(reader),
            "opens": reader.opens,
            "unseen": reader.unseen_draws,
            "late_share": reader.late / max(1, reader.opens + reader.unseen_draws),
        }

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._fetch.start(nursery)
            if self._push is not None:
                self._push.start(nursery)
            while True:
                self._wakeup.silence()
                try:
                    self._keep_arrived()
                    self._cache.expect(self._fetches_at_once() if self._schedule.active else None)
                    if self._schedule.active and self._reachable() and trio.current_time() >= self._full_until_s:
                        self._prefetch_due()
                except SpiderfsError as exc:
                    log.warning("%s: nothing is fetched ahead for a moment", exc)
                    self._full_until_s = trio.current_time() + _STORE_PAUSE_S
                again_s = min(_LOOK_AGAIN_S, self.rate.wait_s() or _LOOK_AGAIN_S)
                with trio.move_on_after(again_s if self._schedule.active else float("inf")):
                    await self._wakeup.wait()

    def _fetches_at_once(self) -> int:
        pushes = (
            0 if self._backend is self._fetch else self._backend.concurrency.limit * self._fetch.samples_of_a_request
        )
        return pushes + (self._fetch.samples_at_once if not pushes or self._cache.engine.exchange_pending.active else 0)

    def on_events(self, accesses: list[Access]) -> list[Access]:
        """Take note of the pushes among workers' events; returns what readers have read."""
        if self._push is None:
            return accesses
        for inode, reader in self._push.on_events(accesses):
            self._keep(inode)
            node = self._catalogue.known(inode)
            if reader is not None and node is not None:
                self._count_ahead(reader, node.version.size)
        return [access for access in accesses if not access.where & PUSHED and access.where != FORGOTTEN]

    def ready_ahead(self, reader: PlannedReader) -> int:
        """How many samples the reader could read now, one after the other, without waiting for the source."""
        ready, backend = 0, self._backend_of(reader)
        for _, inode in islice(reader.coming(_AT_A_TIME), _AT_A_TIME):
            assert isinstance(inode, int)
            if inode and not backend.is_ready(inode) and self._sample(inode) is not None:
                break
            ready += 1
        return ready

    def _prefetch_due(self) -> None:
        now = trio.current_time()
        backend = self._backend
        again = now >= self._looked_at_s + _LOOK_AGAIN_S
        # Found once a turn: whether a reader's samples are extents takes a look into the catalogue.
        backends = {reader: self._backend_of(reader) for reader in self._schedule.trusted}
        if again:
            self._looked_at_s = now
            self._failed = {inode: until_s for inode, until_s in self._failed.items() if until_s > now}
            kept = [reader for reader, its in backends.items() if not its.looks_again]
            self._cursors = {reader: self._cursor(reader) for reader in kept}
        idle = now < self._idle_at_s + _LATELY_S
        if backend is not self._fetch:
            of_ranges = tuple(reader for reader, its in backends.items() if its is self._fetch)
            self._fetch.look(of_ranges, again, idle)
        backend.look(tuple(backends), again, idle)
        try:
            due = self._due(backends)
            while backend.has_room() and not self.rate.wait_s():
                if (found := next(due, None)) is None:
                    backend.concurrency.short_of_work()
                    break
                by, node, reader, position = found
                self.rate.begin(by.prefetch(node, reader, position, partial(self._prefetched, by)))
        finally:
            backend.send()
            if backend is not self._fetch:
                # What the store is to keep goes that way in any case.
                self._fetch.send()
            self._content.end_read()

    def _due(
        self, backends: Mapping[PlannedReader, PrefetchBackend]
    ) -> Iterator[tuple[PrefetchBackend, Node, PlannedReader, int]]:
        """The samples to prefetch and their backends, by deadline, each with who reads it first, and its position."""
        readers = {}
        for reader, backend in backends.items():
            # What comes after that may yet change places with what is cached.
            limit = reader.look_ahead = 0 if reader.exchanges else backend.window(reader)
            # Not from where the reader is: it goes on in a wrong plan, too.
            limit = min(limit, reader.fetched_to - reader.reached)
            readers[reader] = self._cursor(reader).coming(reader, limit)
        heads = {reader: next(coming, None) for reader, coming in readers.items()}
        for _ in range(_AT_A_TIME):
            waiting = [(reader.time_of(head[0]), head, reader) for reader, head in heads.items() if head is not None]
            if not waiting:
                yield from self._pending_of_jobs()
                self._idle_at_s = trio.current_time()
                return
            _, (position, inode), reader = min(waiting, key=lambda candidate: candidate[0])
            backend = backends[reader]
            epoch, place = reader.located(position)
            node = None if epoch.is_served(place) else self._missing(inode, backend)
            if node is not None:
                if not backend.has_room():
                    return
                admission = backend.judge(node)
                if admission is Admission.PREFETCH:
                    yield backend, node, reader, position
                elif admission is Admission.ENOUGH:
                    return
            heads[reader] = next(readers[reader], None)
        self._wakeup.ring()

    def _pending_of_jobs(self) -> Iterator[tuple[PrefetchBackend, Node, PlannedReader, int]]:
        """Pending samples of jobs that exchange, as long as one of these has too few cached ones to choose from.

        They choose from what the store has, so it is fetched into that in every mode, and only if it will stay. In the
        page cache alone no one would be given it, and it would be fetched again.
        """
        engine, backend = self._cache.engine, self._fetch
        most = max(1, min(_READY, len(engine.members) // 100))

        def ready(rank_id: Hashable) -> int:
            reader = self._schedule.readers.get(rank_id)  # type: ignore[call-overload]
            if reader is None or not reader.trusted:
                return 0
            return most if reader.proven else min(most, reader.fetched_to - reader.reached)

        for shared in engine.exchange_pending.lists.values():
            for _ in range(backend.concurrency.limit):
                if not backend.has_room():
                    return
                if (found := shared.due(ready)) is None:
                    break
                rank_id, sample = found
                inode = shared.keys[sample]
                assert isinstance(inode, int)
                node = self._missing(inode, backend)
                reader = self._schedule.readers.get(rank_id)  # type: ignore[call-overload]
                position = None if reader is None else reader.epoch.next_position(inode)
                if node is None or position is None:
                    shared.leave_to_readers(sample)
                    continue
                if backend.judge(node) is not Admission.PREFETCH:
                    return
                shared.fetching(sample)
                yield backend, node, reader, position

    def _cursor(self, reader: PlannedReader) -> _Cursor:
        if (cursor := self._cursors.get(reader)) is None or cursor.epoch is not reader.epoch:
            cursor = self._cursors[reader] = _Cursor(reader.epoch)
        return cursor

    def _missing(self, inode: int, backend: PrefetchBackend) -> Node | None:
        if not inode or inode in self._failed or backend.is_resident(inode):
            return None
        # A look into the store costs more than the other questions.
        if self._leaves_substitutes and self._has_substitute(inode) and not self._fetcher.stored(ContentKey(inode)):
            return None
        node = self._sample(inode)
        # A version that has not settled is not kept, so fetching it would be in vain.
        return None if node is None or node.settles_at > steady_clock.now() else node

    def _sample(self, inode: int) -> Node | None:
        """The file, if it is neither empty nor so large that it is read in blocks."""
        node = self._catalogue.known(inode)
        return node if node is not None and 0 < node.stat.size <= self._sample_max_bytes else None

    def _prefetched(self, backend: PrefetchBackend, node: Node, reader: PlannedReader, result: PrefetchResult) -> None:
        now = trio.current_time()
        # What found no room before it was fetched took no time.
        if result.fetched and result.took_s:
            backend.concurrency.fetched(result.size, result.took_s, now)
            self._count_ahead(reader, node.version.size)
        if result.where == FETCHED and result.placed:
            self._counters.add("prefetched")
            if node.inode not in self._cache.engine.members:
                self._cache.engine.exchange_pending.not_kept(node.inode)
        elif result.where == FETCHED:
            self._keep(node.inode)
        else:
            # What the kernel alone has was fetched ahead too.
            self._counters.add("prefetched", int(result.where == UNSTORED and not result.failed))
            self._cache.engine.exchange_pending.not_kept(node.inode)
        if result.failed:
            self._failed[node.inode] = now + _FAILED_PAUSE_S
            # Landing grows when it has no room for what a reader has waited for; a full disk takes nothing at all.
            if result.where == UNSTORED:
                self._full_until_s = now + _FAILED_PAUSE_S
        self._wakeup.ring()

    def _count_ahead(self, reader: PlannedReader, size: int) -> None:
        for (trainer, _), known in self._schedule.readers.items():
            if known is reader:
                assert isinstance(trainer, int)
                self._fetched_ahead(trainer, size)

    def _keep(self, inode: int) -> None:
        self._arrived.append(inode)
        self._counters.add("prefetched")

    def _keep_arrived(self) -> None:
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._cache.place(*arrived)
            for inode in arrived:
                if inode not in self._cache.engine.members:
                    self._cache.engine.exchange_pending.not_kept(inode)


class _Cursor:
    """The position up to which the coming samples of a reader have been looked at."""

    def __init__(self, epoch: PlannedEpoch) -> None:
        self.epoch = epoch
        self._position = 0

    def coming(self, reader: PlannedReader, window: int) -> Iterator[tuple[int, int]]:
        """Position and inode of each sample not yet looked at; asking for the next one makes it one that was."""
        for position, key in reader.coming(window, self._position):
            assert isinstance(key, int)
            yield position, key
            self._position = position + 1
