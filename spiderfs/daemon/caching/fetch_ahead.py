"""Fetches planned samples into the store, as far as the engine would keep them: the way of mounts that are asked for
each open.

The window is as long as the samples that are read while some fetches take place. But it is never more than a small part
of a full cache, because a sample that is fetched long before its use takes the room of another one; in a small cache it
is what opens turn out to need (`core/plans/fetch_limits.py`). What room is free, the window may take.

A sample is fetched only if the engine would keep it now, that is, if the samples that leave for it are needed later. If
the engine would not, no sample behind it in the plans is worth fetching either.

With a member of an archive come those of its neighbours that are used soon (`neighbours.py`): they are under way as any
sample, and take its room, but no request of their own.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice

import trio

from spiderfs.core.chunks import FEW_BYTES, MOST_BYTES
from spiderfs.core.events import FETCHED, HIT
from spiderfs.core.plans.fetch_limits import AHEAD_SHARE, LEAST, Concurrency, Window
from spiderfs.core.plans.schedule import PlannedReader
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.neighbours import Chunk, Neighbours
from spiderfs.daemon.caching.planned_reads import PlannedReads
from spiderfs.daemon.caching.prefetch_backend import Admission, Done, PrefetchResult, positions_ahead
from spiderfs.errors import SpiderfsError
from spiderfs.store.store import ContentKey
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.fetcher import Fetcher

log = logging.getLogger(__name__)

# A window is at most this share of the cache: benchmarks/training/lookahead.py says what a longer one costs. But
# loader workers take whole batches at once. So in a small cache the window is as long as opens turn out to need, up to
# the larger share, or a few samples if these have room at all. Not beside peers: what comes ahead takes the room of
# samples that no other node keeps, and what a peer has comes in a millisecond.
BURST_SHARE = 0.1
BURST_ROOM = 0.25
# Of so many coming positions the mean size is taken; where they are smaller than what is cached, as extents of files
# that samples share are, a window has up to so many times more of them.
_COMING, _MOST_SCALE = 64, 8.0
# The weight of one request in the mean of the samples that come with each, and what of that mean needs no room.
_WEIGHT, _FEW_ALONG = 1 / 32, 0.1

Read = Callable[[], Awaitable[bytes]]


class FetchAhead:
    """See `PrefetchBackend`."""

    looks_again = True

    def __init__(
        self,
        cache: CacheControl,
        fetcher: Fetcher,
        most: int,
        first: int,
        neighbours: Neighbours | None = None,
        batches: PlannedReads | None = None,
        size_of: Callable[[int], int] = lambda inode: 0,
    ) -> None:
        """At most `most` requests are made at a time, and `first` at first; by `batches`, if there are any."""
        self._cache = cache
        self._fetcher = fetcher
        self._neighbours = neighbours
        self._batches = batches
        self.concurrency = Concurrency(most, first)
        self._windows: dict[PlannedReader, Window] = {}
        self._size_of = size_of
        self._coming_bytes: dict[PlannedReader, float] = {}
        self._fetching: dict[int, int] = {}
        """The bytes of each sample that is being fetched."""
        self._along: set[int] = set()
        """Those of them that come with another one's request."""
        self._each = 1.0
        """How many samples come with a request, as a moving mean."""
        self._to_begin: list[tuple[Node, PlannedReader, Done, Read | None, bool]] = []
        self._nursery: trio.Nursery | None = None

    @property
    def under_way(self) -> int:
        return len(self._fetching)

    @property
    def pushes(self) -> bool:
        """Whether it can give to the kernel what it fetches."""
        return self._batches is not None and self._batches.pushes

    @property
    def samples_at_once(self) -> int:
        """How many samples may be on their way at a time."""
        return self.concurrency.limit * self.samples_of_a_request

    @property
    def samples_of_a_request(self) -> int:
        # With room for no more than come now, no more would ever come.
        return math.ceil(2 * self._each - 1 - _FEW_ALONG)

    def start(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        if self._batches is not None:
            nursery.start_soon(self._batches.run)

    def look(self, readers: tuple[PlannedReader, ...], again: bool, idle: bool) -> None:
        if again:
            self._windows = {reader: self._window(reader) for reader in readers}
            self._coming_bytes = {reader: self._mean_of_coming(reader) for reader in readers}
        for reader in readers:
            self._window(reader).opened(reader.opens, reader.late, idle)

    def window(self, reader: PlannedReader) -> int:
        engine = self._cache.engine
        mean_bytes = engine.used_bytes / len(engine.members) if engine.members else 1.0
        cached = engine.budget_bytes / mean_bytes
        burst = min(self._window(reader).samples, max(cached * BURST_SHARE, LEAST), cached * BURST_ROOM)
        most = max(cached * AHEAD_SHARE, burst if engine.homes is None else 0.0, engine.free_bytes / mean_bytes)
        # A sample without room is fetched in vain.
        scale = min(max(1.0, mean_bytes / (self._coming_bytes.get(reader) or mean_bytes)), _MOST_SCALE)
        window = max(1, int(min(positions_ahead(reader, self.concurrency), most * scale)))
        # What is in hand and not opened yet takes the same room.
        return max(0, window - reader.in_hand)

    def _mean_of_coming(self, reader: PlannedReader) -> float:
        coming = (key for _, key in islice(reader.coming(_COMING), _COMING) if isinstance(key, int))
        sizes = [size for size in map(self._size_of, coming) if size]
        return sum(sizes) / len(sizes) if sizes else 0.0

    def _window(self, reader: PlannedReader) -> Window:
        return self._windows.setdefault(reader, Window(reader.opens, reader.late))

    def has_room(self) -> bool:
        requests = len(self._fetching) - len(self._along)
        return requests < self.concurrency.limit and (self._room_bytes() > 0 or not self._fetching)

    def _room_bytes(self) -> int:
        # What is on its way lands together, and takes free room or that of others. What is pushed out of landing
        # unseen, or finds the room taken, was fetched in vain.
        free = self._cache.engine.free_bytes
        return max(free, self._cache.landing_room_bytes - free) - sum(self._fetching.values())

    def is_resident(self, inode: int) -> bool:
        if inode in self._cache.engine.members or inode in self._fetching:
            return True
        key = ContentKey(inode)
        return self._fetcher.stored(key) or self._fetcher.under_way(key)

    def judge(self, node: Node) -> Admission:
        if self._cache.engine.would_keep(node.inode, node.stat.size):
            return Admission.PREFETCH
        return Admission.ENOUGH if self._cache.engine.could_keep(node.inode, node.stat.size) else Admission.LEAVE

    def prefetch(self, node: Node, reader: PlannedReader, position: int, done: Done) -> int:
        chunk = self.chunk(node, reader, reader.reached, self.is_resident, self.concurrency)
        return self.begin(chunk.nodes if chunk else [node], reader, done, chunk)

    def chunk(
        self,
        node: Node,
        reader: PlannedReader,
        since: int,
        is_resident: Callable[[int], bool],
        concurrency: Concurrency,
    ) -> Chunk | None:
        """The sample with its neighbours, for `begin`; None if none is to come along.

        `since` is as in `is_worth_it`. `concurrency` is that of the backend that prefetches the sample.
        """
        # Where all requests that may be made at a time are worth it, the source could perhaps send more still.
        most_bytes = min(MOST_BYTES if concurrency.is_highest else FEW_BYTES, self._room_bytes())
        chunk = None
        if self._neighbours is not None:
            chunk = self._neighbours.chunk(node, reader, since, is_resident, most_bytes)
        self._each += ((len(chunk.nodes) if chunk else 1) - self._each) * _WEIGHT
        return chunk

    def begin(
        self, nodes: list[Node], reader: PlannedReader, done: Done, chunk: Chunk | None, push: bool = False
    ) -> int:
        """Prefetch all these, which are those of the chunk if there is one, as `prefetch` does one.

        One that is alone is given to the kernel too, if `push`.
        """
        for each in nodes:
            self._fetching[each.inode] = each.stat.size
            self._to_begin.append((each, reader, done, partial(chunk.payload, each) if chunk else None, push))
        self._along.update(each.inode for each in nodes[1:])
        return sum(each.stat.size for each in nodes)

    def send(self) -> None:
        assert self._nursery is not None
        to_begin, self._to_begin = self._to_begin, []
        for node, reader, done, read, push in to_begin:
            if read is None and self._batches is not None:
                self._batches.begin(node, partial(self._ended, node, reader, done), push)
            else:
                self._nursery.start_soon(self._fetch, node, reader, done, read)
        if self._batches is not None:
            self._batches.send()

    def _ended(self, node: Node, reader: PlannedReader, done: Done, result: PrefetchResult | None) -> None:
        if result is None:
            assert self._nursery is not None
            self._nursery.start_soon(self._fetch, node, reader, done, None)
            return
        del self._fetching[node.inode]
        self._along.discard(node.inode)
        done(node, reader, result)

    async def _fetch(self, node: Node, reader: PlannedReader, done: Done, read: Read | None) -> None:
        started = trio.current_time()
        result = PrefetchResult(None, failed=True)
        try:
            fetched = await self._fetcher.fetch_bytes(node, read=read)
            # A fetch of another process is reported by that one.
            where = await fetched.settled() if fetched.claim() else HIT
            # A fetch was in vain if its bytes have not reached the store.
            result = PrefetchResult(
                where, len(fetched.payload), trio.current_time() - started, where not in (FETCHED, HIT)
            )
        except SpiderfsError as exc:
            log.debug("%s could not be fetched ahead: %s", os.fsdecode(node.path), exc)
        finally:
            self._ended(node, reader, done, result)

    def is_ready(self, inode: int) -> bool:
        return inode in self._cache.engine.members
