"""Fetches ahead: the samples that plans name, the sooner needed first, as far as the engine would keep them.

The prefetcher looks at a window of each reader's plan. The window is as long as the samples that are read while some
fetches take place. But it is never more than a small part of the cache, because a sample that is fetched long before
its use takes the room of another one; in a small cache it is what opens turn out to need (`core/window.py`).

A sample is fetched only if the engine would keep it now, that is, if the samples that leave for it are needed later. If
the engine would not, no sample behind it in the plans is worth fetching either. The number of fetches at a time follows
the speed of the source (`core/concurrency.py`). Between readers the earlier deadline decides, so a slow reader cannot
hold up a fast one. When a reader has to wait for a file, its worker fetches the file: a miss never queues behind the
fetches ahead.

All state belongs to the manager's event loop. Samples that have arrived go to the cache control together, once a turn.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import islice

import trio

from spiderfs.core.concurrency import Concurrency
from spiderfs.core.events import FETCHED, UNSTORED
from spiderfs.core.planned_epoch import PlannedEpoch
from spiderfs.core.schedule import PlannedReader
from spiderfs.core.window import LEAST, Window
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.errors import SpiderfsError
from spiderfs.metrics import Counters
from spiderfs.options.model import Options
from spiderfs.sources.client import SourceClient
from spiderfs.store.store import Content, ContentKey
from spiderfs.vfs.catalogue import Catalogue, Node
from spiderfs.vfs.fetcher import Fetcher

log = logging.getLogger(__name__)

# The window is so many seconds of reading long, or so many fetches if these take longer. So a reader does not notice a
# source that stops for a moment.
AHEAD_S = 2.0
AHEAD_LATENCIES = 8
# The window is at most this share of the cache: benchmarks/training/lookahead.py says what a longer one costs. But
# loader workers take whole batches at once. So in a small cache the window is as long as opens turn out to need, up to
# the larger share, or a few samples if these have room at all.
AHEAD_SHARE = 0.02
BURST_SHARE = 0.1
BURST_ROOM = 0.25
# So many positions from an epoch's start are fetched before it is known whether the plan is followed. A wrong plan
# costs no more than that.
UNPROVEN_SAMPLES = 64
# After so long all samples are looked at again: some have left the cache, and for others there is room now.
_LOOK_AGAIN_S = 0.25
# For so long a file that could not be fetched is left to its reader.
_FAILED_PAUSE_S = 10.0
# For so long nothing is fetched ahead after the store has failed.
_STORE_PAUSE_S = 1.0
# A source that was idle within this time could have served more fetches.
_LATELY_S = 0.5
# So many positions are looked at in one turn: 2 ms.
_AT_A_TIME = 2000


@dataclass(frozen=True)
class PlanStatus:
    """How a reader with a plan is doing, and the fetches ahead of it; `late_share` is of its `opens`."""

    trainer: int
    list: str
    epoch: int
    position: int
    length: int
    epochs_ahead: int
    believed: bool
    followed_share: float
    samples_per_s: float
    ready_samples: int
    ready_s: float
    window_samples: int
    opens: int
    late_share: float


@dataclass(frozen=True)
class PrefetcherStatus:
    plans: tuple[PlanStatus, ...]
    under_way: int
    limit: int
    most: int
    latency_s: float
    bytes_per_s: float


class Bell:
    """Wakes the prefetcher. A component that brings news of plans or readers is made before it, and rings this bell."""

    def __init__(self) -> None:
        self._rung = trio.Event()

    def ring(self) -> None:
        self._rung.set()

    def silence(self) -> None:
        """Forget earlier rings: the next `wait` ends only at a ring that comes after this call."""
        self._rung = trio.Event()

    async def wait(self) -> None:
        await self._rung.wait()


class Prefetcher:
    """Fetches ahead of readers; rings of `bell` say that they have come further, or that plans have come.

    `has_stand_in` says of an inode that a cached file can stand in for it. Where the options have readers take that at
    every miss, such an inode is not fetched. `fetched_ahead` is told for which trainer how many bytes were fetched.
    """

    def __init__(
        self,
        cache: CacheControl,
        catalogue: Catalogue,
        fetcher: Fetcher,
        client: SourceClient,
        content: Content,
        counters: Counters,
        options: Options,
        bell: Bell,
        has_stand_in: Callable[[int], bool],
        fetched_ahead: Callable[[int, int], None],
    ) -> None:
        self._cache = cache
        self._schedule = cache.engine.schedule
        self._catalogue = catalogue
        self._fetcher = fetcher
        self._client = client
        self._content = content
        self._counters = counters
        self._sample_max_bytes = options.sample_max_bytes
        self._bell = bell
        self._has_stand_in = has_stand_in
        self._fetched_ahead = fetched_ahead
        self.change(options)
        self._cursors: dict[PlannedReader, _Cursor] = {}
        self._windows: dict[PlannedReader, Window] = {}
        self._looked_at_s = self._full_until_s = 0.0
        self._idle_at_s = -_LATELY_S
        self._arrived: list[int] = []
        self._failed: dict[int, float] = {}
        self.under_way: set[int] = set()
        self.concurrency = Concurrency(options.fetches)

    def change(self, options: Options) -> None:
        """Take over live options."""
        self._leaves_stand_ins = options.substitute_when == "miss"

    def status(self) -> PrefetcherStatus:
        concurrency = self.concurrency
        return PrefetcherStatus(
            plans=tuple(self._plan_status(*owner, reader) for owner, reader in self._schedule.readers.items()),
            under_way=len(self.under_way),
            limit=concurrency.limit,
            most=concurrency.most,
            latency_s=concurrency.latency_s,
            bytes_per_s=concurrency.bytes_per_s,
        )

    def _plan_status(self, trainer: Hashable, name: str, reader: PlannedReader) -> PlanStatus:
        assert isinstance(trainer, int)
        ready = self.ready_ahead(reader)
        return PlanStatus(
            trainer=trainer,
            list=name,
            epoch=reader.epoch.number,
            position=reader.reached,
            length=len(reader.epoch),
            epochs_ahead=len(reader.later),
            believed=reader.believed,
            followed_share=reader.followed_share,
            samples_per_s=1 / reader.pace_s,
            ready_samples=ready,
            ready_s=ready * reader.pace_s,
            window_samples=self.window(reader),
            opens=reader.opens,
            late_share=reader.late / max(1, reader.opens),
        )

    async def run(self) -> None:
        """Fetch ahead for ever."""
        async with trio.open_nursery() as nursery:
            while True:
                self._bell.silence()
                try:
                    self._keep_arrived()
                    self._cache.expect(self.concurrency.limit if self._schedule.active else None)
                    if self._schedule.active and self._client.reachable and trio.current_time() >= self._full_until_s:
                        self._fetch_due(nursery)
                except SpiderfsError as exc:
                    log.warning("%s: nothing is fetched ahead for a moment", exc)
                    self._full_until_s = trio.current_time() + _STORE_PAUSE_S
                with trio.move_on_after(_LOOK_AGAIN_S if self._schedule.active else float("inf")):
                    await self._bell.wait()

    def window(self, reader: PlannedReader) -> int:
        """How many positions ahead of a reader may be fetched now."""
        engine = self._cache.engine
        ahead_s = max(AHEAD_S, AHEAD_LATENCIES * self.concurrency.latency_s)
        mean_bytes = engine.used_bytes / len(engine.members) if engine.members else 1.0
        cached = engine.budget_bytes / mean_bytes
        burst = min(self._window(reader).samples, max(cached * BURST_SHARE, LEAST), cached * BURST_ROOM)
        most = max(cached * AHEAD_SHARE, burst)
        # A slow reader's window has work for all fetches at a time, too; but a sample without room is fetched in vain.
        return max(1, int(min(max(ahead_s / reader.pace_s, 2 * self.concurrency.limit), most)))

    def _window(self, reader: PlannedReader) -> Window:
        return self._windows.setdefault(reader, Window(reader.opens, reader.late))

    def ready_ahead(self, reader: PlannedReader) -> int:
        """How many samples the reader could read now, one after the other, without waiting for the source."""
        members = self._cache.engine.members
        ready = 0
        for _, inode in islice(reader.coming(_AT_A_TIME), _AT_A_TIME):
            assert isinstance(inode, int)
            if inode and inode not in members and self._sample(inode) is not None:
                break
            ready += 1
        return ready

    # -- what to fetch

    def _fetch_due(self, nursery: trio.Nursery) -> None:
        now = trio.current_time()
        if now >= self._looked_at_s + _LOOK_AGAIN_S:
            self._looked_at_s = now
            self._cursors.clear()
            self._failed = {inode: until_s for inode, until_s in self._failed.items() if until_s > now}
            self._windows = {reader: self._window(reader) for reader in self._schedule.believed}
        idle = now < self._idle_at_s + _LATELY_S
        for reader in self._schedule.believed:
            self._window(reader).opened(reader.opens, reader.late, idle)
        try:
            due = self._due()
            while len(self.under_way) < self.concurrency.limit:
                found = next(due, None)
                if found is None:
                    self.concurrency.short_of_work(now)
                    break
                self.under_way.add(found[0].inode)
                nursery.start_soon(self._bring, *found)
        finally:
            self._content.end_read()

    def _due(self) -> Iterator[tuple[Node, PlannedReader]]:
        """The missing samples that the engine would keep, by deadline, and the reader who comes to each first."""
        readers = {}
        for reader in self._schedule.believed:
            limit = reader.look_ahead = self.window(reader)
            if not reader.proven:
                # Count from the epoch's start: the furthest open may be anywhere in a wrong plan.
                limit = min(limit, reader.epoch.start + UNPROVEN_SAMPLES - reader.reached)
            readers[reader] = self._cursor(reader).coming(reader, limit)
        heads = {reader: next(coming, None) for reader, coming in readers.items()}
        for _ in range(_AT_A_TIME):
            waiting = [(reader.time_of(head[0]), head[1], reader) for reader, head in heads.items() if head is not None]
            if not waiting:
                self._idle_at_s = trio.current_time()
                return
            _, inode, reader = min(waiting, key=lambda candidate: candidate[0])
            node = self._missing(inode)
            if node is not None:
                if self._cache.engine.would_keep(inode, node.stat.size):
                    yield node, reader
                elif self._cache.engine.could_keep(inode, node.stat.size):
                    return
            heads[reader] = next(readers[reader], None)
        self._bell.ring()

    def _cursor(self, reader: PlannedReader) -> _Cursor:
        cursor = self._cursors.get(reader)
        if cursor is None or cursor.epoch is not reader.epoch:
            cursor = self._cursors[reader] = _Cursor(reader.epoch)
        return cursor

    def _missing(self, inode: int) -> Node | None:
        """The file, if it is to be fetched."""
        if not inode or inode in self._cache.engine.members or inode in self.under_way or inode in self._failed:
            return None
        key = ContentKey(inode)
        if self._fetcher.stored(key) or self._fetcher.under_way(key):
            return None
        if self._leaves_stand_ins and self._has_stand_in(inode):
            return None
        node = self._sample(inode)
        # A version that has not settled is not kept, so fetching it would be in vain.
        return None if node is None or node.settles_at > time.time() else node

    def _sample(self, inode: int) -> Node | None:
        """The file, if it is neither empty nor so large that it is read in blocks."""
        node = self._catalogue.known(inode)
        return node if node is not None and 0 < node.stat.size <= self._sample_max_bytes else None

    # -- fetching

    async def _bring(self, node: Node, reader: PlannedReader) -> None:
        started = trio.current_time()
        try:
            payload, where = await self._fetcher.fetch(node)
        except SpiderfsError as exc:
            self._failed[node.inode] = trio.current_time() + _FAILED_PAUSE_S
            log.debug("%s could not be fetched ahead: %s", os.fsdecode(node.path), exc)
        else:
            now = trio.current_time()
            self.concurrency.fetched(len(payload), now - started, now)
            self._tell_for_whom(reader, node.version.size)
            if where == FETCHED:
                self._arrived.append(node.inode)
                self._counters.add("prefetched")
            else:
                # The fetch was in vain. Landing grows when that happens to a reader; a full disk takes nothing at all.
                self._failed[node.inode] = now + _FAILED_PAUSE_S
                if where == UNSTORED:
                    self._full_until_s = now + _FAILED_PAUSE_S
        finally:
            self.under_way.discard(node.inode)
            self._bell.ring()

    def _tell_for_whom(self, reader: PlannedReader, size: int) -> None:
        for (trainer, _), known in self._schedule.readers.items():
            if known is reader:
                assert isinstance(trainer, int)
                self._fetched_ahead(trainer, size)

    def _keep_arrived(self) -> None:
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._cache.place(*arrived)


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
