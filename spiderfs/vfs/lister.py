"""Directories: keeping the catalogue's listings complete and fresh, and walking them."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncGenerator, Callable, Iterable

import trio

from spiderfs.errors import SourceError, SourceNotFound, SourceUnavailable, Stale
from spiderfs.linux import steady_clock
from spiderfs.sources.client import SourceClient
from spiderfs.sources.single_flight import SingleFlight
from spiderfs.vfs.catalogue import ROOT_INODE, VIEWS_INODE, Catalogue, Dentry, Node, join

# Names taken from the catalogue at a time by a walk.
_CHUNK = 1000


class Lister:
    def __init__(
        self, catalogue: Catalogue, client: SourceClient, clock: Callable[[], float] = steady_clock.now
    ) -> None:
        self._catalogue = catalogue
        self._client = client
        self._flights = SingleFlight(client.timeouts)
        self._now = clock
        self._forms: dict[str, Dentry] = {}

    @property
    def busy(self) -> bool:
        """Whether anything is being asked of the source."""
        return self._flights.busy

    async def root(self) -> Node:
        """The root of the source, which is recorded when it is met first."""
        known = self._catalogue.known(ROOT_INODE)
        if known is None or self._catalogue.known(VIEWS_INODE) is None:
            found = await self._client.stat(b"") if known is None else known.stat
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

    async def refresh(self, node: Node) -> Node:
        """The directory with its present attributes; with those that are known while the source cannot be asked.

        Raises Stale if it is a directory no more, SourceDenied where the source refuses to say.
        """
        if not self._client.reachable:
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

    async def complete(self, node: Node, ttl_s: float) -> None:
        """Make sure that all names of a directory are known, as of at most `ttl_s` ago or by an unchanged mtime.

        While the source is unreachable an old listing must do; raises SourceUnavailable if there is none.
        """
        listing = self._catalogue.listing(node.inode)
        if listing is not None:
            if 0 <= self._now() - listing.scanned_at < ttl_s or not self._client.reachable:
                return
            fresh = await self.refresh(node)
            unchanged = fresh.stat.mtime_ns == listing.mtime_ns
            # A reader that has just waited in vain for the attributes need not wait for a scan as well.
            if not self._client.reachable or (unchanged and listing.is_settled):
                return
        try:
            await self._flights.run(("scan", node.inode), lambda: self._scan(node))
        except SourceUnavailable:
            if listing is None:
                raise
        except SourceNotFound as exc:
            raise await self._gone(node) from exc

    async def _gone(self, node: Node) -> Stale:
        """The error for a directory that is none any more; the next look-up of its path asks the source."""
        await trio.to_thread.run_sync(self._catalogue.expire, node.path, True)
        return Stale(f"{os.fsdecode(node.path)} is no longer a directory")

    async def _scan(self, node: Node) -> None:
        now = self._now()
        # Asked before the scan: a change during the scan then makes the mtime differ the next time.
        found = await self._client.stat(node.path)
        names = await self._client.scan(node.path)
        await trio.to_thread.run_sync(self._catalogue.record_listing, node.inode, names, found.mtime_ns, now)

    async def walk(
        self, wanted: Callable[[bytes], bool], ttl_s: float, roots: Iterable[bytes] = (b"",)
    ) -> AsyncGenerator[list[Node], None]:
        """All regular files, some at a time, of every directory at and below `roots` whose path is `wanted`.

        `roots` are those of the mount or of forms. A directory that vanishes meanwhile, or cannot be read, is left out
        without an error.
        """
        waiting = [(await self.start(root))[0] for root in roots]
        while waiting:
            directory = waiting.pop()
            if not wanted(directory.path):
                continue
            try:
                await self.complete(directory, ttl_s)
            except (SourceError, Stale):
                continue
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
