"""Fetches that a reader waits for: their time is counted, and a version that the source no longer has is reported.

A look-up of a file whose view was never made waits for a fetch too: the view says how long the file is
(`ShownViews`).
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import trio

from spiderfs import errors
from spiderfs.metrics import Counters
from spiderfs.protocol.extents import file_of
from spiderfs.shared.read_log import ReadLog
from spiderfs.sources.client import Patience, SourceClient
from spiderfs.sources.ranges import Grids
from spiderfs.sources.source import Delivery
from spiderfs.store.store import Content, Records
from spiderfs.vfs.answer_types import EventSink
from spiderfs.vfs.catalogue import Catalogue, Dentry, Node
from spiderfs.vfs.fetcher import Fetched, Fetcher, ShownViews
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.redirects import Redirects
from spiderfs.vfs.rules import Settings
from spiderfs.vfs.unstored_bytes import UnstoredBytes

log = logging.getLogger(__name__)

# Look-ups whose fetches are remembered until the file is opened: as many as a loader's workers make side by side.
_LOOKED_INTO = 32


@dataclass(frozen=True)
class Supply:
    """What a process brings files by; each part has been given those that it needs of the others."""

    content: Content
    records: Records
    client: SourceClient
    catalogue: Catalogue
    lister: Lister
    fetcher: Fetcher
    counters: Counters
    views: ShownViews | None = None
    """Where the mount shows views; see `Fetcher`."""
    grids: Grids = field(default_factory=Grids)
    read_log: ReadLog = field(default_factory=partial(ReadLog, 1))


class Shared(NamedTuple):
    """What a worker's parts are made with; `settings` gives the present ones, `scattered`: others know other names."""

    supply: Supply
    redirects: Redirects
    events: EventSink
    unstored: UnstoredBytes
    settings: Callable[[], Settings]
    scattered: Callable[[], bool]
    clock: Callable[[], float]


class Part:
    """A part of the file system."""

    def __init__(self, shared: Shared) -> None:
        supply, self._redirects, self._events, self._unstored, self._settings, self._scattered, self._now = shared
        self._content, self._client, self._catalogue = supply.content, supply.client, supply.catalogue
        self._lister, self._fetcher, self._counters = supply.lister, supply.fetcher, supply.counters
        self._views, self._read_log = supply.views, supply.read_log


class OnDemand(Part):
    """Fetches for readers. All methods raise Stale for a version that the source no longer has, and SourceError."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        # What look-ups have fetched to learn the size, for the opens that follow: these take it out.
        self.looked_into: OrderedDict[int, Fetched] = OrderedDict()

    async def sized(self, node: Node) -> Node:
        """The file with the size of what is shown: a view may be made, for which the reader waits here, and once."""
        if self._views is None or not self.is_unsized(node):
            return node
        fetched = self.looked_into[node.inode] = await self.fetch(node)
        if len(self.looked_into) > _LOOKED_INTO:
            self.looked_into.popitem(last=False)
        return await self._views.with_size(node, len(fetched.payload))

    async def sized_name(self, dentry: Dentry) -> Dentry:
        """The same for a name."""
        if not self.is_unsized(dentry):
            return dentry
        return dentry._replace(stat=(await self.sized(self._catalogue.node(dentry.inode))).stat)

    async def sized_ahead(self, dentry: Dentry) -> tuple[Node, Fetched] | None:
        """The same for no reader: the file with its size, and what was fetched for that; None if it was known."""
        if self._views is None or not self.is_unsized(dentry):
            return None
        node = self._catalogue.node(dentry.inode)
        fetched = await self.fetch(node, is_read=False)
        return await self._views.with_size(node, len(fetched.payload)), fetched

    def is_unsized(self, file: Node | Dentry) -> bool:
        """Whether the size of what is shown of a file is unknown until the file is fetched for the first time."""
        if self._views is None or not file.stat.viewed:
            return False
        return self._views.is_unknown(file.stat, file.settles_at, self._now())

    async def fetch(
        self,
        node: Node,
        block: int = 0,
        delivery: Delivery | None = None,
        patience: Patience | None = None,
        is_read: bool = True,
        read: Callable[[], Awaitable[bytes]] | None = None,
    ) -> Fetched:
        """A whole file (block 0) or one block, as `Fetcher.fetch_bytes` gives it. `is_read`: someone waits for it."""
        started = time.perf_counter()
        try:
            fetched = await self._fetcher.fetch_bytes(node, block, delivery, patience, read)
        except (errors.SourceNotFound, errors.SourceChanged) as exc:
            raise await self.stale(node, exc) from exc
        if is_read:
            self._count_stall(started)
        return fetched

    async def read_uncached(self, node: Node, offset: int, size: int) -> bytes:
        """Bytes from the source that are kept nowhere."""
        started = time.perf_counter()
        try:
            piece = await self._fetcher.read_piece(node, offset, size)
        except (errors.SourceNotFound, errors.SourceChanged) as exc:
            raise await self.stale(node, exc) from exc
        self._count_stall(started)
        return piece

    def _count_stall(self, started: float) -> None:
        self._counters.add("stall_microseconds", int((time.perf_counter() - started) * 1e6))

    async def check_still_named(self, node: Node) -> None:
        """Raises Stale if the name of this version is known to mean another one, or to have to be looked up again.

        The kernel trusts a name for its whole TTL. An open that is answered with ESTALE makes the kernel look the
        name up again and open again. A READ cannot do that: its ESTALE goes to the reader and leaves the name trusted.
        """
        if not self._catalogue.still_names(node) and not (self._scattered() and await self._is_at_source(node)):
            raise errors.Stale(f"{os.fsdecode(node.path)} has changed at the source")

    async def _is_at_source(self, node: Node) -> bool:
        """Whether the source has this version, for a name that another worker may know; so it is while it is away."""
        try:
            return (await self._client.stat(node.path)).version == node.version
        except errors.SourceUnavailable:
            return True
        except errors.SourceError:
            return False

    async def stale(self, node: Node, exc: errors.SourceError) -> errors.Stale:
        """The error for a version that is gone; its name is looked up next, unless it means another one already."""
        self._counters.add("stale_handles")
        # No name leads to an extent but that of its file.
        path, whole = file_of(node.path), isinstance(exc, errors.SourceNotADirectory)
        try:
            known = self._catalogue.find(*self._catalogue.parent_of(path))
            if whole or path != node.path or known is None or known.stat.version == node.version:
                await trio.to_thread.run_sync(self._catalogue.expire, path, whole)
        except errors.StoreError as exc:
            log.warning("%s: an old name may be shown until it expires", exc)
        return errors.Stale(f"{os.fsdecode(path)} has changed at the source")
