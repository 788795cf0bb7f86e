"""Opening and reading a file larger than `sample_max_bytes`: in blocks of 1 MiB, with read-ahead.

An open waits for nothing, since only READ knows which blocks are wanted. A reader is **in order** if its READs have
followed on each other since the beginning of the file, or for 512 KiB: a sample of some KiB takes the kernel several of
them. It gets whole blocks, and those ahead of it, the more the longer it goes on and has to wait; consecutive blocks
are one **part** (`Parts`). Of a reader that jumps no one knows whether it will come back: it gets the bytes that it
asked for and nothing is kept, until pieces of half a block were read. Then the block is fetched. (Random reads of 8 to
64 KiB fetched 29 times their bytes while two READs in a row were in order, and the second piece brought the block.)
Where all blocks are cached, the kernel may read the store's plain file by itself (`fuse/passthrough.py`): this module
says which that is, and tells the policies of these blocks.
"""

from __future__ import annotations

import logging
import math
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import trio

from spiderfs.core.events import FETCHED, HIT, OPENED, REFUSED, UNSTORED
from spiderfs.core.rooms import landing_room
from spiderfs.errors import SourceError, StoreError, StoreFull
from spiderfs.linux import steady_clock
from spiderfs.linux.worker_threads import WorkerThreads
from spiderfs.metrics import Counters
from spiderfs.protocol.extents import PAGE_BYTES
from spiderfs.shared.shared_memory import SharedSlots
from spiderfs.sources.client import Patience, SourceClient
from spiderfs.sources.members import STRIPE_BLOCKS, key_at
from spiderfs.store.content import LmdbContent
from spiderfs.store.store import BLOCK_BYTES, ContentKey
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.fetcher import REST_S, Fetched, Fetcher
from spiderfs.vfs.on_demand import OnDemand, Part, Shared, Supply

log = logging.getLogger(__name__)

# A part that takes longer says that the source is slow.
_LONG_S = 1.0
_OWN_BYTES = struct.Struct("<Q")


class FilePart(Fetched):
    """The blocks `keys` of one file, as a `Destination`."""

    def __init__(self, node: Node, keys: list[ContentKey], fd: int, is_ahead: bool, client: SourceClient) -> None:
        """`fd`, which the part closes, has a lock on the blocks. `is_ahead`: no one waited when it began."""
        super().__init__(b"")
        self.keys, self.is_ahead = keys, is_ahead
        self.place = b"%d" % node.inode
        self.offset = (keys[0].block - 1) * BLOCK_BYTES
        self.length = min(len(keys) * BLOCK_BYTES, node.stat.size - self.offset)
        self.has_failed = False
        self.passed = trio.Event()
        """Set when a reader has come through all of it, or others need the room."""
        self.limit = trio.CancelScope()
        """What ends its fetch in time."""
        self._fd, self._client = fd, client
        self._written = self._writers = 0
        self._changed = trio.Event()

    def begun(self) -> None:
        self._writers += 1

    def came(self, blocks: int) -> None:
        self._client.answered()
        # A repetition begins with blocks that have come before.
        if blocks > self._written:
            self.limit.deadline = self._client.patience().until
        # The last block can be read once the fetch is accounted for.
        self.advance(min(blocks, len(self.keys) - 1))

    def ended(self) -> None:
        self._writers -= 1
        self.advance()

    @property
    def has_landed(self) -> bool:
        return self._where == FETCHED

    def has(self, block: int) -> bool:
        return block < self.keys[0].block + self._written

    def read(self, block: int, offset: int, size: int) -> bytes | None:
        """Bytes of a block that is written; None if the disk does not give them, or the part is closed."""
        try:
            piece = os.pread(self._fd, size, (block - 1) * BLOCK_BYTES + offset)
        except OSError:
            return None
        return piece if len(piece) == size else None

    async def wait_for(self, block: int) -> None:
        """Return when the block is written, or the part has failed."""
        while not self.has(block) and not self.has_failed:
            await self._changed.wait()

    async def unwritten(self) -> None:
        """Return when no thread of the reading process writes here."""
        while self._writers:
            await self._changed.wait()

    def advance(self, blocks: int = 0, has_failed: bool = False) -> None:
        """Note how many blocks are written, of which there are never fewer, or that not all will be."""
        self._written, self.has_failed = max(self._written, blocks), self.has_failed or has_failed
        self._changed.set()
        self._changed = trio.Event()

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1


