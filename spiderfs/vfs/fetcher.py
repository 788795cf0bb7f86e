"""Making bytes local: one fetch per file or block, however many readers and processes ask for it.

Within a process identical fetches are made once (`sources/single_flight.py`), and between processes too
(`fetch_lock.py`): the others wait, and then find the record in the store. The time for which a reader waits for
another's fetch counts against its patience, as if it waited for the source, and is at most half of it: the other may
stand still. A fetch is one question to a thread; its reader goes on with the bytes while they are put into the store
(`Landing`).

The fetched bytes also stay in a small **transit** buffer, so that the READs that follow an OPEN find the bytes even
where the store had no room for them or has already let them go. For READs at other workers they lie in memory that all
share (`unstored_bytes.py`). With several workers, the small files fetched last lie there too: the kernel may ask for
one in several READs. (Four workers fetched files of 1 MB 1.7 times in a first epoch without this.)
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Container
from functools import partial
from pathlib import Path
from typing import NamedTuple

import trio

from spiderfs.core.events import FETCHED, REFUSED, UNSTORED
from spiderfs.core.memory import MemoryBounds
from spiderfs.errors import SourceTimeout, StoreCorrupt, StoreError, StoreFull
from spiderfs.linux import steady_clock
from spiderfs.linux.worker_threads import WorkerThreads
from spiderfs.metrics import Counters
from spiderfs.shared.shared_memory import MANAGER, Flights
from spiderfs.sources.client import Patience, SourceClient
from spiderfs.sources.in_flight import InFlight
from spiderfs.sources.single_flight import SingleFlight
from spiderfs.sources.source import Delivery, FromPeer, SourceStat, Version
from spiderfs.store.store import BLOCK_BYTES, Content, ContentKey
from spiderfs.vfs.catalogue import Catalogue, Node
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.unstored_bytes import UnstoredBytes
from spiderfs.views.tree import unknown_length

log = logging.getLogger(__name__)


class ShownViews:
    """Which files are shown as views (`views/tree.py`), and how long each view is: `longest_bytes` at most.

    A view's length is known once the file was fetched, so a look-up fetches it. The length that is noted first counts,
    for all processes and later mounts. Provisional versions and large files are shown as they are.
    """

    def __init__(self, catalogue: Catalogue, longest_bytes: int) -> None:
        self._catalogue, self._longest_bytes = catalogue, longest_bytes

    def is_unknown(self, found: SourceStat, settles_at: float, now: float) -> bool:
        """Whether the size of what is shown for this file is not known yet."""
        return (
            found.viewed and found.original_size is None and 0 < found.size <= self._longest_bytes and settles_at <= now
        )

    def request(self, node: Node) -> tuple[int, bool]:
        """The length to ask for a view (`views/tree.py`), and whether the view has exactly that length."""
        if node.stat.original_size is None:
            return unknown_length(self._longest_bytes), False
        return node.stat.size, True

    async def with_size(self, node: Node, size: int) -> Node:
        """The file with the size of its view: the one that was noted first, this one if there was none."""
        if node.stat.original_size is not None:
            return node
        if (known := self._catalogue.known(node.inode)) is not None and known.stat.original_size is not None:
            return node._replace(stat=known.stat)
        size = await trio.to_thread.run_sync(partial(self._catalogue.record_view, node.inode, size))
        return node._replace(stat=node.stat._replace(size=size, original_size=node.stat.size))


# Bytes that a payload in a dictionary takes beside its own: for its object, its key, its entry. Measured: 255.
ENTRY_BYTES = 256
# The most that goes into one transaction, for which other processes wait: 8 MiB take some 10 ms.
BATCH_BYTES = 8 << 20
# How long records are collected: at 1,500 files a second that makes three records a transaction. With 8 ms, twelve, a
# first epoch 5 ms away took a quarter more time, as what is fetched is known to have landed so much later.
GATHER_S = 0.002

Outcome = bool | StoreError | StoreCorrupt
"""Whether the record is in landing (False: it cannot fit), or why the store failed."""


class _Waiting(NamedTuple):
    key: ContentKey
    payload: bytes
    on_landed: Callable[[Outcome], None]


class Landing:
    """Puts fetched bytes into the store after the reply, within one trio run; call `drain` before that run ends.

    A transaction costs as much as a record of 100 kB in it, and all processes that write wait for each other. So
    records that are fetched while one runs are collected for the next. If those that wait are too long, a fetch waits.
    """

    def __init__(
        self,
        content: Content,
        gather_s: float,
        most_bytes: int = MemoryBounds().landing,
        in_flight: InFlight | None = None,
    ) -> None:
        self._content = content
        self._most_bytes, self._in_flight = most_bytes, in_flight or InFlight()
        self._thread = WorkerThreads(1)
        self._gather_s = gather_s
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._running = False
        self._freed = trio.Event()

    async def put(self, key: ContentKey, payload: bytes, on_landed: Callable[[Outcome], None]) -> None:
        """Have a record landed; waits only for room. `on_landed` is called with the outcome, on the loop's thread."""
        if self._bytes > self._most_bytes:
            self._in_flight.add(len(payload))
            try:
                while self._bytes > self._most_bytes:
                    await self._freed.wait()
            finally:
                self._in_flight.remove(len(payload))
        self._waiting.append(_Waiting(key, payload, on_landed))
        self._bytes += len(payload) + ENTRY_BYTES
        if not self._running:
            self._running = True
            # Not in the reader's nursery, which ends with the request: the record is to land whatever becomes of that.
            trio.lowlevel.spawn_system_task(self._run)

    async def drain(self) -> None:
        """Return when nothing waits any more."""
        while self._running:
            await self._freed.wait()

    async def _run(self) -> None:
        while self._waiting:
            if self._bytes < BATCH_BYTES:
                await trio.sleep(self._gather_s)
            batch: list[_Waiting] = []
            size = 0
            while self._waiting and (not batch or size + len(self._waiting[0].payload) <= BATCH_BYTES):
                batch.append(self._waiting.popleft())
                size += len(batch[-1].payload) + ENTRY_BYTES
            try:
                outcomes = await self._thread.run(self._land, batch)
            except StoreCorrupt as exc:
                # This task belongs to no one, so it has to report to those whose processes are to end.
                outcomes = [exc] * len(batch)
            self._bytes -= size
            self._running = bool(self._waiting)
            self._freed.set()
            self._freed = trio.Event()
            for waiting, outcome in zip(batch, outcomes, strict=True):
                waiting.on_landed(outcome)

    def _land(self, batch: list[_Waiting]) -> list[Outcome]:
        try:
            return list(self._content.land_all([(waiting.key, waiting.payload) for waiting in batch]))
        except StoreError as exc:
            if len(batch) == 1:
                return [exc]
        # One record that no longer fits on the disk must not keep the others out.
        return [outcome for waiting in batch for outcome in self._land([waiting])]


