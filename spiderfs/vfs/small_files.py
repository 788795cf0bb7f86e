"""Opening and reading a small file: the open makes it local as a whole, and reads slice it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

from spiderfs.core.events import FETCHED, HIT
from spiderfs.shared.published import Attached
from spiderfs.sources.source import Delivery
from spiderfs.store.store import ContentKey
from spiderfs.vfs.answer_types import Caller, EventSink, Opened
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.on_demand import OnDemand, Part, Supply
from spiderfs.vfs.redirects import Redirects
from spiderfs.vfs.substitutes import Substitutes

# What an event has room for: more than an hour.
_LONGEST_US = (1 << 32) - 1


class SmallFiles(Part):
    """The small files as one worker serves them."""

    def __init__(
        self,
        supply: Supply,
        on_demand: OnDemand,
        redirects: Redirects,
        substitutes: Substitutes,
        events: EventSink,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(supply, clock)
        self._on_demand = on_demand
        self._looked_into = on_demand.looked_into
        self._redirects = redirects
        self._substitutes = substitutes
        self._events = events

    async def open(self, node: Node, caller: Caller, delivery: Delivery | None) -> Opened:
        """Make the file local. The handle is the inode, whose bytes any worker can give."""
        # Asked now: once this open has been answered, the same thread may have looked up another name.
        return await self.open_for(node, caller, delivery, *self._redirects.reader_of(caller.pid, node.inode))

    async def open_for(
        self,
        node: Node,
        caller: Caller,
        delivery: Delivery | None,
        trainer: int,
        wanted: int,
        trusted: Attached | None = None,
        read: Callable[[], Awaitable[bytes]] | None = None,
    ) -> Opened:
        """The same for a reader that is known; see `Redirects.reader_of`. `read` is as in `Fetcher.fetch_bytes`."""
        started, asked_s = time.perf_counter(), self._now()
        fetched = self._looked_into.pop(node.inode, None)
        key = ContentKey(node.inode)
        there = fetched is not None or not node.stat.size or self._fetcher.stored(key)
        if not there and not await self._fetcher.has_arrived(key):
            if trusted is not None:
                self._substitutes.send_back(node, trusted, caller)
            fetched = await self._on_demand.fetch(node, delivery=delivery, read=read)
        self._counters.add("opens")
        if wanted != node.inode:
            self._counters.add("redirects")
        if fetched is None:
            self._note_hit(started, node.inode, node.stat.size, caller, trainer, wanted)
            # Without keywords, which take 0.1 us here.
            return Opened(node.inode, False)
        waited_s = time.perf_counter() - started
        self._counters.observe("open_miss_seconds", waited_s)
        # The event says where the bytes lie, so it waits until they lie there.
        fetched.when_settled(partial(self.note_fetched, node, caller.pid, trainer, wanted, asked_s, waited_s))
        return Opened(node.inode, direct_io=False, fetched=fetched.payload)

    def read_cached(self, inode: int, size: int, caller: Caller, trainer: int) -> memoryview | bytes | None:
        """A file of fewer than `size` bytes, accounted for as an open of it. None: it is not cached, or longer."""
        started = time.perf_counter()
        if inode in self._looked_into:
            return None
        content = self._fetcher.beginning(ContentKey(inode), size)
        if content is None or len(content) == size:
            return None
        self._counters.add("opens")
        self._note_hit(started, inode, len(content), caller, trainer, inode)
        return content

    def _note_hit(self, started: float, inode: int, size: int, caller: Caller, trainer: int, wanted: int) -> None:
        self._counters.add("opens_hit")
        self._counters.observe("open_hit_seconds", time.perf_counter() - started)
        # Without keywords, which take 0.1 us here.
        self._events.record_access(inode, size, HIT, caller.pid, 0, trainer, wanted)

    def note_fetched(
        self, node: Node, pid: int, trainer: int, wanted: int, asked_s: float, waited_s: float, where: int
    ) -> None:
        """Report an open that had to fetch the file; `asked_s`: when the reader asked."""
        if where != FETCHED:
            self._counters.add("opens_uncached")
        waited_us = min(int(waited_s * 1e6), _LONGEST_US)
        self._events.record_access(node.inode, node.stat.size, where, pid, 0, trainer, wanted, asked_s, waited_us)

    async def read(self, node: Node, offset: int, size: int) -> memoryview:
        """For a read that has found nothing here: the bytes have left the store since the open."""
        fetched = await self._on_demand.fetch(node)
        return memoryview(fetched.payload)[offset : offset + size]
