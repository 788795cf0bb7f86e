"""Fetches planned samples many at a time: no task waits for each, and those that come together are stored together.

Samples that lie side by side come with one request (`Chunk`).

The reading process writes the bytes into chunks of the store that were leased for them, and answers with checksums. So
the manager handles small records alone: dropping what leaves for them, landing them and keeping them is one
transaction. Whoever opens such a sample meanwhile waits for it in the table of flights.

Each sample is asked for once. Where the source does not give it, it is handed back, to be fetched with the patience and
the repetitions that a reader's fetch has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import trio

from spiderfs.core.events import FETCHED, HIT, UNSTORED
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.prefetch_backend import PrefetchResult
from spiderfs.errors import SourceError, SourceUnavailable, StoreError
from spiderfs.fuse.wire import store
from spiderfs.shared.shared_memory import Flights
from spiderfs.sources.client import Patience
from spiderfs.sources.read_process import Cut, ReadProcess, SealedRead
from spiderfs.sources.source import Version
from spiderfs.store.content import LmdbContent, chunked_record
from spiderfs.store.extents import Lease
from spiderfs.store.store import ContentKey
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.on_demand import Supply

Ended = Callable[[Node, PrefetchResult | None], object]
"""Is given what became of a sample; None: it is to be fetched by itself."""

_LOOK_S = 1.0
# A look that comes later than this says that this process stood still, and not the source.
_STOOD_STILL_S = 2.0
_FAILED = PrefetchResult(None, failed=True)


class Chunk(NamedTuple):
    """Samples that one read of the source brings: its arguments, and what cuts each of them out of its bytes."""

    read: tuple[bytes, int, int, Version]
    nodes: list[Node]
    cuts: list[Cut | None]

    @classmethod
    def of(cls, node: Node) -> Chunk:
        """A sample alone."""
        return cls((node.path, 0, node.stat.size, node.version), [node], [None])

    @property
    def length(self) -> int:
        return self.read[2]


class _Sample(NamedTuple):
    node: Node
    cut: Cut | None
    ended: Ended
    push: bool
    lease: Lease | None = None

    @property
    def size(self) -> int:
        return self.node.stat.size

    def record(self, sealed: bytes) -> bytes:
        return sealed if self.lease is None else chunked_record(ContentKey(self.node.inode), sealed, self.lease)


@dataclass(slots=True)
class _Flight:
    samples: list[_Sample]
    length: int
    patience: Patience


class PlannedReads:
    def __init__(
        self, reading: ReadProcess, flights: Flights, cache: CacheControl, content: LmdbContent, supply: Supply
    ) -> None:
        self._reading, self._flights, self._cache = reading, flights, cache
        self._content, self._client, self._fetcher = content, supply.client, supply.fetcher
        self._counters = supply.counters
        self._waiting: deque[tuple[Chunk, Ended, bool]] = deque()
        self._under_way: dict[int, _Flight] = {}
        """By the slot of the reading process."""
        self._pushing: dict[int, tuple[_Sample, PrefetchResult]] = {}
        """What has come, and is given to the kernel, by slot."""
        reading.sealed, reading.pushed = self._have_come, self._has_pushed
        flights.clear()

    @property
    def pushes(self) -> bool:
        return self._reading.pushes

    def begin(self, chunk: Chunk, ended: Ended, push: bool = False) -> None:
        """Fetch samples from the next `send` on; `ended` is called for each. `push`: give the one to the kernel too."""
        self._waiting.append((chunk, ended, push))

    def send(self) -> None:
        """Ask the source for the samples that have begun, as far as it may be asked now."""
        going: list[tuple[Chunk, list[_Sample]]] = []
        size = 0
        while self._waiting and len(going) < self._reading.room:
            chunk, ended, push = self._waiting[0]
            if not self._reading.in_flight.fits(chunk.length, size):
                break
            self._waiting.popleft()
            samples = []
            for node, cut in zip(chunk.nodes, chunk.cuts, strict=True):
                if self._takes_off(node):
                    samples.append(_Sample(node, cut, ended, push))
                else:
                    ended(node, None)
            if samples:
                going.append((chunk, samples))
                size += chunk.length
        if not going:
            return
        try:
            leases = iter(self._content.lease([sample.size for _, samples in going for sample in samples]))
        except StoreError as exc:
            self._failed([sample for _, samples in going for sample in samples], exc)
            return
        patience = self._client.patience()
        for chunk, samples in going:
            samples = [sample._replace(lease=next(leases)) for sample in samples]
            files = [(each.cut, b"" if each.lease is None else each.lease.packed()) for each in samples]
            inode = samples[0].node.inode
            head = store(inode, chunk.length) if samples[0].push else b""
            slot = self._reading.begin(*chunk.read, files, inode, head)
            self._under_way[slot] = _Flight(samples, chunk.length, patience)
        self._counters.add("source_requests", len(going))
        self._reading.send()

    def _takes_off(self, node: Node) -> bool:
        """Note in the table that a sample is being fetched, unless it is fetched by someone else, or otherwise."""
        # First the table, then the lock: a worker looks at the table after it has taken the lock, so that one of the
        # two sees the other.
        if node.stat.viewed or not self._flights.begin(node.inode):
            return False
        key = ContentKey(node.inode)
        # A read that is still open would show the store as it was before another process let its lock go.
        self._content.end_read()
        if self._fetcher.locked(key) or self._fetcher.stored(key):
            self._flights.finish([node.inode])
            return False
        return True

    async def run(self) -> None:
        """For ever: give up on the source where it does not answer in time."""
        while True:
            looked_at_s = trio.current_time()
            await trio.sleep(_LOOK_S)
            now_s = trio.current_time()
            if now_s - looked_at_s > _STOOD_STILL_S:
                for flight in self._under_way.values():
                    flight.patience = flight.patience._replace(until=flight.patience.until + now_s - looked_at_s)
                continue
            late = [slot for slot, flight in self._under_way.items() if flight.patience.until <= now_s]
            for slot in late:
                # The chunks stay leased until the read returns, for it may yet write into them.
                flight = self._under_way.pop(slot)
                self._reading.abandon(slot, partial(self._free, flight.samples))
                self._client.timed_out(flight.patience)
                self._end(flight.samples, _FAILED)

    def _have_come(self, reads: list[SealedRead]) -> None:
        come: list[tuple[_Sample, bytes, SealedRead]] = []
        originals = []
        for read in reads:
            flight = self._under_way.pop(read.slot)
            if read.error is not None:
                self._failed(flight.samples, read.error, read.took_s)
                continue
            self._client.answered()
            if not read.from_peer:
                originals.append(flight.length)
            for sample, sealed in zip(flight.samples, read.records, strict=True):
                if sealed:
                    come.append((sample, sealed, read))
                else:
                    self._failed([sample])
        self._counters.add("origin_reads", len(originals))
        self._counters.add("origin_bytes", sum(originals))
        if come:
            self._store(come)
        self.send()

    def _failed(self, samples: list[_Sample], error: Exception | None = None, took_s: float = 0.0) -> None:
        self._free(samples)
        if isinstance(error, StoreError):
            self._fetcher.store_failed(error)
            for sample in samples:
                self._end([sample], PrefetchResult(UNSTORED, sample.size, took_s, failed=True))
        elif isinstance(error, SourceError) and not isinstance(error, SourceUnavailable):
            self._client.answered()
            self._end(samples, _FAILED)
        else:
            self._end(samples, None)

    def _end(self, samples: list[_Sample], result: PrefetchResult | None) -> None:
        self._flights.finish([sample.node.inode for sample in samples])
        for sample in samples:
            sample.ended(sample.node, result)

    def _free(self, samples: list[_Sample]) -> None:
        self._content.extents.free([sample.lease for sample in samples if sample.lease is not None])

    def _store(self, come: list[tuple[_Sample, bytes, SealedRead]]) -> None:
        rows = [(sample.node.inode, sample.size, sample.record(sealed)) for sample, sealed, _ in come]
        try:
            landed = self._cache.land(rows)
        except StoreError as exc:
            if len(come) > 1:
                # One record that no longer fits on the disk must not keep the others out.
                for each in come:
                    self._store([each])
                return
            self._fetcher.store_failed(exc)
            self._free([come[0][0]])
            landed = [UNSTORED]
        else:
            self._fetcher.store_works()
        self._flights.finish([sample.node.inode for sample, _, _ in come])
        for (sample, _, read), where in zip(come, landed, strict=True):
            result = PrefetchResult(where, sample.size, read.took_s, where not in (FETCHED, HIT), placed=True)
            if sample.push:
                self._pushing[read.slot] = sample, result
            else:
                sample.ended(sample.node, result)

    def _has_pushed(self, slot: int, pushed: bool) -> None:
        # What was given up has none.
        if (waiting := self._pushing.pop(slot, None)) is not None:
            sample, result = waiting
            sample.ended(sample.node, result._replace(pushed=pushed))