class Parts:
    """Consecutive blocks of a large file that come by one request, straight into the store's plain file; one trio run.

    The reading process writes the bytes and returns their records, which are one transaction: this process sees no
    bytes. A block can be read once it is written. A lock keeps a part on the disk while anything is written there, even
    by a read that was given up, and for a while until its last block is read, whether its records are evicted or not;
    then what has no record is freed. Other processes wait for a block as for any fetch (`fetch_lock.py`).

    `room_blocks` may be on their way ahead of all readers together, and as many are remembered behind. Each block must
    come within one time limit after the block before it. If a source is slow, its readers get no longer parts.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        supply: Supply,
        content: LmdbContent,
        fetch_lock: FetchLock,
        read: Callable[..., Awaitable[bytes]],
        room_blocks: int,
    ) -> None:
        """`read` is `ReadProcess`'s. `fetch_lock` must not be the fetcher's, or it would not exclude that."""
        self._nursery, self._content, self._fetch_lock, self._read = nursery, content, fetch_lock, read
        self._client, self._fetcher, self._counters = supply.client, supply.fetcher, supply.counters
        self._room_blocks = room_blocks
        self._landing = WorkerThreads(1)
        self._parts: dict[ContentKey, FilePart] = {}
        # Those that have come, and are remembered.
        self._behind: dict[FilePart, None] = {}
        self.in_flight = 0
        """The blocks of parts that are being written."""
        self.is_slow = False
        """Whether the latest part took long, or has failed."""

    def of(self, key: ContentKey) -> FilePart | None:
        return self._parts.get(key)

    @property
    def room(self) -> int:
        """How many blocks may begin to come ahead of readers."""
        return self._room_blocks - self.in_flight

    @property
    def most_ahead(self) -> int:
        """How many blocks may come ahead of one reader: so many can land, and the first of them is still there."""
        try:
            return min(self._room_blocks, landing_room(self._content.usage().capacity_bytes) // BLOCK_BYTES)
        except StoreError:
            return 0

    def take(self, node: Node) -> bool:
        """Whether this version may come in parts: it has settled, and the store takes what comes."""
        return self._fetcher.store_takes and node.settles_at <= steady_clock.now()

    def begin(self, node: Node, blocks: range, is_ahead: bool) -> int:
        """Have blocks come, up to the first that is here, or coming; returns how many come now. Raises StoreCorrupt."""
        keys: list[ContentKey] = []
        for key in (ContentKey(node.inode, block) for block in blocks):
            is_here = key in self._parts or self._fetcher.stored(key) or self._client.timeouts.has(key)
            if is_here or not self._fetch_lock.try_hold(key):
                break
            # Another process may have stored it and let go since this transaction began.
            self._content.end_read()
            if self._fetcher.stored(key):
                self._fetch_lock.let_go(key)
                break
            keys.append(key)
        if not keys:
            return 0
        try:
            fd = self._content.hold_blocks(node.inode, keys[0].block, len(keys))
        except StoreError as exc:
            log.debug("no part of inode %d: %s", node.inode, exc)
            self._let_go(keys)
            return 0
        part = FilePart(node, keys, fd, is_ahead, self._client)
        self._parts.update(dict.fromkeys(keys, part))
        self.in_flight += len(keys)
        self._nursery.start_soon(self._bring, node, part)
        return len(keys)

    async def _bring(self, node: Node, part: FilePart) -> None:
        began_s = trio.current_time()
        where = await self._fetch(node, part)
        self._let_go(part.keys)
        part.advance(has_failed=not part.has(part.keys[-1].block))
        part.settle(where)
        self.is_slow = part.has_failed or trio.current_time() - began_s > _LONG_S
        if part.has_failed:
            self._forget(part)
        await part.unwritten()
        self.in_flight -= len(part.keys)
        if not part.has_failed:
            self._behind[part] = None
            while sum(len(behind.keys) for behind in self._behind) > self._room_blocks:
                oldest = next(iter(self._behind))
                del self._behind[oldest]
                oldest.passed.set()
            with trio.move_on_after(REST_S):
                await part.passed.wait()
            self._behind.pop(part, None)
            self._forget(part)
        part.close()
        if where != FETCHED:
            await self._landing.run(self._content.free_unrecorded, part.keys)

    async def _fetch(self, node: Node, part: FilePart) -> int:
        """Have a part read and landed; where its blocks lie then, as `core.events` has it."""
        try:
            read = partial(self._read, node.path, part.offset, part.length, node.version, to=part)
            reply = await self._client.ask(read, partial(setattr, part, "limit"))
            (own_bytes,) = _OWN_BYTES.unpack_from(reply)
            self._counters.add("origin_reads", bool(own_bytes))
            self._counters.add("origin_bytes", own_bytes)
            part.advance(len(part.keys))
            heads = reply[_OWN_BYTES.size :]
            if taken := await self._landing.run(self._content.land_part, part.keys, part.length, heads):
                self._fetcher.store_works()
            return FETCHED if taken else REFUSED
        except (SourceError, MemoryError) as exc:
            # Who waits for a block asks for it alone, and gets the error that is its own.
            log.debug("part at %d of inode %d: %s", part.offset, node.inode, exc)
        except StoreError as exc:
            # Other errors of a write, too, are found out again by who asks for a block alone.
            if part.has(part.keys[-1].block) or isinstance(exc, StoreFull):
                self._fetcher.store_failed(exc)
        return UNSTORED

    def _forget(self, part: FilePart) -> None:
        for key in part.keys:
            del self._parts[key]

    def _let_go(self, keys: list[ContentKey]) -> None:
        for key in keys:
            self._fetch_lock.let_go(key)


T = TypeVar("T")

# Keys of blocks have 32 bits: what could have more of them (some sparse file of 4 PiB) is not cached at all.
MOST_CACHED_BYTES = ((1 << 32) - 1) * BLOCK_BYTES
# An event for each block of 1 MiB: a reader that opens a large file for every sample in it, or one of terabytes, must
# not fill the pipe with them.
PASSED_PAUSE_S, PASSED_BLOCKS = 1.0, 4096
_PASSED_FILES = 4096
# Files whose reading position is remembered; forgetting one costs a restart of its read-ahead.
_FILES = 1024
# So many bytes in a row make a reader one in order: page faults and reads of a sample are fewer.
IN_ORDER_BYTES = 512 << 10
# So many bytes of a block that were read in pieces make it worth its whole.
_WORTH_BYTES = BLOCK_BYTES // 2
# Of what was read in order so much more is fetched ahead: all that `read_ahead` allows by default after 1 MiB.
_AHEAD_TIMES = 8
# While its reader waits, a window doubles up to this many blocks: a reader that stops wastes no more than 64 MiB, with
# what the kernel reads ahead. A part is about a seventh of the window: so many requests a source answers at a time.
_MOST_WINDOW, _PARTS_A_WINDOW = 56, 7
# Blocks that are remembered as touched, 4 MiB of memory for 256 GiB of files; and ends of READs, as many as readers in
# order read side by side. With more ends, more random reads would be taken for reads in order. These are primes, since
# offsets are multiples of powers of two.
_TOUCHED, _ENDS = 262_139, 251
_NUMBERS = (1 << 63) - 1
# Around a page that is read alone, and how many of these windows are remembered: 8 MiB.
_WINDOW_BYTES, _WINDOWS = 64 << 10, 128


class Touches:
    """What readers of large files have done; make it before the fork. Of two notes in a slot the earlier is lost."""

    def __init__(self) -> None:
        self._blocks = SharedSlots(_TOUCHED, "Q")
        self._ends = SharedSlots(_ENDS, "Q")

    def in_a_row(self, inode: int, offset: int, end: int) -> int:
        """Note a READ of the bytes from `offset` to `end`; how many bytes before it were read in a row."""
        (before,) = self._ends.get(_number(inode, offset)) or (0,)
        self._ends.put(_number(inode, end), before + end - offset)
        return int(before)

    def touched_bytes(self, key: ContentKey) -> int:
        """How many bytes were read in pieces of the block since it was fetched last."""
        (touched,) = self._blocks.get(_number(*key)) or (0,)
        return int(touched)

    def touch(self, key: ContentKey, size: int) -> None:
        self._blocks.put(_number(*key), self.touched_bytes(key) + size)

    def forget(self, key: ContentKey) -> None:
        self._blocks.discard(_number(*key))


def _number(inode: int, position: int) -> int:
    return (inode * 1_000_003 + position) % _NUMBERS + 1


@dataclass(slots=True)
class _Window:
    """What is fetched ahead of the readers in order of one file."""

    blocks: int
    """How many blocks ahead of the block read last."""
    read: int = 0
    asked: int = 0
    """The block read last, and the last block already asked for."""
    grown_at: int = 0
    """The block that a reader has to pass before the window grows again."""

    @property
    def part_blocks(self) -> int:
        """A power of two up to a stripe: a part of two stripes would make the reader of one wait for another node."""
        return 1 << max(1, min(self.blocks // _PARTS_A_WINDOW, STRIPE_BLOCKS)).bit_length() - 1


class ReadAhead:
    """Fetches the next blocks for a reader in order; several readers in one file share one window."""

    def __init__(
        self, nursery: trio.Nursery, fetcher: Fetcher, counters: Counters, depth_blocks: int, parts: Parts | None = None
    ) -> None:
        """A window has `depth_blocks` at first, and grows where `parts` bring it."""
        self.parts, self._nursery, self._fetcher = parts, nursery, fetcher
        self._counters, self._depth_blocks = counters, depth_blocks
        # by inode
        self._windows: OrderedDict[int, _Window] = OrderedDict()
        self._started = 0

    @property
    def busy(self) -> bool:
        return self._started > 0 or (self.parts is not None and self.parts.in_flight > 0)

    def _window(self, node: Node) -> _Window:
        if (window := self._windows.get(node.inode)) is None:
            window = self._windows[node.inode] = _Window(self._depth_blocks)
            if len(self._windows) > _FILES:
                self._windows.popitem(last=False)
        self._windows.move_to_end(node.inode)
        return window

    def has_reached(self, node: Node, block: int) -> bool:
        """Whether `block` was fetched ahead of a reader in order, whose READs may reach workers in another order."""
        window = self._windows.get(node.inode)
        return window is not None and window.read < block <= window.asked

    def wanted(self, node: Node, blocks: range, in_a_row: int) -> range:
        """Note a READ in order, `in_a_row` bytes to its end; the blocks to fetch ahead of their turn."""
        first, last = blocks[0], blocks[-1]
        window = self._window(node)
        if not window.read <= first <= window.asked + 1:
            window.read, window.asked = last, first  # another reader's, or the first READ
        ahead = max(window.asked - window.read, _AHEAD_TIMES * in_a_row // BLOCK_BYTES)
        end = -(-node.stat.size // BLOCK_BYTES)
        until = min(last + min(ahead, window.blocks), end)
        if until < end and self.parts is not None:
            until -= until % window.part_blocks
        further = range(max(window.asked, first) + 1, until + 1)
        window.read, window.asked = last, max(window.asked, until)
        return further

    def waited(self, node: Node, block: int) -> None:
        """Note that a reader had to wait for this block though it was fetched ahead: more should be on its way."""
        window = self._window(node)
        if self.parts is None or self.parts.is_slow:
            window.blocks = self._depth_blocks
        elif not window.grown_at - _MOST_WINDOW <= block <= window.grown_at:
            # Not again before the reader comes to what this brings.
            window.grown_at = block + window.blocks
            most = min(_MOST_WINDOW, self.parts.most_ahead)
            window.blocks = max(self._depth_blocks, min(2 * window.blocks, most))

    def follow(self, node: Node, blocks: range, further: range) -> None:
        """Have those of these blocks fetched that are needed now, and `further` ones."""
        parts, window = self.parts, self._window(node)
        for wanted in (blocks, further) if parts is not None and parts.take(node) else ():
            block = wanted.start
            while parts is not None and block < wanted.stop:
                # Parts end at multiples of their length, so that readers side by side ask for the same ones.
                whole = window.part_blocks
                part = range(block, min(block + whole - (block - 1) % whole, wanted.stop))
                if wanted is further and len(part) > parts.room:
                    # The rest is asked for again when the reader has gone on.
                    window.asked = min(window.asked, block - 1)
                    return
                begun = parts.begin(node, part, wanted is further)
                self._counters.add("readahead_blocks", begun if wanted is further else 0)
                block += begun or 1
        for block in further:
            if parts is None or parts.of(ContentKey(node.inode, block)) is None:
                self.start(node, block)

    def start(self, node: Node, block: int) -> None:
        key = ContentKey(node.inode, block)
        # Of several readers in one file one may have asked for it.
        if not self._fetcher.stored(key) and not self._fetcher.under_way(key):
            self._counters.add("readahead_blocks")
            self._started += 1
            self._nursery.start_soon(self._fetch, node, block)

    async def _fetch(self, node: Node, block: int) -> None:
        try:
            await self._fetcher.fetch(node, block)
        except SourceError as exc:
            # The reader of the block will ask for it again, and get the error then.
            log.debug("read-ahead of block %d: %s", block, exc)
        finally:
            self._started -= 1


class LargeFiles(Part):
    """The large files as one worker serves them."""

    def __init__(
        self, shared: Shared, on_demand: OnDemand, read_ahead: ReadAhead, touches: Touches, asked: Container[int]
    ) -> None:
        """`asked`: which stripes other nodes have asked for (`sources/peers.py`)."""
        super().__init__(shared)
        self._on_demand, self._read_ahead, self._touches = on_demand, read_ahead, touches
        self._asked_by_peers = asked
        self._windows: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        # For files that the kernel reads by itself: when accesses were last recorded for them, and up to which block.
        self._passed: dict[int, tuple[float, int]] = {}

    async def open(self, node: Node, caller: Caller, once_more: bool) -> None:
        """Account for an open; raises Stale for a version whose name is known to mean another one by now.

        Only READ, which finds out that a large file has changed, could tell otherwise. `once_more`: the kernel opens
        what it has just looked up because the first open was answered so. A second ESTALE would be the program's, so
        this open takes whatever version it is, and a READ finds out.
        """
        if not once_more:
            await self._on_demand.check_still_named(node)
        self.note_open(node, caller)

    def note_open(self, node: Node, caller: Caller) -> None:
        """Account for an open, of whatever version."""
        self._counters.add("opens")
        self._counters.add("opens_hit")
        if self._redirects.attended and (reader := self._redirects.trainer_of(caller.pid)) is not None:
            wanted = self._redirects.wanted(caller.pid, node.inode) or node.inode
            self._events.record_access(node.inode, 0, OPENED, caller.pid, trainer=reader.number, wanted=wanted)

    async def read(self, node: Node, offset: int, size: int) -> memoryview | bytes:
        """Up to `size` bytes, short only at the end of the file; a view is valid until the next request."""
        end = min(offset + size, node.stat.size)
        if offset >= end:
            return b""
        if node.stat.size > MOST_CACHED_BYTES:
            return await self._on_demand.read_uncached(node, offset, end - offset)
        blocks = range(offset // BLOCK_BYTES + 1, (end - 1) // BLOCK_BYTES + 2)
        self._counters.add("block_reads", len(blocks))
        in_a_row = self._touches.in_a_row(node.inode, offset, end)
        new: set[int] = set()
        if self._asked_by_peers and in_a_row < BLOCK_BYTES and key_at(node.inode, offset) in self._asked_by_peers:
            # A peer asks for whole blocks, and one after the other if its reader is in order.
            self._read_ahead.follow(node, blocks, range(0))
        elif in_a_row >= min(offset, IN_ORDER_BYTES) or self._read_ahead.has_reached(node, blocks[0]):
            self._read_ahead.follow(node, blocks, self._read_ahead.wanted(node, blocks, in_a_row + end - offset))
        elif end - offset < min(blocks[-1] * BLOCK_BYTES, node.stat.size) - (blocks[0] - 1) * BLOCK_BYTES:
            new.update(block for block in blocks if self._is_new(ContentKey(node.inode, block)))
            if len(new) == len(blocks):
                return await self._read_piece(node, offset, end - offset, blocks)
        pieces = []
        # One patience for the whole READ, whatever it has to wait for.
        patience = self._client.patience()
        for block in blocks:
            first = (block - 1) * BLOCK_BYTES
            start = max(offset - first, 0)
            size = min(end - first, BLOCK_BYTES) - start
            piece: memoryview | bytes | None
            if block in new:
                piece = await self._read_piece(node, first + start, size, range(block, block + 1))
            else:
                if (piece := await self._part_piece(node, block, start, size, patience)) is None:
                    piece = await self._block(node, block, start, size, patience)
            # The next block may have to be awaited, and a view does not outlive that.
            pieces.append(piece if first + BLOCK_BYTES >= end else bytes(piece))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _is_new(self, key: ContentKey) -> bool:
        """Whether the block is neither here nor coming, and little of it was read. Raises StoreCorrupt."""
        if (
            self._touches.touched_bytes(key) >= _WORTH_BYTES
            or self._fetcher.stored(key)
            or self._fetcher.under_way(key)
        ):
            return False
        # Who asks once more for a block that was waited for in vain gets that error, and does not wait for a piece.
        if self._client.timeouts.has(key):
            return False
        return self._fetcher.passing(key, 0, 1) is None

    async def _read_piece(self, node: Node, offset: int, size: int, blocks: range) -> bytes:
        """Read what was asked for and keep nothing of it, but remember how much of these blocks was wanted."""
        learning = self._read_log.is_kept(self._now())
        # While ranges are learned, no block becomes worth its whole: the plan will name extents.
        for block in () if learning else blocks:
            first = (block - 1) * BLOCK_BYTES
            its = min(offset + size, first + BLOCK_BYTES) - max(offset, first)
            self._touches.touch(ContentKey(node.inode, block), its)
        if learning and size <= PAGE_BYTES:
            piece = await self._page_of_window(node, offset, size)
        else:
            piece = await self._on_demand.read_uncached(node, offset, size)
        for block in blocks:
            self._note_block(node, block, UNSTORED)
        return piece

    async def _page_of_window(self, node: Node, offset: int, size: int) -> bytes:
        """A page, read with others around it: while READs say what a sample has, the kernel adds none to them."""
        window = (node.inode, offset // _WINDOW_BYTES)
        begin = window[1] * _WINDOW_BYTES
        if (payload := self._windows.pop(window, None)) is None:
            length = min(_WINDOW_BYTES, node.stat.size - begin)
            payload = await self._on_demand.read_uncached(node, begin, length)
        self._windows[window] = payload
        if len(self._windows) > _WINDOWS:
            self._windows.popitem(last=False)
        return payload[offset - begin : offset - begin + size]

    async def _part_piece(self, node: Node, block: int, offset: int, size: int, patience: Patience) -> bytes | None:
        """Bytes of a block that has come, or is coming, in a part; None if it must be looked for as a block alone."""
        parts, key = self._read_ahead.parts, ContentKey(node.inode, block)
        if parts is None or (part := parts.of(key)) is None:
            return None
        if has_waited := not part.has(block):
            if part.is_ahead:
                self._read_ahead.waited(node, block)
            # None may be open during a wait.
            self._content.end_read()
            started = time.perf_counter()
            with trio.CancelScope(deadline=patience.until) as waiting:
                await part.wait_for(block)
            self._counters.add("stall_microseconds", int((time.perf_counter() - started) * 1e6))
            if waiting.cancelled_caught:
                self._client.timeouts.add(key)
                raise self._client.timed_out(patience)
            if part.has_failed:
                return None
        # What is in the store is read there, and verified.
        piece = None if part.has_landed and self._fetcher.stored(key) else part.read(block, offset, size)
        if block == part.keys[-1].block and (block - 1) * BLOCK_BYTES + offset + size >= part.offset + part.length:
            part.passed.set()
        if piece is None:
            return None
        if has_waited:
            self._touches.forget(key)
            part.when_settled(partial(self._note_block, node, block))
        else:
            self._counters.add("block_hits")
            part.when_settled(lambda where: self._note_block(node, block, HIT if where == FETCHED else where))
        return piece

    async def _block(self, node: Node, block: int, offset: int, size: int, patience: Patience) -> memoryview:
        key = ContentKey(node.inode, block)
        if (piece := self._fetcher.local(key, offset, size)) is not None:
            self._counters.add("block_hits")
            if (coming := self._fetcher.on_its_way(key)) is None:
                self._note_block(node, block, HIT)
            else:
                # Read-ahead fetched it. The manager cannot keep a block if the event precedes its record in the store.
                coming.when_settled(lambda where: self._note_block(node, block, HIT if where == FETCHED else where))
            return piece
        if self._fetcher.locked(key):
            # It comes, in a part of another worker.
            self._read_ahead.waited(node, block)
        fetched = await self._on_demand.fetch(node, block, patience=patience)
        self._touches.forget(key)
        fetched.when_settled(partial(self._note_block, node, block))
        return memoryview(fetched.payload)[offset : offset + size]

    def _note_block(self, node: Node, block: int, where: int) -> None:
        # The policies cannot keep a block of a provisional version, which one open alone sees.
        if node.settles_at != math.inf:
            size = min(BLOCK_BYTES, node.stat.size - (block - 1) * BLOCK_BYTES)
            self._events.record_access(node.inode, size, where, 0, block)

    def plain_file(self, inode: int) -> int | None:
        """A descriptor of a plain file with the bytes of this large one, if there is one; see `Content.plain_file`."""
        return self._ask_store(inode, self._content.plain_file)

    def is_whole(self, inode: int) -> bool:
        """Whether all of a file that the kernel has read by itself is still cached."""
        return bool(self._ask_store(inode, self._content.whole))

    def _ask_store(self, inode: int, ask: Callable[[int, int], T]) -> T | None:
        """The store's answer about a file of this inode and its size; None if the store or the catalogue has none."""
        if (node := self._catalogue.known(inode)) is None:
            return None
        try:
            return ask(inode, node.stat.size)
        except StoreError as exc:
            log.debug("inode %d is not passed through: %s", inode, exc)
            return None

    def passed_through(self, inode: int) -> None:
        """Account for an open after which the kernel reads the file without asking: as if all of it were read."""
        self._counters.add("passthrough_opens")
        now = self._now()
        recorded_at, recorded = self._passed.get(inode, (-math.inf, 0))
        if now - recorded_at < PASSED_PAUSE_S:
            return
        # The policies would make room in vain for blocks that were evicted since, and are read all the same.
        size = self._ask_store(inode, lambda inode, size: size if self._content.whole(inode, size) else 0)
        if not size:
            return
        blocks = math.ceil(size / BLOCK_BYTES)
        until = recorded + min(blocks, PASSED_BLOCKS)
        for block in (number % blocks for number in range(recorded, until)):
            self._events.record_access(inode, min(BLOCK_BYTES, size - block * BLOCK_BYTES), HIT, 0, block + 1)
        if len(self._passed) >= _PASSED_FILES:
            self._passed.clear()
        self._passed[inode] = (now, until % blocks)
