"""Opening and reading a small file: the open makes it local as a whole, and reads slice it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from spiderfs.core.events import FETCHED, HIT, PUSHED, UNREAD
from spiderfs.errors import SpiderfsError
from spiderfs.metrics import Counters
from spiderfs.shared.attached_trainers import Attached
from spiderfs.sources.delivery import Delivery
from spiderfs.store.store import ContentKey
from spiderfs.vfs.answer_types import Attributes, Caller, EventSink, Opened
from spiderfs.vfs.catalogue import Dentry, Node
from spiderfs.vfs.fetcher import Fetched, Fetcher
from spiderfs.vfs.on_demand import OnDemand
from spiderfs.vfs.redirects import Redirects
from spiderfs.vfs.shown_views import ShownViews
from spiderfs.vfs.stand_ins import StandIns

# Look-ups whose fetches are remembered until the file is opened: as many as a loader's workers make side by side.
_LOOKED_INTO = 32


class SmallFiles:
    """The small files as one worker serves them."""

    def __init__(
        self,
        fetcher: Fetcher,
        on_demand: OnDemand,
        redirects: Redirects,
        stand_ins: StandIns,
        events: EventSink,
        counters: Counters,
        views: ShownViews | None,
        clock: Callable[[], float],
    ) -> None:
        """`views`: see `Fetcher`."""
        self._views = views
        self._now = clock
        # What look-ups have fetched to learn the size, for the opens that follow.
        self._looked_into: OrderedDict[int, Fetched] = OrderedDict()
        self._fetcher = fetcher
        self._on_demand = on_demand
        self._redirects = redirects
        self._stand_ins = stand_ins
        self._events = events
        self._counters = counters

    async def sized(self, node: Node) -> Node:
        """The file with the size of what is shown of it, for which a view may have to be made.

        The reader waits here and not in the open that follows, so that open counts as one that has waited.
        """
        if self._views is None or not self.is_unsized(node):
            return node
        fetched = self._looked_into[node.inode] = await self._on_demand.fetch(node)
        if len(self._looked_into) > _LOOKED_INTO:
            self._looked_into.popitem(last=False)
        return await self._views.noted(node, len(fetched.payload))

    async def sized_name(self, dentry: Dentry) -> Dentry:
        """The same for a name."""
        if self._views is None or not self.is_unsized(dentry):
            return dentry
        return dentry._replace(stat=(await self.sized(self._views.node(dentry.inode))).stat)

    async def sized_ahead(self, dentry: Dentry) -> Dentry:
        """The same for a name that nobody but a pusher looks up; the manager is told of what was fetched for that."""
        if self._views is None or not self.is_unsized(dentry):
            return dentry
        node = self._views.node(dentry.inode)
        fetched = await self._on_demand.fetch(node, is_read=False)
        node = await self._views.noted(node, len(fetched.payload))
        # Told before the READ that follows, which another worker may get.
        self.note_pushed(node, await fetched.settled() if fetched.claim() else HIT)
        return dentry._replace(stat=node.stat)

    def is_unsized(self, file: Node | Dentry) -> bool:
        """Whether the size of what is shown of a file is not known before the file was fetched once."""
        if self._views is None or not file.stat.viewed:
            return False
        return self._views.is_unknown(file.stat, file.settles_at, self._now())

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
        believed: Attached | None = None,
    ) -> Opened:
        """The same for a reader that is known; see `Redirects.reader_of`."""
        started, asked_s = time.perf_counter(), self._now()
        fetched = self._looked_into.pop(node.inode, None)
        key = ContentKey(node.inode)
        there = fetched is not None or not node.stat.size or self._fetcher.stored(key)
        if not there and not await self._fetcher.has_come(key):
            if believed is not None:
                self._stand_ins.send_back(node, believed, caller)
            fetched = await self._on_demand.fetch(node, delivery=delivery)
        self._counters.add("opens")
        if wanted != node.inode:
            self._counters.add("redirects")
        if fetched is None:
            self._note_hit(started, node.inode, node.stat.size, caller, trainer, wanted)
            # Without keywords, which take 0.1 us here.
            return Opened(node.inode, False)
        self._counters.observe("open_miss_seconds", time.perf_counter() - started)
        # The event says where the bytes lie, so it waits until they lie there.
        fetched.when_settled(partial(self.note_fetched, node, caller.pid, trainer, wanted, asked_s))
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
        self._events.note(inode, size, HIT, caller.pid, 0, trainer, wanted)

    async def bring_ahead(self, node: Node, delivery: Delivery | None, is_first: bool) -> bytes | None:
        """Make the file local, for no reader but because a plan names it; its content, if it was fetched now.

        `is_first`: the manager is told what becomes of this READ. It is told of a fetch in any case, but once.
        """
        key = ContentKey(node.inode)
        note = partial(self.note_pushed, node) if is_first else _note_nothing
        if not node.stat.size or self._fetcher.stored(key) or await self._fetcher.has_come(key):
            note(HIT)
            return None
        try:
            fetched = await self._on_demand.fetch(node, delivery=delivery, is_read=False)
        except SpiderfsError:
            note(UNREAD)
            raise
        if fetched.claim():
            fetched.when_settled(partial(self.note_pushed, node))
        else:
            note(HIT)
        return fetched.payload

    def note_pushed(self, node: Node, where: int) -> None:
        self._events.note(node.inode, node.stat.size, where | PUSHED, 0)
        # Many wait for this: the manager pushes the next one.
        self._events.flush()

    def note_given(self, stand_in: Attributes, pid: int, trainer: int, wanted: int) -> None:
        """Account for a stand-in that a reader was given at a look-up, where no open will tell of it."""
        self._counters.add("redirects")
        self._events.note(stand_in.inode, stand_in.size, HIT, pid, trainer=trainer, wanted=wanted)

    def note_fetched(self, node: Node, pid: int, trainer: int, wanted: int, asked_s: float, where: int) -> None:
        """Tell the policies of an open that had to fetch the file, and where the bytes lie now.

        `asked_s`: when the reader asked. It may have the bytes, and say so, before it is known where they lie.
        """
        if where != FETCHED:
            self._counters.add("opens_uncached")
        self._events.note(node.inode, node.stat.size, where, pid, trainer=trainer, wanted=wanted, at_s=asked_s)

    async def read(self, node: Node, offset: int, size: int) -> memoryview:
        """For a read that has found nothing here: the bytes have left the store since the open."""
        fetched = await self._on_demand.fetch(node)
        return memoryview(fetched.payload)[offset : offset + size]


def _note_nothing(where: int) -> None:
    pass
