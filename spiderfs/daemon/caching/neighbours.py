"""Members of an archive, or extents of a file, that are fetched ahead together, by one read of the source for all.

What comes along lands like any other sample, each under its own lock, so nothing else knows of chunks. A member that
another process has fetched meanwhile is simply not taken from the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import trio

from spiderfs.archives.source import ArchiveSource, Neighbourhood
from spiderfs.core.chunks import Member, chunk_of, is_worth_it
from spiderfs.core.engine import Engine
from spiderfs.core.plans.schedule import PlannedReader
from spiderfs.errors import SpiderfsError
from spiderfs.protocol.extents import Extent, extent_of
from spiderfs.sources.ranges import Grid, Grids
from spiderfs.sources.source import Version
from spiderfs.vfs.catalogue import Catalogue, Node
from spiderfs.vfs.fetcher import Fetcher


class Chunk:
    """`nodes` are the members; the first `payload` that is asked for reads all of them."""

    def __init__(
        self, fetcher: Fetcher, around: Neighbourhood | Extents, members: list[Member], nodes: list[Node]
    ) -> None:
        self.nodes = nodes
        self._fetcher, self._around = fetcher, around
        self._members = {node.inode: member for node, member in zip(nodes, members, strict=True)}
        self._begin, self._end = members[0].begin, members[-1].end
        self._ended: trio.Event | None = None
        self._whole = b""
        self._error: SpiderfsError | None = None

    async def payload(self, node: Node) -> bytes:
        """The bytes of a member; raises what the read raised, and ArchiveFailed."""
        if self._ended is None:
            self._ended = trio.Event()
            try:
                self._whole = await self._fetcher.read_range(*self._around.request(self._begin, self._end))
            except SpiderfsError as exc:
                self._error = exc
            finally:
                self._ended.set()
        await self._ended.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._around.bytes_in(self._whole, self._begin, self._members[node.inode])


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

    def request(self, begin: int, end: int) -> tuple[bytes, int, int, Version]:
        version = self._node.version._replace(size=end - begin)
        return self._extent._replace(begin=begin, end=end).path, 0, end - begin, version

    def bytes_in(self, whole: bytes, begin: int, member: Member) -> bytes:
        return whole[member.begin - begin : member.end - begin]


class Neighbours:
    """Finds the members of archives, and extents of files, that are worth fetching together."""

    def __init__(
        self, source: ArchiveSource | None, grids: Grids, catalogue: Catalogue, engine: Engine, fetcher: Fetcher
    ) -> None:
        self._source, self._grids = source, grids
        self._catalogue, self._engine, self._fetcher = catalogue, engine, fetcher

    def _around(self, node: Node) -> Neighbourhood | Extents | None:
        extent = extent_of(node.path)
        if extent is None:
            return None if self._source is None else self._source.neighbourhood(node.path, node.version)
        # Other nodes have the extents one by one.
        grids = self._grids.of(extent.file) if self._engine.homes is None else ()
        found = (Extents(node, extent, grid) for grid in reversed(grids))
        return next((around for around in found if around.member is not None), None)

    def chunk(
        self, node: Node, reader: PlannedReader, since: int, is_resident: Callable[[int], bool], most_bytes: int
    ) -> Chunk | None:
        """Samples to fetch together, with `most_bytes` of the archive; None if `node` is fetched alone.

        `since` is as in `is_worth_it`; what is near needs no fetch.
        """
        around = None if reader.exchanges else self._around(node)
        wanted = None if around is None else around.member
        if around is None or wanted is None:
            return None
        nodes = {wanted.number: node}

        def admits(member: Member) -> bool:
            found = around.node(self._catalogue, member)
            if found is None or is_resident(found.inode):
                return False
            if not is_worth_it(self._engine, reader, found.inode, found.stat.size, since):
                return False
            nodes[member.number] = found
            return True

        members = chunk_of(wanted, around.beside(-1), around.beside(1), admits, most_bytes)
        if len(members) == 1:
            return None
        return Chunk(self._fetcher, around, members, [nodes[member.number] for member in members])
