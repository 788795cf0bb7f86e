"""Parts: consecutive blocks of a large file that come by one request, straight into the store's plain file of it.

The reading process writes the bytes where they are to lie, and returns their records: this process sees no bytes. A
block can be read once it is written, long before its part has come and has records. These are one transaction.

A lock keeps the bytes of a part on the disk while anything is written there, and until its last block is read, for a
while, even if its records are evicted before the reader comes to them. A read that was given up because of its time
limit goes on in the reading process. So the lock stays until that has ended, too; then what has no record is freed.
Other processes wait for each block as for any fetch (`fetch_lock.py`) and find its record. What a process leaves that
dies, the next sweep frees.

**Limits.** `room_blocks` may be on their way ahead of the readers of this process together, and as many are remembered
behind. If a source takes long for a part, its readers get no longer ones. Each block of a part must come within one
time limit after the block before it: what is on its way when a line becomes slow may take longer than that together.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from spiderfs.core.events import FETCHED, REFUSED, UNSTORED
from spiderfs.core.rooms import landing_room
from spiderfs.errors import SourceError, StoreError, StoreFull
from spiderfs.linux import steady_clock
from spiderfs.linux.worker_threads import WorkerThreads
from spiderfs.sources.client import SourceClient
from spiderfs.store.content import LmdbContent
from spiderfs.store.store import BLOCK_BYTES, ContentKey
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.fetcher import REST_S, Fetched
from spiderfs.vfs.on_demand import Supply

log = logging.getLogger(__name__)

# A part that takes longer says that the source is slow.
_LONG_S = 1.0
_OWN_BYTES = struct.Struct("<Q")


class FilePart(Fetched):
    """The blocks `keys` of one file, as a `Destination`."""

    def __init__(self, node: Node, keys: list[ContentKey], fd: int, is_ahead: bool, client: SourceClient) -> None:
        """`fd` is of the store's file, with a lock on the blocks; the part closes it. `is_ahead`: no one waited for it
        when it began.
        """
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

    # -- of the reading process

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

    # -- of this process

    @property
    def has_landed(self) -> bool:
        return self._where == FETCHED

    def has(self, block: int) -> bool:
        """Whether the block is written."""
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
    """Belongs to one trio run."""

    def __init__(
        self,
        nursery: trio.Nursery,
        supply: Supply,
        content: LmdbContent,
        fetch_lock: FetchLock,
        read: Callable[..., Awaitable[bytes]],
        room_blocks: int,
        clock: Callable[[], float] = steady_clock.now,
    ) -> None:
        """`read` is `ReadProcess`'s. `fetch_lock` must not be the fetcher's, or it would not exclude that."""
        self._nursery, self._content, self._fetch_lock, self._read = nursery, content, fetch_lock, read
        self._client, self._fetcher, self._counters, self._now = supply.client, supply.fetcher, supply.counters, clock
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
        return self._fetcher.store_takes and node.settles_at <= self._now()

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
            taken = await self._landing.run(self._content.land_part, part.keys, part.length, heads)
            if taken:
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
