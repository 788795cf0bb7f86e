"""Making bytes local: one fetch per file or block, however many readers and processes ask for it.

Within a process identical fetches share one flight (`SourceClient.shared`). Between processes a byte-range lock on one
file per mount, at an offset drawn from the key, lets one of them fetch while the others wait and then find the record
in the store; the kernel frees the lock of a process that dies. A fetch is one hop into a thread: read the source, then
put the bytes into landing.

What was fetched also stays in a small **transit** buffer, so that the READs that follow an OPEN find the bytes even
where the store had no room for them or has already let them go.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import trio

from spiderfs.catalogue import Node
from spiderfs.core.events import FETCHED, REFUSED, UNSTORED
from spiderfs.errors import StoreCorrupt, StoreError, StoreFull
from spiderfs.fetch_lock import FetchLock
from spiderfs.metrics import Counters
from spiderfs.sources.client import SourceClient
from spiderfs.sources.source import Source, Version
from spiderfs.store.store import BLOCK_BYTES, Content, ContentKey

log = logging.getLogger(__name__)

# Large enough for the read-ahead of two sequential readers at the default of 8 blocks.
TRANSIT_BYTES = 32 << 20
# After the disk was found full, fetches pass by the store for this long before one of them tries again.
FULL_PAUSE_S = 10.0
# Threads that wait for fetches of other processes; who finds none free waits for one of them.
_WAITING_THREADS = 64


class Interlock(FetchLock):
    """A lock per key between the processes of a mount, for those who fetch."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._threads = trio.CapacityLimiter(_WAITING_THREADS)

    @contextlib.asynccontextmanager
    async def hold(self, key: ContentKey) -> AsyncIterator[bool]:
        """Hold the key's lock; yields whether another process held it first."""
        waited = False
        while not self.try_hold(key):
            waited = True
            await trio.to_thread.run_sync(self.wait, key, abandon_on_cancel=True, limiter=self._threads)
        try:
            yield waited
        finally:
            self.let_go(key)


class Episode:
    """A state that the processes of a mount share and warn of once: it lasts while the file exists."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> bool:
        """Whether the caller is the first to notice."""
        try:
            self._path.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError as exc:
            log.debug("%s: warning without it", exc)
        return True

    def end(self) -> None:
        self._path.unlink(missing_ok=True)


class Transit:
    """The most recently fetched payloads, bounded in bytes."""

    def __init__(self, limit_bytes: int = TRANSIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._payloads: OrderedDict[ContentKey, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, key: ContentKey) -> bytes | None:
        return self._payloads.get(key)

    def put(self, key: ContentKey, payload: bytes) -> None:
        self._bytes += len(payload) - len(self._payloads.pop(key, b""))
        self._payloads[key] = payload
        while self._bytes > self._limit_bytes and len(self._payloads) > 1:
            _, oldest = self._payloads.popitem(last=False)
            self._bytes -= len(oldest)


class Fetcher:
    def __init__(
        self,
        source: Source,
        client: SourceClient,
        content: Content,
        interlock: Interlock,
        full_disk: Episode,
        counters: Counters,
    ) -> None:
        self._source = source
        self._client = client
        self._content = content
        self._interlock = interlock
        self._full_disk = full_disk
        self._counters = counters
        self._transit = Transit()
        self._full_until = 0.0

    def local(self, key: ContentKey, offset: int = 0, size: int | None = None) -> memoryview | None:
        """Bytes of the payload if it is here, valid until the caller awaits; None: fetch it. Raises StoreCorrupt."""
        try:
            payload = self._content.read(key, offset, size)
            if payload is None and self._content.has(key):
                self._counters.add("checksum_failures")
        except StoreCorrupt:
            raise
        except StoreError as exc:
            self._failed(exc)
            payload = None
        if payload is None:
            passing = self._transit.get(key)
            payload = None if passing is None else memoryview(passing)[offset : None if size is None else offset + size]
        return None if payload is None else memoryview(payload)

    def stored(self, key: ContentKey) -> bool:
        """Whether the store has the record. Raises StoreCorrupt."""
        try:
            return self._content.has(key)
        except StoreCorrupt:
            raise
        except StoreError as exc:
            self._failed(exc)
            return False

    def under_way(self, key: ContentKey) -> bool:
        """Whether some process of the mount is fetching it."""
        return self._client.fetching(key) or self._interlock.held(key)

    async def fetch(self, node: Node, block: int = 0) -> tuple[bytes, int]:
        """Bring a whole file (block 0) or one block from the source.

        Also says where it lies now, as `core.events` has it: FETCHED (in landing), REFUSED or UNSTORED.
        Raises SourceError and StoreCorrupt.
        """
        key = ContentKey(node.inode, block)
        # A look at the store sees it as of its first read. Ended before the wait, it shows afterwards what others have
        # landed meanwhile, and pins no old pages, in processes too that have no loop of requests to end it.
        self._content.end_read()
        offset = (block - 1) * BLOCK_BYTES if block else 0
        length = min(BLOCK_BYTES, node.stat.size - offset) if block else node.stat.size
        return await self._client.shared(key, partial(self._fetch_once, key, node.path, offset, length, node.version))

    async def _fetch_once(
        self, key: ContentKey, path: bytes, offset: int, length: int, version: Version
    ) -> tuple[bytes, int]:
        async with self._interlock.hold(key) as waited:
            if waited:
                self._content.end_read()
                found = self.local(key)
                if found is not None:
                    return bytes(found), FETCHED
            payload, where = await self._client.call(self._read_and_land, key, path, offset, length, version)
        self._counters.add("origin_reads")
        self._counters.add("origin_bytes", len(payload))
        self._transit.put(key, payload)
        if isinstance(where, StoreCorrupt):
            raise where
        if isinstance(where, StoreError):
            self._failed(where)
            return payload, UNSTORED
        # Not before the pause is over: what was under way when the disk was found full may still have fitted.
        if where == FETCHED and 0 < self._full_until <= time.monotonic():
            self._full_until = 0.0
            self._full_disk.end()
        return payload, where

    def _read_and_land(
        self, key: ContentKey, path: bytes, offset: int, length: int, version: Version
    ) -> tuple[bytes, int | StoreError]:
        """In a thread. The store's failure is an answer, not an exception: it must not repeat the read."""
        payload = self._source.read(path, offset, length, version)
        if time.monotonic() < self._full_until:
            return payload, UNSTORED
        try:
            return payload, FETCHED if self._content.land(key, payload) else REFUSED
        except StoreError as exc:
            return payload, exc

    def _failed(self, exc: StoreError) -> None:
        self._counters.add("store_failures")
        if isinstance(exc, StoreFull):
            if not self._full_until and self._full_disk.begin():
                log.warning("%s: files are read from the source until there is room again", exc)
            self._full_until = time.monotonic() + FULL_PAUSE_S
        else:
            log.warning("%s: reading from the source instead", exc)
