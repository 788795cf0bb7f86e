"""Opening and reading a small file: the open makes it local as a whole, and reads slice it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from spiderfs.core.events import FETCHED, HIT
from spiderfs.linux.worker_threads import WorkerThreads
from spiderfs.protocol.extents import PAGE_BYTES, Extent
from spiderfs.shared.published import Attached
from spiderfs.sources.source import Delivery
from spiderfs.store.store import ContentKey
from spiderfs.vfs.answer_types import Caller, Opened
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.on_demand import OnDemand, Part, Shared
from spiderfs.vfs.substitutes import Substitutes

# What an event has room for: more than an hour.
_LONGEST_US = (1 << 32) - 1


class SmallFiles(Part):
    """The small files as one worker serves them."""

    def __init__(self, shared: Shared, on_demand: OnDemand, substitutes: Substitutes) -> None:
        super().__init__(shared)
        self._on_demand, self._substitutes = on_demand, substitutes
        self._looked_into = on_demand.looked_into

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
        if (content := self._fetcher.beginning(ContentKey(inode), size)) is None or len(content) == size:
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


# Threads whose last extent is remembered; a forgotten one counts an open twice.
_THREADS = 4096
_NONE = (0, 0, 0, 0)
# A READ of up to so many bytes is that of a page fault, with what the kernel reads around it.
_FAULT_BYTES = 16 << 10
# How long such a READ is held up while another READ has some of the pages.
_PUSH_PATIENCE_S = 0.005

Push = Callable[[int, bytes, int], object]


class RangeReader(Part):
    """READs of large files that lie in extents of planned ranges (`sources/ranges.py`): each extent is a small file.

    The first READ of a thread in an extent counts as an open of it. Missing extents that lie side by side are read
    together.

    A reader that maps the file asks for a page at a time, and goes on to the next page of the extent. So before such a
    READ is answered, the kernel is given the extent's other pages, which takes as long as one READ.
    """

    def __init__(self, shared: Shared, small_files: SmallFiles, push: Push) -> None:
        """`push` gives the kernel pages of a file: its inode, the bytes, and where they begin."""
        super().__init__(shared)
        self._push, self._thread, self._pushing = push, WorkerThreads(1), False
        self._grids, self._small_files = shared.supply.grids, small_files
        # By thread: the file, where the extent begins and ends, and the extent's inode.
        self._last: dict[int, tuple[int, int, int, int]] = {}

    def read_again(self, inode: int, offset: int, size: int, caller: Caller) -> memoryview | None:
        """The bytes of a READ in the extent that the thread has read last, as the faults of a sample's pages are."""
        file, begin, until, extent = self._last.get(caller.pid, _NONE)
        if file != inode or offset < begin or offset + size > until:
            return None
        return self._fetcher.local(ContentKey(extent), offset - begin, size)

    async def read(self, file: Node, offset: int, size: int, caller: Caller) -> memoryview | bytes | None:
        """The bytes of a READ as `Filesystem.read` gives them; None if they lie in no grid."""
        end = min(offset + size, file.stat.size)
        for grid in reversed(self._grids.of(file.path) if offset < end else ()):
            if (extents := grid.covering(offset, end)) is None:
                continue
            nodes = [self._catalogue.extent(Extent(file.path, *extent), file.stat) for extent in extents]
            members = [node for node in nodes if node is not None]
            if len(members) == len(extents):
                found = await self._pieces(file, members, extents, offset, end, caller)
                if end - offset <= _FAULT_BYTES:
                    found = bytes(found)
                    await self._push_others(file, members, extents, offset, end)
                return found
        return None

    async def _push_others(
        self, file: Node, members: list[Node], extents: list[tuple[int, int]], offset: int, end: int
    ) -> None:
        """Give the kernel the extents' pages but those of the READ, which it has locked.

        The kernel waits for other pages that a READ has locked, and the answer may be this process's to give. So this
        takes a thread, and a READ that finds it at work is answered without.
        """
        # What is not read is not learned.
        if self._pushing or self._read_log.is_kept(self._now()):
            return
        # A STORE of a part of a page would be lost.
        offset, end, pushes = offset // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES, []
        for member, (begin, until) in zip(members, extents, strict=True):
            for first, last in ((begin, offset), (end, until)):
                if first < last:
                    piece = self._fetcher.local(ContentKey(member.inode), first - begin, last - first)
                    if piece is not None:
                        pushes.append((file.inode, bytes(piece), first))
        if pushes:
            with trio.move_on_after(_PUSH_PATIENCE_S):
                await self._thread.run(self._push_all, pushes)

    def _push_all(self, pushes: list[tuple[int, bytes, int]]) -> None:
        self._pushing = True
        try:
            for push in pushes:
                self._push(*push)
        finally:
            self._pushing = False

    async def _pieces(
        self, file: Node, members: list[Node], extents: list[tuple[int, int]], offset: int, end: int, caller: Caller
    ) -> memoryview | bytes:
        held, held_from = b"", 0

        async def read(number: int) -> bytes:
            """The bytes of an extent, read together with those behind it that are missing too."""
            nonlocal held, held_from
            begin, until = extents[number]
            if not held_from <= begin < until <= held_from + len(held):
                last = until
                for member, (_, further) in zip(members[number + 1 :], extents[number + 1 :], strict=True):
                    key = ContentKey(member.inode)
                    if self._fetcher.stored(key) or self._fetcher.under_way(key):
                        break
                    last = max(last, further)
                held_from = begin
                held = await self._fetcher.read_range(file.path, begin, last - begin, file.version)
            return held[begin - held_from : until - held_from]

        pieces: list[memoryview | bytes] = []
        for number, (member, (begin, until)) in enumerate(zip(members, extents, strict=True)):
            # Extents that were cut for two names of one file may overlap.
            at, length = offset - begin, min(end, until) - offset
            offset += length
            payload = await self._open(member, (file.inode, begin, until), caller, partial(read, number))
            piece: memoryview | bytes | None
            if payload is not None:
                piece = memoryview(payload)[at : at + length]
            else:
                if (piece := self._fetcher.local(ContentKey(member.inode), at, length)) is None:
                    piece = await self._small_files.read(member, at, length)
            # A view does not outlive the wait for the next extent.
            pieces.append(piece if until >= end else bytes(piece))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _open(
        self, member: Node, place: tuple[int, int, int], caller: Caller, read: Callable[[], Awaitable[bytes]]
    ) -> bytes | None:
        """Make an extent local; its bytes, if they were fetched for this READ."""
        if self._last.get(caller.pid, _NONE)[3] == member.inode:
            return None
        if len(self._last) >= _THREADS:
            self._last.clear()
        self._last[caller.pid] = (*place, member.inode)
        trainer = self._redirects.trainer_of(caller.pid) if self._redirects.attended else None
        number = 0 if trainer is None else trainer.number
        return (await self._small_files.open_for(member, caller, None, number, member.inode, read=read)).fetched
