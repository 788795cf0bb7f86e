"""Parts: consecutive blocks of a large file that come by one request, straight into the store's plain file of it.

The reading process writes the bytes where they are to lie, and returns their records: this process sees no bytes. A
block can be read once it is written, long before its part has come and has records. These are one transaction.

Until its last block is read, for a while, a lock keeps the bytes of a part on the disk, even if its records are evicted
before the reader comes to them. Other processes wait for each block as for any fetch (`fetch_lock.py`) and find its
record. What a part leaves without a record, as when it is given up or its process dies, the next sweep frees.

**Limits.** `room_blocks` may be on their way ahead of the readers of this process together, and as many are remembered
behind. Readers of a source that takes long for a part get no longer ones, since each must come within one time limit.
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
from spiderfs.errors import SourceError, StoreError
from spiderfs.linux import steady_clock
from spiderfs.linux.worker_threads import WorkerThreads
from spiderfs.store.checksums import BLOCK_HEADER_BYTES
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
    """The blocks `keys` of one file. `fd` is a descriptor of the store's file, with a lock on them."""

    def __init__(self, node: Node, keys: list[ContentKey], fd: int, is_ahead: bool) -> None:
        """`is_ahead`: no one waited for it when it began."""
        super().__init__(b"")
        self.keys, self.fd, self.is_ahead = keys, fd, is_ahead
        self.offset = (keys[0].block - 1) * BLOCK_BYTES
        self.length = min(len(keys) * BLOCK_BYTES, node.stat.size - self.offset)
        self.has_failed = self.is_passed = False
        self._written = 0
        self._changed = trio.Event()

    @property
    def has_landed(self) -> bool:
        return self._where == FETCHED

    def has(self, block: int) -> bool:
        """Whether the block is written."""
        return block < self.keys[0].block + self._written

    def read(self, block: int, offset: int, size: int) -> bytes | None:
        """Bytes of a block that is written; None if the disk does not give them, or the part is closed."""
        try:
            piece = os.pread(self.fd, size, (block - 1) * BLOCK_BYTES + offset)
        except OSError:
            return None
        return piece if len(piece) == size else None

    async def wait_for(self, block: int) -> None:
        """Return when the block is written, or the part has failed."""
        while not self.has(block) and not self.has_failed:
            await self._changed.wait()

    def came(self, blocks: int) -> None:
        self._written = max(self._written, blocks)
        self._changed.set()
        self._changed = trio.Event()

    def came_before_the_last(self, blocks: int) -> None:
        """The same while the part is coming: the last block can be read once the fetch is accounted for."""
        self.came(min(blocks, len(self.keys) - 1))

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1


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
        # Those that have ended, and are remembered.
        self._ended: dict[FilePart, None] = {}
        self.in_flight = 0
        self.is_slow = False
        """Whether the latest part took long."""

    def of(self, key: ContentKey) -> FilePart | None:
        return self._parts.get(key)

    @property
    def has_room(self) -> bool:
        return self.in_flight < self._room_blocks

    @property
    def landing_blocks(self) -> int:
        """So many may land before a reader comes to the first of them, and that is still there. Raises StoreError."""
        return landing_room(self._content.usage().capacity_bytes) // BLOCK_BYTES

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
        part = FilePart(node, keys, fd, is_ahead)
        self._parts.update(dict.fromkeys(keys, part))
        self.in_flight += len(keys)
        self._nursery.start_soon(self._bring, node, part)
        return len(keys)

    async def _bring(self, node: Node, part: FilePart) -> None:
        began_s = trio.current_time()
        wanted = (node.path, part.offset, part.length, node.version)
        where = UNSTORED
        try:
            place = b"%d" % node.inode
            reply = await self._client.ask(partial(self._read, *wanted, place=place, came=part.came_before_the_last))
            (own_bytes,) = _OWN_BYTES.unpack_from(reply)
            self._counters.add("origin_reads", bool(own_bytes))
            self._counters.add("origin_bytes", own_bytes)
            part.came(len(part.keys))
            heads = [
                reply[at : at + BLOCK_HEADER_BYTES] for at in range(_OWN_BYTES.size, len(reply), BLOCK_HEADER_BYTES)
            ]
            sizes = [min(BLOCK_BYTES, part.length - at) for at in range(0, part.length, BLOCK_BYTES)]
            records = list(zip(part.keys, sizes, heads, strict=True))
            landed = await self._landing.run(self._content.land_kept, records, {}, ())
            self._fetcher.store_works()
            where = REFUSED if False in landed else FETCHED
        except SourceError as exc:
            # Who waits for a block asks for it alone, and gets the error that is its own.
            log.debug("part at %d of inode %d: %s", part.offset, node.inode, exc)
        except StoreError as exc:
            self._fetcher.store_failed(exc)
        self.is_slow = trio.current_time() - began_s > _LONG_S
        self.in_flight -= len(part.keys)
        self._let_go(part.keys)
        part.has_failed = not part.has(part.keys[-1].block)
        part.came(0)
        part.settle(where)
        self._ended[part] = None
        if part.has_failed or part.is_passed:
            self._forget(part)
        while sum(len(ended.keys) for ended in self._ended) > self._room_blocks:
            self._forget(next(iter(self._ended)))
        await trio.sleep(REST_S)
        self._forget(part)

    def passed(self, part: FilePart) -> None:
        """Note that a reader has come through all of a part."""
        part.is_passed = True
        if part in self._ended:
            self._forget(part)

    def _forget(self, part: FilePart) -> None:
        if part not in self._ended:
            return
        del self._ended[part]
        for key in part.keys:
            del self._parts[key]
        part.close()
        if not part.has_landed:
            self._nursery.start_soon(self._landing.run, self._content.free_unrecorded, part.keys)

    def _let_go(self, keys: list[ContentKey]) -> None:
        for key in keys:
            self._fetch_lock.let_go(key)