# A payload is kept in transit for readers that are about to read it. When nothing was fetched for this long, there are
# none.
REST_S = 10.0
# After the disk was found full, fetches pass by the store for this long before one of them tries again.
FULL_PAUSE_S = 10.0
_WAITING_THREADS = 64


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
        with contextlib.suppress(OSError):
            self._path.unlink()


class Transit:
    """The payloads that were fetched last, as many as fit into a limit of memory."""

    def __init__(self, limit_bytes: int = MemoryBounds().transit) -> None:
        self._limit_bytes = limit_bytes
        self._payloads: OrderedDict[ContentKey, bytes] = OrderedDict()
        self._bytes = 0
        self._put = trio.Event()

    def get(self, key: ContentKey) -> bytes | None:
        return self._payloads.get(key)

    def put(self, key: ContentKey, payload: bytes) -> None:
        self._put.set()
        replaced = self._payloads.pop(key, None)
        self._bytes += _taken(payload) - (0 if replaced is None else _taken(replaced))
        self._payloads[key] = payload
        while self._bytes > self._limit_bytes and len(self._payloads) > 1:
            _, oldest = self._payloads.popitem(last=False)
            self._bytes -= _taken(oldest)

    async def rests(self) -> None:
        """Let go of everything, and return, once something was put here and nothing more in the last `REST_S`."""
        while self._put.is_set() or not self._payloads:
            await self._put.wait()
            self._put = trio.Event()
            await trio.sleep(REST_S)
        self._payloads.clear()
        self._bytes = 0


