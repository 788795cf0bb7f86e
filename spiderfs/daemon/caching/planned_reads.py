"""Fetches planned samples many at a time: no task waits for each, and those that come together are stored together.

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

import trio

from spiderfs.core.events import FETCHED, HIT, UNSTORED
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.prefetch_backend import PrefetchResult
from spiderfs.errors import SourceError, SourceUnavailable, StoreError
from spiderfs.fuse.wire import store
from spiderfs.shared.shared_memory import Flights
from spiderfs.sources.client import Patience
from spiderfs.sources.read_process import ReadProcess, SealedRead
from spiderfs.store.content import LmdbContent, chunked_record
from spiderfs.store.extents import Lease
from spiderfs.store.store import ContentKey
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.on_demand import Supply

Ended = Callable[[PrefetchResult | None], object]
"""Is given what became of a sample; None: it is to be fetched by itself."""

_LOOK_S = 1.0
# A look that comes later than this says that this process stood still, and not the source.
_STOOD_STILL_S = 2.0
_FAILED = PrefetchResult(None, failed=True)


@dataclass(slots=True)
class _Flight:
    node: Node
    ended: Ended
    patience: Patience
    lease: Lease | None
    push: bool = False

    @property
    def size(self) -> int:
        return self.node.stat.size

    def record(self, read: SealedRead) -> bytes:
        if self.lease is None:
            return read.record
        return chunked_record(ContentKey(self.node.inode), read.record, self.lease)


class PlannedReads:
    def __init__(
        self, reading: ReadProcess, flights: Flights, cache: CacheControl, content: LmdbContent, supply: Supply
    ) -> None:
        self._reading, self._flights, self._cache = reading, flights, cache
        self._content, self._client, self._fetcher = content, supply.client, supply.fetcher
        self._counters = supply.counters
        self._waiting: deque[tuple[Node, Ended, bool]] = deque()
        self._under_way: dict[int, _Flight] = {}
        """By the slot of the reading process."""
        self._pushing: dict[int, tuple[Ended, PrefetchResult]] = {}
        """What has come, and is given to the kernel, by slot."""
        reading.sealed, reading.pushed = self._have_come, self._has_pushed
        flights.clear()

    @property
    def pushes(self) -> bool:
        return self._reading.pushes

    def begin(self, node: Node, ended: Ended, push: bool = False) -> None:
        """Fetch a sample from the next `send` on, and give it to the kernel if `push`; `ended` is called later."""
        self._waiting.append((node, ended, push))

    def send(self) -> None:
        """Ask the source for the samples that have begun, as far as it may be asked now."""
        going: list[tuple[Node, Ended, bool]] = []
        size = 0
        while self._waiting and len(going) < self._reading.room:
            node, ended, push = self._waiting[0]
            if not self._reading.in_flight.fits(node.stat.size, size):
                break
            self._waiting.popleft()
            if self._takes_off(node):
                going.append((node, ended, push))
                size += node.stat.size
            else:
                ended(None)
        if not going:
            return
        try:
            leases = self._content.lease([node.stat.size for node, _, _ in going])
        except StoreError as exc:
            self._fetcher.store_failed(exc)
            self._flights.finish([node.inode for node, _, _ in going])
            for node, ended, _ in going:
                ended(PrefetchResult(UNSTORED, node.stat.size, failed=True))
            return
        patience = self._client.patience()
        for (node, ended, push), lease in zip(going, leases, strict=True):
            packed = b"" if lease is None else lease.packed()
            head = store(node.inode, node.stat.size) if push else b""
            slot = self._reading.begin(node.path, node.stat.size, node.version, packed, node.inode, head)
            self._under_way[slot] = _Flight(node, ended, patience, lease, push)
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
                self._reading.abandon(slot, partial(self._free, flight))
                self._client.timed_out(flight.patience)
                self._flights.finish([flight.node.inode])
                flight.ended(_FAILED)

    def _have_come(self, reads: list[SealedRead]) -> None:
        come = []
        for read in reads:
            flight = self._under_way.pop(read.slot)
            if read.error is None:
                come.append((flight, read))
            else:
                self._failed(flight, read.error, read.took_s)
        if come:
            self._client.answered()
            originals = [flight.size for flight, read in come if not read.from_peer]
            self._counters.add("origin_reads", len(originals))
            self._counters.add("origin_bytes", sum(originals))
            self._store(come)
        self.send()

    def _failed(self, flight: _Flight, error: Exception, took_s: float) -> None:
        self._free(flight)
        self._flights.finish([flight.node.inode])
        if isinstance(error, StoreError):
            self._fetcher.store_failed(error)
            flight.ended(PrefetchResult(UNSTORED, flight.size, took_s, failed=True))
        elif isinstance(error, SourceError) and not isinstance(error, SourceUnavailable):
            self._client.answered()
            flight.ended(_FAILED)
        else:
            flight.ended(None)

    def _free(self, flight: _Flight) -> None:
        if flight.lease is not None:
            self._content.extents.free([flight.lease])

    def _store(self, come: list[tuple[_Flight, SealedRead]]) -> None:
        try:
            landed = self._cache.land([(flight.node.inode, flight.size, flight.record(read)) for flight, read in come])
        except StoreError as exc:
            if len(come) > 1:
                # One record that no longer fits on the disk must not keep the others out.
                for each in come:
                    self._store([each])
                return
            self._fetcher.store_failed(exc)
            self._free(come[0][0])
            landed = [UNSTORED]
        else:
            self._fetcher.store_works()
        self._flights.finish([flight.node.inode for flight, _ in come])
        for (flight, read), where in zip(come, landed, strict=True):
            result = PrefetchResult(where, flight.size, read.took_s, where not in (FETCHED, HIT), placed=True)
            if flight.push:
                self._pushing[read.slot] = flight.ended, result
            else:
                flight.ended(result)

    def _has_pushed(self, slot: int, pushed: bool) -> None:
        # What was given up has none.
        if (waiting := self._pushing.pop(slot, None)) is not None:
            ended, result = waiting
            ended(result._replace(pushed=pushed))
