"""Directories: keeping the catalogue's listings complete and fresh, and walking them.

An undated directory (`Source.undated_directories`) has no mtime that could say that its names are still the same. So
its attributes are never asked for, and its listing is made anew whenever it is older than the caller allows, or of an
earlier mount that was told that nothing changes while mounted.
"""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import trio

from spiderfs.errors import SourceError, SourceNotFound, SourceUnavailable, Stale
from spiderfs.linux import steady_clock
from spiderfs.sources.client import SourceClient
from spiderfs.sources.single_flight import SingleFlight
from spiderfs.sources.source import SourceStat
from spiderfs.vfs.catalogue import ROOT_INODE, VIEWS_INODE, Catalogue, Dentry, Node, join
from spiderfs.vfs.rules import left_s

K = TypeVar("K")

# Names taken from the catalogue at a time by a walk.
_CHUNK = 1000

NotRead = Callable[[bytes, SourceError], object]
"""Hears of a directory that could not be read, and why."""


class Lister:
    def __init__(
        self,
        catalogue: Catalogue,
        client: SourceClient,
        clock: Callable[[], float] = steady_clock.now,
        since_s: float = 0.0,
    ) -> None:
        """`since_s`: no listing of an undated directory is believed that was made before."""
        self._catalogue = catalogue
        self._client = client
        self._flights = SingleFlight(client.timeouts)
        self._now = clock
        self.undated = client.source.undated_directories
        self._since_s = since_s if self.undated else 0.0
        self._forms: dict[str, Dentry] = {}
        self.at_once = max(1, client.max_concurrent * 3 // 4)
        """How many directories may be listed at a time for nobody who waits: readers have the other threads."""

    @property
    def busy(self) -> bool:
        """Whether anything is being asked of the source."""
        return self._flights.busy

    async def root(self, timeout_s: float | None = None) -> Node:
        """The root of the source, which is recorded when it is met first; `timeout_s` as in `SourceClient.call`."""
        known = self._catalogue.known(ROOT_INODE)
        if known is None or self._catalogue.known(VIEWS_INODE) is None:
            found = await self._client.stat(b"", timeout_s) if known is None else known.stat
            await trio.to_thread.run_sync(self._catalogue.record_root, found)
        return self._catalogue.node(ROOT_INODE)

    async def form(self, name: bytes) -> Dentry | None:
        """What this mount has in its directory of views under a name; the source is not asked."""
        if name not in self._catalogue.forms.names:
            return None
        form = os.fsdecode(name)
        if form not in self._forms:
            self._forms[form] = await trio.to_thread.run_sync(self._catalogue.record_form, form)
        return self._forms[form]

    async def start(self, path: bytes) -> tuple[Node, list[bytes]]:
        """The root of the mount, or of the form, below which a path lies, and the names that follow from there."""
        place = self._catalogue.forms.place(path)
        names = place.path.split(b"/") if place.path else []
        if not place.root:
            return await self.root(), names
        dentry = await self.form(os.fsencode(place.form))
        assert dentry is not None
        return Node(dentry.inode, place.root, dentry.stat), names

    async def directory(self, path: bytes) -> Node:
        """The directory at a path.

        This lists each directory above it, so that their names are in the catalogue. Raises Stale if there is no
        directory, SourceError if the source fails.
        """
        node, names = await self.start(path)
        for name in names:
            await self.complete(node, ttl_s=1.0)
            entry = self._catalogue.find(node.inode, name)
            if entry is None or not stat.S_ISDIR(entry.stat.mode):
                raise Stale(f"{os.fsdecode(path)} is no directory")
            node = Node(entry.inode, join(node.path, name), entry.stat)
        return node

    async def directories(
        self, paths: Iterable[bytes], ttl_s: float, not_read: NotRead = lambda path, exc: None
    ) -> dict[bytes, Node]:
        """The directories at these paths whose names can all be known, as of at most `ttl_s` ago; many at a time.

        `not_read` hears of those that there may be, and that could not be read.
        """

        async def one(path: bytes) -> Node:
            node = await self.directory(path)
            await self.complete(node, ttl_s)
            return node

        return await self._side_by_side(paths, one, not_read)

    async def _side_by_side(
        self, wanted: Iterable[K], ask: Callable[[K], Awaitable[Node]], not_read: Callable[[K, SourceError], object]
    ) -> dict[K, Node]:
        """What `ask` finds for each of these, `at_once` at a time; what it cannot find is left out."""
        found: dict[K, Node] = {}
        left = iter(wanted)

        async def some() -> None:
            for each in left:
                try:
                    with suppress(Stale):
                        found[each] = await ask(each)
                except SourceError as exc:
                    not_read(each, exc)

        async with trio.open_nursery() as nursery:
            for _ in range(self.at_once):
                nursery.start_soon(some)
        return found

    async def refresh(self, node: Node) -> Node:
        """The directory with its present attributes; with those that are known while the source cannot be asked.

        Raises Stale if it is a directory no more, SourceDenied where the source refuses to say.
        """
        if self.undated or not self._client.reachable:
            return node
        try:
            found = await self._flights.run(("stat", node.inode), lambda: self._client.stat(node.path))
        except SourceUnavailable:
            return node
        except SourceNotFound as exc:
            raise await self._gone(node) from exc
        if not stat.S_ISDIR(found.mode):
            raise await self._gone(node)
        return Node(node.inode, node.path, found)

    def looked_up(self, node: Node, ttl_s: float) -> tuple[SourceStat, float] | None:
        """A directory's attributes, if its name was looked up less than `ttl_s` ago, and how much of that is left."""
        name = self._catalogue.find(*self._catalogue.parent_of(node.path)) if self._has_name(node) else None
        if name is None or name.inode != node.inode:
            return None
        left = left_s(name.checked_at, self._now(), ttl_s)
        return (name.stat, left) if left > 0 else None

    def is_fresh(self, node: Node, ttl_s: float) -> bool:
        """Whether all names of a directory are known, as of at most `ttl_s` ago.

        They are if it was scanned since, or if its own name was looked up since and it had the mtime of its last scan.
        """
        listing = self._catalogue.listing(node.inode)
        if listing is None:
            return False
        if left_s(listing.scanned_at, self._now(), ttl_s, self._since_s) > 0:
            return True
        known = None if self.undated else self.looked_up(node, ttl_s)
        return known is not None and listing.is_settled and known[0].mtime_ns == listing.mtime_ns

    async def complete(self, node: Node, ttl_s: float, ahead: bool = False) -> None:
        """Make sure that all names of a directory are known, as of at most `ttl_s` ago or by an unchanged mtime.

        `ahead`: a reader will ask for the directory, and is to find its own name looked up as well. While the source
        is unreachable an old listing must do; raises SourceUnavailable if there is none.
        """
        listing = self._catalogue.listing(node.inode)
        if listing is not None:
            if self.is_fresh(node, ttl_s) or not self._client.reachable:
                return
            asked_at, known = self._now(), node
            node = await self.refresh(node)
            unchanged = not self.undated and node.stat.mtime_ns == listing.mtime_ns
            # A reader that has just waited in vain for the attributes need not wait for a scan as well.
            if not self._client.reachable:
                return
            if unchanged and listing.is_settled:
                if ahead and node is not known:
                    await trio.to_thread.run_sync(self._record_name, node, asked_at)
                return
        try:
            await self._flights.run(("scan", node.inode), lambda: self._scan(node, ahead))
        except SourceUnavailable:
            if listing is None:
                raise
        except SourceNotFound as exc:
            raise await self._gone(node) from exc

    async def _gone(self, node: Node) -> Stale:
        """The error for a directory that is none any more; the next look-up of its path asks the source."""
        await trio.to_thread.run_sync(self._catalogue.expire, node.path, True)
        return Stale(f"{os.fsdecode(node.path)} is no longer a directory")

    async def _scan(self, node: Node, ahead: bool) -> None:
        now = self._now()
        own, names = await self._client.scan(node.path)

        def record() -> None:
            # The mtime is from before the scan: a change during the scan makes it differ the next time.
            self._catalogue.record_listing(node.inode, names, own.mtime_ns, now)
            if ahead:
                self._record_name(node._replace(stat=own), now)

        await trio.to_thread.run_sync(record)

    def _record_name(self, node: Node, asked_at: float) -> None:
        """Note that the name of a directory was found to mean it. In a thread."""
        if self._has_name(node):
            parent, name = self._catalogue.parent_of(node.path)
            # Another look-up may have found meanwhile that the name is gone.
            if self._catalogue.find(parent, name) is not None:
                self._catalogue.record(parent, name, node.stat, asked_at)

    def _has_name(self, node: Node) -> bool:
        """Whether a directory is one of the source's names, and not the root of the source or of a form."""
        return bool(self._catalogue.forms.place(node.path).path)

    async def walk(
        self,
        wanted: Callable[[bytes], bool],
        ttl_s: float,
        roots: Iterable[bytes] = (b"",),
        not_read: NotRead = lambda path, exc: None,
    ) -> AsyncGenerator[list[Node], None]:
        """All regular files, some at a time, of every directory at and below `roots` whose path is `wanted`.

        `roots` are those of the mount or of forms. A directory that vanishes meanwhile is left out, and so is one that
        cannot be read; `not_read` hears of the latter.
        """

        async def complete(directory: Node) -> Node:
            await self.complete(directory, ttl_s)
            return directory

        waiting = [(await self.start(root))[0] for root in roots]
        while waiting:
            some = [directory for directory in waiting[-self.at_once :] if wanted(directory.path)]
            del waiting[-self.at_once :]
            for directory in await self._side_by_side(some, complete, lambda node, exc: not_read(node.path, exc)):
                after = 0
                while entries := self._catalogue.entries(directory.inode, after, _CHUNK):
                    after = entries[-1].position
                    nodes = [
                        Node(entry.inode, join(directory.path, entry.name), entry.stat, entry.settles_at)
                        for entry in entries
                    ]
                    waiting += [node for node in nodes if node.is_directory]
                    yield [node for node in nodes if node.is_regular]
                    await trio.lowlevel.checkpoint()