def _taken(payload: bytes) -> int:
    return len(payload) + ENTRY_BYTES


class Fetched:
    """Fetched bytes. `where` says where they lie; it is known once they have reached the store, or have failed to."""

    def __init__(self, payload: bytes, where: int | None = None, by_another: bool = False) -> None:
        """`by_another`: another process has fetched them."""
        self.payload, self._claimed = payload, by_another
        self._where: int | StoreCorrupt | None = where
        self._to_tell: list[Callable[[int], None]] = []
        self._event = trio.Event()

    def claim(self) -> bool:
        """Whether the caller may count this fetch as one that was made ahead; of all who share it, one may."""
        claimed, self._claimed = self._claimed, True
        return not claimed

    def settle(self, where: int | StoreCorrupt) -> None:
        self._where = where
        self._event.set()
        if isinstance(where, int):
            for tell in self._to_tell:
                tell(where)

    def when_settled(self, tell: Callable[[int], None]) -> None:
        """Call `tell` with where the bytes lie, now or later; never, if the store turns out to be damaged."""
        if isinstance(self._where, int):
            tell(self._where)
        else:
            self._to_tell.append(tell)

    async def settled(self) -> int:
        """Wait until it is known where the bytes lie, and return that; raises StoreCorrupt."""
        if self._where is None:
            await self._event.wait()
        if isinstance(self._where, StoreCorrupt):
            raise self._where
        assert self._where is not None
        return self._where


