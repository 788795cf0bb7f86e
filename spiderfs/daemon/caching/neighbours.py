"""Members of an archive that are fetched ahead together: which they are, and the one read of the source that has all.

What comes along lands like any other sample, each under its own lock, so nothing else knows of chunks. A member that
another process has fetched meanwhile is simply not taken from the chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from spiderfs.archives.neighbourhood import Neighbourhood
from spiderfs.archives.source import ArchiveSource
from spiderfs.core.chunks import Member, chunk_of, is_worth_it
from spiderfs.core.engine import Engine
from spiderfs.core.plans.schedule import PlannedReader
from spiderfs.errors import SpiderfsError
from spiderfs.vfs.catalogue import Catalogue, Node
from spiderfs.vfs.fetcher import Fetcher


class Chunk:
    """`nodes` are the members; the first `payload` that is asked for reads all of them."""

    def __init__(self, fetcher: Fetcher, around: Neighbourhood, members: list[Member], nodes: list[Node]) -> None:
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
                length = min(self._end, self._around.version.size) - self._begin
                self._whole = await self._fetcher.read_range(
                    self._around.as_file, self._begin, length, self._around.version
                )
            except SpiderfsError as exc:
                self._error = exc
            finally:
                self._ended.set()
        await self._ended.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._around.bytes_in(self._whole, self._begin, self._members[node.inode])


class Neighbours:
    """Finds the members of archives that are worth fetching together."""

    def __init__(self, source: ArchiveSource, catalogue: Catalogue, engine: Engine, fetcher: Fetcher) -> None:
        self._source, self._catalogue, self._engine, self._fetcher = source, catalogue, engine, fetcher

    def chunk(
        self, node: Node, reader: PlannedReader, since: int, is_near: Callable[[int], bool], most_bytes: int
    ) -> Chunk | None:
        """Samples to fetch together, with `most_bytes` of the archive; None if `node` is fetched alone.

        `since` is as in `is_worth_it`; what is near needs no fetch.
        """
        around = None if reader.exchanges else self._source.neighbourhood(node.path, node.version)
        wanted = None if around is None else around.member
        if around is None or wanted is None:
            return None
        nodes = {wanted.number: node}

        def admits(member: Member) -> bool:
            found = self._node(around, member)
            if found is None or is_near(found.inode):
                return False
            if not is_worth_it(self._engine, reader, found.inode, found.stat.size, since):
                return False
            nodes[member.number] = found
            return True

        members = chunk_of(wanted, around.beside(-1), around.beside(1), admits, most_bytes)
        if len(members) == 1:
            return None
        return Chunk(self._fetcher, around, members, [nodes[member.number] for member in members])

    def _node(self, around: Neighbourhood, member: Member) -> Node | None:
        """The file of a member, if its name is known and means this version."""
        path = around.path_of(member)
        dentry = self._catalogue.find(*self._catalogue.parent_of(path))
        if dentry is None or not dentry.stat.size or not around.is_version(member, dentry.stat.version):
            return None
        return Node(dentry.inode, path, dentry.stat, dentry.settles_at)
