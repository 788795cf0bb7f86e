"""Fetches that a reader waits for: their time is counted, and a version that the source no longer has is reported."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable

import trio

from spiderfs.errors import (
    SourceChanged,
    SourceError,
    SourceNotADirectory,
    SourceNotFound,
    SourceUnavailable,
    Stale,
    StoreError,
)
from spiderfs.sources.client import Patience
from spiderfs.sources.delivery import Delivery
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.fetcher import Fetched
from spiderfs.vfs.supply import Supply

log = logging.getLogger(__name__)

# Look-ups whose fetches are remembered until the file is opened: as many as a loader's workers make side by side.
_LOOKED_INTO = 32


class OnDemand:
    """Fetches for readers. All methods raise Stale for a version that the source no longer has, and SourceError."""

    def __init__(self, supply: Supply, scattered: Callable[[], bool]) -> None:
        """`scattered`: see `Filesystem`."""
        self._scattered = scattered
        self._catalogue = supply.catalogue
        self._client = supply.client
        self._fetcher = supply.fetcher
        self._counters = supply.counters
        # What look-ups have fetched to learn the size, for the opens that follow: these take it out.
        self.looked_into: OrderedDict[int, Fetched] = OrderedDict()

    async def look_into(self, node: Node) -> Fetched:
        """Fetch a whole file for a look-up, and have it at hand for the open that follows."""
        fetched = self.looked_into[node.inode] = await self.fetch(node)
        if len(self.looked_into) > _LOOKED_INTO:
            self.looked_into.popitem(last=False)
        return fetched

    async def fetch(
        self,
        node: Node,
        block: int = 0,
        delivery: Delivery | None = None,
        patience: Patience | None = None,
        is_read: bool = True,
    ) -> Fetched:
        """A whole file (block 0) or one block, as `Fetcher.bring` gives it. `is_read`: somebody waits for it."""
        started = time.perf_counter()
        try:
            fetched = await self._fetcher.bring(node, block, delivery, patience)
        except (SourceNotFound, SourceChanged) as exc:
            raise await self.stale(node, exc) from exc
        if is_read:
            self._count_stall(started)
        return fetched

    async def read_uncached(self, node: Node, offset: int, size: int) -> bytes:
        """Bytes from the source that are kept nowhere."""
        started = time.perf_counter()
        try:
            piece = await self._client.read(node.path, offset, size, node.version)
        except (SourceNotFound, SourceChanged) as exc:
            raise await self.stale(node, exc) from exc
        self._counters.add("origin_reads")
        self._counters.add("origin_bytes", size)
        self._count_stall(started)
        return piece

    def _count_stall(self, started: float) -> None:
        self._counters.add("stall_microseconds", int((time.perf_counter() - started) * 1e6))

    async def check_still_named(self, node: Node) -> None:
        """Raises Stale if the name of this version is known to mean another one, or to have to be looked up anew.

        The kernel believes a name for its whole TTL. An open that is answered with ESTALE makes the kernel look the
        name up anew and open again. A READ cannot do that: its ESTALE goes to the reader and leaves the name believed.
        """
        if not self._catalogue.still_names(node) and not (self._scattered() and await self._is_at_source(node)):
            raise Stale(f"{os.fsdecode(node.path)} has changed at the source")

    async def _is_at_source(self, node: Node) -> bool:
        """Whether the source has this version, for a name that another worker may know; so it is while it is away."""
        try:
            return (await self._client.stat(node.path)).version == node.version
        except SourceUnavailable:
            return True
        except SourceError:
            return False

    async def stale(self, node: Node, exc: SourceError) -> Stale:
        """The error for a version that the source no longer has; the next look-up of its name asks the source."""
        self._counters.add("stale_handles")
        try:
            await trio.to_thread.run_sync(self._catalogue.expire, node.path, isinstance(exc, SourceNotADirectory))
        except StoreError as exc:
            log.warning("%s: an old name may be shown until it expires", exc)
        return Stale(f"{os.fsdecode(node.path)} has changed at the source")