class Fetcher:
    """Brings content from the source into the store, for everybody in this process."""

    def __init__(
        self,
        client: SourceClient,
        content: Content,
        fetch_lock: FetchLock,
        full_disk: Episode,
        counters: Counters,
        alone: bool = False,
        caught_up: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        clock: Callable[[], float] = steady_clock.now,
        views: ShownViews | None = None,
        unstored: UnstoredBytes | None = None,
        lately: UnstoredBytes | None = None,
        passing: Container[int] = (),
        flights: Flights | None = None,
        process: int = MANAGER,
        memory: MemoryBounds = MemoryBounds(),  # noqa: B008
        in_flight: InFlight | None = None,
    ) -> None:
        """`alone`: no other process answers the READs of a file that this one has opened.

        `caught_up` returns once this process knows of every read that the reading process has answered by itself.
        `views`: the mount shows views, which are fetched in place of files that are read as a whole. `lately` holds the
        small files that all processes have fetched last. `passing`: the inodes of those that the store is not to take.
        `flights` has the samples that the manager is fetching for plans; `process` is the number of this process there.
        """
        self._passing = passing
        self._planned, self._process = flights or Flights(0), process
        self._views = views
        self._unstored = unstored or UnstoredBytes()
        self._lately = lately or UnstoredBytes(memory.recent)
        self.caught_up, self._now, self._client = caught_up, clock, client
        self._flights = SingleFlight(client.timeouts)
        self._content, self._fetch_lock = content, fetch_lock
        # Threads that wait for fetches of other processes; a reader that finds no thread free waits for one.
        self._waiting_threads = trio.CapacityLimiter(_WAITING_THREADS)
        self._full_disk, self._counters = full_disk, counters
        self._transit = Transit(memory.transit)
        self._alone = alone
        self._landing = Landing(content, GATHER_S if alone else 0.0, memory.landing, in_flight)
        self._on_their_way: dict[ContentKey, Fetched] = {}
        self._corrupt: StoreCorrupt | None = None
        self._full_until = 0.0

    @property
    def busy(self) -> bool:
        """Whether something is being fetched, or has yet to reach the store."""
        return self._flights.busy or bool(self._on_their_way)

    def local(self, key: ContentKey, offset: int = 0, size: int | None = None) -> memoryview | None:
        """Bytes of the payload if it is here, valid until the caller awaits; None: fetch it. Raises StoreCorrupt."""
        try:
            if (payload := self._content.read(key, offset, size)) is None and self._content.has(key):
                self._counters.add("checksum_failures")
        except StoreError as exc:
            self._failed(exc)
            payload = None
        if payload is None:
            passing = self._transit.get(key)
            payload = None if passing is None else memoryview(passing)[offset : None if size is None else offset + size]
        if payload is None:
            payload = self._shared_piece(key, offset, size)
        return None if payload is None else memoryview(payload)

    def _shared_piece(self, key: ContentKey, offset: int = 0, size: int | None = None) -> bytes | None:
        """Bytes that all workers share, because the store does not have them."""
        unstored = self._unstored.piece(key, offset, size)
        return self._lately.piece(key, offset, size) if unstored is None and not self._alone else unstored

    def beginning(self, key: ContentKey, size: int) -> memoryview | bytes | None:
        """The payload's first bytes if stored, until an await; else ask `stored`, `local`. Raises StoreCorrupt."""
        try:
            return self._content.read(key, 0, size)
        except StoreError:
            return None

    def stored(self, key: ContentKey) -> bool:
        """Whether the store has the record, or will have it in a moment. Raises StoreCorrupt."""
        if key in self._on_their_way:
            return True
        if self._corrupt:
            raise self._corrupt
        try:
            return self._content.has(key)
        except StoreError as exc:
            self._failed(exc)
            return False

    async def has_arrived(self, key: ContentKey) -> bool:
        """Whether a fetch that is under way here has brought its bytes, though this process had yet to hear of it."""
        if not self._flights.has(key):
            return False
        await self.caught_up()
        return self.stored(key)

    def stored_blocks(self, inode: int) -> int:
        """How many blocks of a large file the store has, or will have in a moment. Raises StoreCorrupt."""
        try:
            coming = sum(key.inode == inode for key in self._on_their_way)
            return self._content.blocks(inode) + coming
        except StoreError as exc:
            self._failed(exc)
            return 0

    def passing(self, key: ContentKey, offset: int, size: int) -> memoryview | bytes | None:
        """A piece of what was fetched lately by this process, or by any process for one open alone."""
        if (passing := self._transit.get(key)) is not None:
            return memoryview(passing)[offset : offset + size]
        return self._shared_piece(key, offset, size)

    def on_its_way(self, key: ContentKey) -> Fetched | None:
        """The bytes that were fetched for this key and have yet to reach the store."""
        return self._on_their_way.get(key)

    def under_way(self, key: ContentKey) -> bool:
        """Whether some process of the mount is fetching this key."""
        planned = not key.block and key.inode in self._planned
        return planned or self._flights.has(key) or self.locked(key)

    def locked(self, key: ContentKey) -> bool:
        """Whether a process of the mount is fetching this key for a reader, or for itself."""
        return self._flights.has(key) or self._fetch_lock.held(key)

    async def fetch(self, node: Node, block: int = 0) -> tuple[bytes, int]:
        """Bring a whole file (block 0) or one block from the source into the store, unless another process just has.

        Also returns where the bytes lie now, as `core.events` has it: FETCHED (in landing), REFUSED or UNSTORED.
        Raises SourceError and StoreCorrupt.
        """
        fetched = await self.fetch_bytes(node, block)
        return fetched.payload, await fetched.settled()

    async def fetch_bytes(
        self,
        node: Node,
        block: int = 0,
        delivery: Delivery | None = None,
        patience: Patience | None = None,
        read: Callable[[], Awaitable[bytes]] | None = None,
    ) -> Fetched:
        """Fetch as `fetch` does, for a reader, which does not care whether the bytes have reached the store yet.

        `delivery` is used if this very call reads the bytes. `read` gives all bytes of the file in the source's place.
        The wait, for the source or for another process's fetch, is no longer than the reader's patience, which began
        with the request (by default: begins now). The bytes of a provisional version never reach the store.
        """
        key = ContentKey(node.inode, block)
        # A read transaction shows the store as of its first read, and pins old pages until it is ended. So none may be
        # open during a wait. (A process that answers no requests has no loop that would end it.)
        self._content.end_read()
        offset = (block - 1) * BLOCK_BYTES if block else 0
        length = min(BLOCK_BYTES, node.stat.size - offset) if block else node.stat.size
        patience = patience or self._client.patience()
        original = read or partial(self.read_range, node.path, offset, length, node.version, delivery, patience)
        if node.settles_at and node.settles_at > self._now():
            return await self._flights.run(key, partial(self._fetch_provisional, key, node, original))
        if self._views is None or block or not node.stat.viewed:
            return await self._flights.run(key, partial(self._fetch_once, key, original, patience))
        view = partial(self._read_view, self._views, node, delivery, patience)
        fetched = await self._flights.run(key, partial(self._fetch_once, key, view, patience))
        # Another process may have fetched it in this moment, or in a mount whose names were lost.
        await self._views.with_size(node, len(fetched.payload))
        return fetched

    async def read_range(
        self,
        path: bytes,
        offset: int,
        length: int,
        version: Version,
        delivery: Delivery | None = None,
        patience: Patience | None = None,
        origin_bytes: int | None = None,
    ) -> bytes:
        """Bytes of what the source has at a path, which count as so many, `length` by default; raises SourceError."""
        payload = await self._client.read(path, offset, length, version, delivery, patience)
        # What a peer gave is counted where that is asked (`sources/peers.py`).
        if not isinstance(payload, FromPeer):
            self._counters.add("origin_reads")
            self._counters.add("origin_bytes", length if origin_bytes is None else origin_bytes)
        return payload

    async def read_piece(self, node: Node, offset: int, size: int) -> bytes:
        """Read bytes of a large file from the source, and keep them nowhere; raises SourceError."""
        self._content.end_read()
        try:
            return await self.read_range(node.path, offset, size, node.version)
        except SourceTimeout:
            # The kernel asks again, for the first page alone: a fetch of its block must not wait once more.
            for block in range(offset // BLOCK_BYTES + 1, (offset + size - 1) // BLOCK_BYTES + 2):
                self._client.timeouts.add(ContentKey(node.inode, block))
            raise

    async def rest(self, give_back: Callable[[], object]) -> None:
        """For ever: when nothing was fetched for a while, let go of what is in transit, and `give_back` its memory."""
        while True:
            await self._transit.rests()
            give_back()

    async def drain(self) -> None:
        """Return when everything that was brought has reached the store; call it before the process ends."""
        await self._landing.drain()

    async def _read_view(self, views: ShownViews, node: Node, delivery: Delivery | None, patience: Patience) -> bytes:
        length, exact = views.request(node)
        version = node.version
        payload = await self.read_range(
            node.path, 0, length, version, delivery if exact else None, patience, version.size
        )
        sized = await views.with_size(node, len(payload))
        if sized.stat.size == len(payload):
            return payload
        # Another process fetched the file first, and got a view of another length.
        return await self._read_view(views, sized, None, patience)

    async def _fetch_provisional(self, key: ContentKey, node: Node, read: Callable[[], Awaitable[bytes]]) -> Fetched:
        payload = await read()
        # The inode is then the handle of one open (`provisional_files.py`), so no one else finds the bytes there. The
        # blocks of a large file would push out those of all others.
        if node.settles_at == math.inf and (key.block or not self._unstored.keep(key, payload)):
            self._transit.put(key, payload)
        return Fetched(payload, UNSTORED)

    async def _fetch_once(self, key: ContentKey, read: Callable[[], Awaitable[bytes]], patience: Patience) -> Fetched:
        if (landing := self._on_their_way.get(key)) is not None:
            return landing
        # Whoever fetches it may stand still, and not the source: half of the patience is left for a fetch from here.
        waits_until = (trio.current_time() + patience.until) / 2
        if waited := not self._fetch_lock.try_hold(key):
            with trio.move_on_at(waits_until):
                wait, threads = self._fetch_lock.wait, self._waiting_threads
                await trio.to_thread.run_sync(wait, key, abandon_on_cancel=True, limiter=threads)
            if (found := self._landed_by_another(key)) is not None:
                return found
            # The other's fetch failed, or the store has no room. All that waited for it now ask the source side by
            # side: if they asked one after the other, the last would have no patience left.
            self._fetch_lock.try_hold(key)
        if not key.block and key.inode in self._planned:
            self._fetch_lock.let_go(key)
            waited = True
            with trio.move_on_at(waits_until):
                await self._planned.wait(key.inode, self._process)
            if (found := self._landed_by_another(key)) is not None:
                return found
            self._fetch_lock.try_hold(key)
        try:
            # Since the caller looked, the record may have landed and the other process may have let the lock go.
            if (found := self._landed_by_another(key)) is not None:
                return found
            # Another process may have fetched it meanwhile for a READ of another piece, and the store has not kept it.
            # Without a wait this is another use, which the capacity says to fetch for.
            payload = (waited and self._shared_piece(key)) or await read()
            self._transit.put(key, payload)
            passes = not key.block and key.inode in self._passing
            if not self._alone and not key.block:
                # Its further READs may come to other processes.
                (self._unstored if passes else self._lately).keep(key, payload)
            if passes or not self.store_takes:
                return Fetched(payload, UNSTORED)
            fetched = self._on_their_way[key] = Fetched(payload)
            try:
                await self._landing.put(key, payload, partial(self._landed, key, fetched))
            except trio.Cancelled:
                del self._on_their_way[key]
                raise
        finally:
            # Held until the record is in the store, for that is what other processes wait for.
            if key not in self._on_their_way:
                self._fetch_lock.let_go(key)
        # The READ that follows the OPEN may come to another process.
        if not self._alone and await fetched.settled() != FETCHED:
            self._unstored.keep(key, payload)
        return fetched

    def _landed_by_another(self, key: ContentKey) -> Fetched | None:
        """The record, if another process has stored it; failures were counted before. Raises StoreCorrupt."""
        # A read transaction that another task has open may be too old to show the record.
        self._content.end_read()
        try:
            payload = self._content.read(key)
            return None if payload is None else Fetched(bytes(payload), FETCHED, by_another=True)
        except StoreError:
            return None
        finally:
            self._content.end_read()

    def _landed(self, key: ContentKey, fetched: Fetched, outcome: Outcome) -> None:
        del self._on_their_way[key]
        self._fetch_lock.let_go(key)
        if isinstance(outcome, StoreCorrupt):
            # Perhaps no one waits for this fetch any more, so the next caller of the store gets the error.
            self._corrupt = outcome
            fetched.settle(outcome)
            return
        if isinstance(outcome, StoreError):
            self._failed(outcome, landing=True)
            fetched.settle(UNSTORED)
            return
        if outcome:
            self.store_works()
        fetched.settle(FETCHED if outcome else REFUSED)

    def store_works(self) -> None:
        """Note that the store has taken a record."""
        # Only after the pause: a fetch that was under way when the disk was found full may still have fitted.
        if 0 < self._full_until <= time.monotonic():
            self._full_until = 0.0
            self._full_disk.end()

    @property
    def store_takes(self) -> bool:
        """Whether what is fetched goes into the store: for a while after it was full, nothing does."""
        return time.monotonic() >= self._full_until

    def store_failed(self, exc: StoreError) -> None:
        """Note that the store did not take a record, and warn of it once."""
        self._failed(exc, landing=True)

    def _failed(self, exc: StoreError, landing: bool = False) -> None:
        self._counters.add("store_failures")
        if isinstance(exc, StoreFull):
            if not self._full_until and self._full_disk.begin():
                log.warning("%s: files are read from the source until there is room again", exc)
        elif not (landing and self._full_until):
            log.warning("%s: reading from the source instead", exc)
        if landing or isinstance(exc, StoreFull):
            self._full_until = time.monotonic() + FULL_PAUSE_S
