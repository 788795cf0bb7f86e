"""Fetches planned samples into the store, as far as the engine would keep them: the way of mounts that are asked for
each open.

The window is as long as the samples that are read while some fetches take place. But it is never more than a small part
of a full cache, because a sample that is fetched long before its use takes the room of another one; in a small cache it
is what opens turn out to need (`core/plans/fetch_limits.py`). What room is free, the window may take.

A sample is fetched only if the engine would keep it now, that is, if the samples that leave for it are needed later. If
the engine would not, no sample behind it in the plans is worth fetching either.

With a member of an archive come those of its neighbours that are used soon (`Neighbours`): they are under way as any
sample, and take its room, but no request of their own.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from operator import itemgetter

import trio

from spiderfs.archives.source import ArchiveSource, Neighbourhood
from spiderfs.core.chunks import FEW_BYTES, MOST_BYTES, Member, chunk_of, is_worth_it
from spiderfs.core.engine import Engine
from spiderfs.core.events import FETCHED, HIT
from spiderfs.core.plans.fetch_limits import AHEAD_SHARE, LEAST, Concurrency, Window
from spiderfs.core.plans.schedule import PlannedReader
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.planned_reads import Chunk, PlannedReads
from spiderfs.daemon.caching.prefetch_backend import Admission, Done, PrefetchResult, positions_ahead
from spiderfs.errors import SpiderfsError
from spiderfs.protocol.extents import Extent, extent_of
from spiderfs.sources.ranges import Grid, Grids
from spiderfs.sources.read_process import Cut
from spiderfs.sources.source import Version
from spiderfs.store.store import ContentKey
from spiderfs.vfs.catalogue import Catalogue, Node
from spiderfs.vfs.fetcher import Fetcher

log = logging.getLogger(__name__)


class Extents:
    """As `Neighbourhood`, for an extent of a large file and those that lie beside it without a gap."""

    def __init__(self, node: Node, extent: Extent, grid: Grid) -> None:
        self._node, self._extent, self._grid = node, extent, grid

    @property
    def member(self) -> Member | None:
        number = self._grid.number_of(self._extent.begin)
        return Member(number, *self._extent[1:]) if self._grid.at(number) == self._extent[1:] else None

    def beside(self, step: int) -> Iterator[Member]:
        at = self.member
        while at is not None and (place := self._grid.at(at.number + step)) is not None:
            if (place[0] != at.end) if step > 0 else (place[1] != at.begin):
                return
            yield (at := Member(at.number + step, *place))

    def node(self, catalogue: Catalogue, member: Member) -> Node | None:
        return catalogue.extent(self._extent._replace(begin=member.begin, end=member.end), self._node.stat)

    def read(self, begin: int, end: int) -> tuple[bytes, int, int, Version]:
        version = self._node.version._replace(size=end - begin)
        return self._extent._replace(begin=begin, end=end).path, 0, end - begin, version

    def cut(self, begin: int, member: Member) -> Cut:
        return itemgetter(slice(member.begin - begin, member.end - begin))


class Neighbours:
    """Finds the members of archives, and extents of files, that are worth fetching together."""

    def __init__(self, source: ArchiveSource | None, grids: Grids, catalogue: Catalogue, engine: Engine) -> None:
        self._source, self._grids = source, grids
        self._catalogue, self._engine = catalogue, engine

    def _around(self, node: Node) -> Neighbourhood | Extents | None:
        if (extent := extent_of(node.path)) is None:
            return None if self._source is None else self._source.neighbourhood(node.path, node.version)
        # Other nodes have the extents one by one.
        grids = self._grids.of(extent.file) if self._engine.homes is None else ()
        found = (Extents(node, extent, grid) for grid in reversed(grids))
        return next((around for around in found if around.member is not None), None)

    def chunk(
        self, node: Node, reader: PlannedReader, since: int, is_resident: Callable[[int], bool], most_bytes: int
    ) -> Chunk | None:
        """Samples to fetch with `node`, in `most_bytes`; None if it is fetched alone. `since`: see `is_worth_it`."""
        around = None if reader.exchanges else self._around(node)
        wanted = None if around is None else around.member
        if around is None or wanted is None:
            return None
        nodes = {wanted.number: node}

        def admits(member: Member) -> bool:
            if (found := around.node(self._catalogue, member)) is None or is_resident(found.inode):
                return False
            if not is_worth_it(self._engine, reader, found.inode, found.stat.size, since):
                return False
            nodes[member.number] = found
            return True

        members = chunk_of(wanted, around.beside(-1), around.beside(1), admits, most_bytes)
        if len(members) == 1:
            return None
        begin = members[0].begin
        cuts: list[Cut | None] = [around.cut(begin, member) for member in members]
        return Chunk(around.read(begin, members[-1].end), [nodes[member.number] for member in members], cuts)


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
        self._cache, self._fetcher, self._neighbours = cache, fetcher, neighbours
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
        self._to_begin: list[tuple[Chunk, PlannedReader, Done, bool]] = []
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
        return self.begin(chunk or Chunk.of(node), reader, done)

    def chunk(
        self,
        node: Node,
        reader: PlannedReader,
        since: int,
        is_resident: Callable[[int], bool],
        concurrency: Concurrency,
    ) -> Chunk | None:
        """The sample and neighbours, for `begin`, or None. `since`: see `is_worth_it`; `concurrency`: the backend's."""
        # Where all requests that may be made at a time are worth it, the source could perhaps send more still.
        most_bytes = min(MOST_BYTES if concurrency.is_highest else FEW_BYTES, self._room_bytes())
        chunk = None
        if self._neighbours is not None:
            chunk = self._neighbours.chunk(node, reader, since, is_resident, most_bytes)
        self._each += ((len(chunk.nodes) if chunk else 1) - self._each) * _WEIGHT
        return chunk

    def begin(self, chunk: Chunk, reader: PlannedReader, done: Done, push: bool = False) -> int:
        """Prefetch the samples of a chunk; one alone is given to the kernel too, if `push`."""
        sizes = {node.inode: node.stat.size for node in chunk.nodes}
        self._fetching.update(sizes)
        self._along.update(node.inode for node in chunk.nodes[1:])
        self._to_begin.append((chunk, reader, done, push))
        return sum(sizes.values())

    def send(self) -> None:
        assert self._nursery is not None
        to_begin, self._to_begin = self._to_begin, []
        for chunk, reader, done, push in to_begin:
            if self._batches is not None:
                self._batches.begin(chunk, partial(self._ended, reader, done), push)
            else:
                for node in chunk.nodes:
                    self._nursery.start_soon(self._fetch, node, reader, done)
        if self._batches is not None:
            self._batches.send()

    def _ended(self, reader: PlannedReader, done: Done, node: Node, result: PrefetchResult | None) -> None:
        if result is None:
            assert self._nursery is not None
            self._nursery.start_soon(self._fetch, node, reader, done)
            return
        del self._fetching[node.inode]
        self._along.discard(node.inode)
        done(node, reader, result)

    async def _fetch(self, node: Node, reader: PlannedReader, done: Done) -> None:
        started = trio.current_time()
        result = PrefetchResult(None, failed=True)
        try:
            fetched = await self._fetcher.fetch_bytes(node)
            # A fetch of another process is reported by that one.
            where = await fetched.settled() if fetched.claim() else HIT
            # A fetch was in vain if its bytes have not reached the store.
            result = PrefetchResult(
                where, len(fetched.payload), trio.current_time() - started, where not in (FETCHED, HIT)
            )
        except SpiderfsError as exc:
            log.debug("%s could not be fetched ahead: %s", os.fsdecode(node.path), exc)
        finally:
            self._ended(reader, done, node, result)

    def is_ready(self, inode: int) -> bool:
        return inode in self._cache.engine.members
