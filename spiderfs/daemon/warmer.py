"""Files fetched, or dropped, because the user named them: `.spiderfs/warm` and `.spiderfs/evict`."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

import trio

from spiderfs.catalogue import Catalogue, Node
from spiderfs.core.events import FETCHED, WARMED
from spiderfs.core.patterns import Pattern
from spiderfs.errors import ConfigError, SpiderfsError, Stale, StoreCorrupt
from spiderfs.fetcher import Fetcher
from spiderfs.lister import Lister
from spiderfs.metrics import Counters
from spiderfs.store.store import BLOCK_BYTES, Content, ContentKey

log = logging.getLogger(__name__)

# Requests that may wait; more than anybody writes by hand, few enough to answer for.
MAX_WAITING = 1000
# Files of one request that are fetched at the same time.
_CONCURRENT = 8

# (inode, size, where, pid, block): the event that tells the keeper of a candidate
Note = Callable[[int, int, int, int, int], None]


class Warmer:
    """Fetches what patterns name, a request at a time, and remembers how far it is."""

    def __init__(
        self,
        catalogue: Catalogue,
        lister: Lister,
        fetcher: Fetcher,
        content: Content,
        counters: Counters,
        sample_max_bytes: int,
        note: Note,
    ) -> None:
        self._catalogue = catalogue
        self._lister = lister
        self._fetcher = fetcher
        self._content = content
        self._counters = counters
        self._sample_max_bytes = sample_max_bytes
        self._note = note
        self._send, self._receive = trio.open_memory_channel[Sequence[Pattern]](MAX_WAITING)
        self._found = self._fetched = self._present = self._failed = self._bytes = 0
        self._working = False
        self._last_evicted = 0

    def warm(self, patterns: Sequence[Pattern]) -> None:
        """Begin to fetch; raises ConfigError when too many requests wait already."""
        try:
            self._send.send_nowait(patterns)
        except trio.WouldBlock:
            raise ConfigError(
                f"{MAX_WAITING} requests wait already: write again when .spiderfs/warm says idle"
            ) from None

    async def run(self) -> None:
        """Work off requests, for ever."""
        async for patterns in self._receive:
            self._found = self._fetched = self._present = self._failed = self._bytes = 0
            self._working = True
            slots = trio.CapacityLimiter(_CONCURRENT)
            async with trio.open_nursery() as nursery:
                wanted = _any_below(patterns)
                async with aclosing(self._lister.walk(wanted, ttl_s=1.0)) as walk:
                    async for files in walk:
                        for node in files:
                            if any(pattern.matches(node.path) for pattern in patterns):
                                self._found += 1
                                await slots.acquire_on_behalf_of(node)
                                nursery.start_soon(self._bring, node, slots)
            self._working = False

    async def _bring(self, node: Node, slots: trio.CapacityLimiter) -> None:
        large = node.stat.size > self._sample_max_bytes
        blocks = range(1, math.ceil(node.stat.size / BLOCK_BYTES) + 1) if large else range(1)
        fetched = False
        try:
            # What is fetched before would not be kept. Those of a directory settle at about the same time.
            await trio.sleep(max(0.0, node.settles_at - time.time()))
            for block in blocks:
                key = ContentKey(node.inode, block)
                if node.stat.size == 0 or self._fetcher.stored(key):
                    continue
                payload, where = await self._fetcher.fetch(node, block)
                fetched = True
                self._bytes += len(payload)
                if where == FETCHED:
                    self._note(node.inode, len(payload), WARMED, 0, block)
        except StoreCorrupt:
            raise
        except SpiderfsError as exc:
            self._failed += 1
            log.warning("warming %s: %s", os.fsdecode(node.path), exc)
        else:
            self._fetched += fetched
            self._present += not fetched
            self._counters.add("warmed", int(fetched))
        finally:
            self._content.end_read()
            slots.release_on_behalf_of(node)

    def evict(self, patterns: Sequence[Pattern]) -> list[ContentKey]:
        """The records of all cached files that the patterns mean."""
        going = []
        for member in self._content.members():
            try:
                path = self._catalogue.node(member.key.inode).path
            except Stale:
                continue
            if any(pattern.matches(path) for pattern in patterns):
                going.append(member.key)
        self._last_evicted = len(going)
        return going

    def warm_progress(self) -> str:
        state = "working" if self._working else "idle"
        return (
            f"{state}: {self._found} files found, {self._fetched} fetched ({self._bytes} bytes), "
            f"{self._present} cached before, {self._failed} failed\n"
        )

    def evict_result(self) -> str:
        return f"{self._last_evicted} records evicted by the last request\n"


def _any_below(patterns: Sequence[Pattern]) -> Callable[[bytes], bool]:
    return lambda directory: any(pattern.may_match_below(directory) for pattern in patterns)
