"""Planned samples fetched in batches: what is stored, what is handed back, and who waits meanwhile."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
from forking import exit_status, forked
from waiting import eventually

from spiderfs.core.events import FETCHED, HIT, REFUSED, UNSTORED
from spiderfs.daemon.caching import planned_reads
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.planned_reads import Chunk, PlannedReads
from spiderfs.daemon.caching.prefetch_backend import PrefetchResult
from spiderfs.errors import ArchiveFailed, StoreFull
from spiderfs.fuse.wire import _STORE, OUT_HEADER, store
from spiderfs.metrics import SharedCounters
from spiderfs.shared.layout import EXTENTS_MAP_FILE
from spiderfs.shared.shared_memory import MANAGER, Flights
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.in_flight import InFlight
from spiderfs.sources.local import LocalSource
from spiderfs.sources.read_process import ReadProcess
from spiderfs.sources.source import Version
from spiderfs.store.content import LmdbContent, RecordWriter
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.store.store import ContentKey
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES, Catalogue, Node
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.fetcher import Episode, Fetcher
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.on_demand import Supply

WORKER = 1
# The source reads a file of this name when the test says so.
HELD = "held"
# A piece of so many bytes of a file cannot be cut out of it.
TORN = 3_333
SIZES = [1, 1_000, 16_384, 16_385, 100_000, 300_000]
# So long only a test waits that fails.
LIMITS = SourceLimits(timeout_s=60.0, attempts=1, max_concurrent=8)


def cut(begin: int, end: int, whole: bytes) -> bytes:
    if end - begin == TORN:
        raise ArchiveFailed("not its bytes")
    return whole[begin:end]


class Source(LocalSource):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._gate, self._open = os.pipe()

    def give(self) -> None:
        """Have one read of HELD go on, of this process or a fork."""
        os.write(self._open, b"g")

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        if path == HELD.encode():
            os.read(self._gate, 1)
        return super().read(path, offset, length, version)

    def close(self) -> None:
        os.close(self._gate)
        os.close(self._open)
        super().close()


class Harness:
    def __init__(self, place: Path, look_s: float = 0.0) -> None:
        """`look_s`: how long the reading process takes to find out whether a sample is awaited."""
        # In the place of /dev/fuse.
        self.kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.root, self.cache_path = place / "source", place / "content"
        for path in (self.root, self.cache_path):
            path.mkdir()
        self.source = Source(os.fspath(self.root))
        in_flight = InFlight(500_000, lambda held_bytes: self.in_flight.append(held_bytes))
        self.in_flight = [0]
        self.flights = Flights(1)

        def awaited(inode: int) -> bool:
            time.sleep(look_s)
            return self.flights.awaited(inode)

        self.reading = ReadProcess(
            self.source,
            8,
            1 << 20,
            self.kernel.close,
            ours.fileno(),
            seal=RecordWriter(self.cache_path),
            in_flight=in_flight,
            awaited=awaited,
        )
        ours.close()
        self.shared_counters = SharedCounters(1)
        counters = self.shared_counters.row(0)
        self.content = LmdbContent(self.cache_path)
        self.client = SourceClient(
            self.source, LIMITS, rng=random.Random(1), on_event=counters.add, read=self.reading.read
        )
        records = MemoryRecords(TABLES)
        self.catalogue = Catalogue(records)
        self.catalogue.record_root(self.source.stat(b""))
        self.lock_path = place / "fetch.lock"
        self.fetch_lock = FetchLock(self.lock_path)
        fetcher = Fetcher(
            self.client,
            self.content,
            self.fetch_lock,
            Episode(place / "full"),
            counters,
            flights=self.flights,
        )
        lister = Lister(self.catalogue, self.client)
        supply = Supply(self.content, records, self.client, self.catalogue, lister, fetcher, counters)
        self.cache = CacheControl(self.content, "lru", 0.1, counters)
        self.cache.restore(4 << 20, None)
        self.batches = PlannedReads(self.reading, self.flights, self.cache, self.content, supply)
        self.ended: dict[bytes, PrefetchResult | None] = {}

    def add(self, name: str, size: int) -> Node:
        (self.root / name).write_bytes(random.Random(name).randbytes(size))
        found = LocalSource(os.fspath(self.root)).stat(name.encode())
        dentry = self.catalogue.record(ROOT_INODE, name.encode(), found, 0.0)
        return Node(dentry.inode, name.encode(), found)

    def begin(self, *nodes: Node, push: bool = False) -> None:
        self.begin_chunks(*map(Chunk.of, nodes), push=push)

    def begin_chunks(self, *chunks: Chunk, push: bool = False) -> None:
        def ended(node: Node, result: PrefetchResult | None) -> None:
            self.ended[node.path] = result

        for chunk in chunks:
            self.batches.begin(chunk, ended, push)
        self.batches.send()

    async def fetch(self, *nodes: Node, push: bool = False) -> list[PrefetchResult | None]:
        self.begin(*nodes, push=push)
        return await self.all_ended(*nodes)

    def pieces(self, name: str, *sizes: int) -> Chunk:
        """A file of which each piece is a sample."""
        whole, nodes, cuts, at = self.add(name, sum(sizes)), [], [], 0
        for size in sizes:
            path = f"{name}-{at}".encode()
            dentry = self.catalogue.record(ROOT_INODE, path, whole.stat._replace(size=size), 0.0)
            nodes.append(Node(dentry.inode, path, dentry.stat))
            cuts.append(partial(cut, at, at + size))
            at += size
        return Chunk.of(whole)._replace(nodes=nodes, cuts=cuts)

    async def all_ended(self, *nodes: Node) -> list[PrefetchResult | None]:
        await eventually(lambda: all(node.path in self.ended for node in nodes))
        assert not any(node.inode in self.flights for node in nodes)
        return [self.ended[node.path] for node in nodes]

    def limit(self, timeout_s: float) -> None:
        """The patience with what begins from now on."""
        self.client._limits = replace(LIMITS, timeout_s=timeout_s)

    async def awaited(self, node: Node) -> None:
        """Return when someone waits for a sample."""
        with trio.fail_after(20):
            while not self.flights.awaited(node.inode):
                await trio.sleep(0.005)

    def held(self, node: Node) -> bytes | None:
        self.content.end_read()
        found = self.content.read(ContentKey(node.inode))
        copied = None if found is None else bytes(found)
        self.content.end_read()
        return copied

    def leased(self) -> bytes:
        """The map's bytes of all chunks that are taken."""
        whole = (self.cache_path / EXTENTS_MAP_FILE).read_bytes()
        return whole[4096 : 4096 + int.from_bytes(whole[:8], "little")].replace(b"\0", b"")

    def counted(self, name: str) -> float:
        return self.shared_counters.totals()[name]


@asynccontextmanager
async def running(harness: Harness) -> AsyncIterator[Harness]:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(harness.reading.attend)
            nursery.start_soon(harness.batches.run)
            nursery.start_soon(harness.flights.attend, MANAGER)
            yield harness
            nursery.cancel_scope.cancel()


@pytest.fixture
def look_s() -> float:
    return 0.0


@pytest.fixture
def idle(tmp_path: Path, look_s: float) -> Iterator[Harness]:
    harness = Harness(tmp_path, look_s)
    yield harness
    os.kill(harness.reading.pid, signal.SIGKILL)
    os.waitpid(harness.reading.pid, 0)
    harness.reading.close()
    harness.source.close()
    harness.kernel.close()
    harness.content.close()
    harness.fetch_lock.close()


@pytest.fixture
def harness(idle: Harness) -> AbstractAsyncContextManager[Harness]:
    return running(idle)


async def test_samples_of_all_sizes_are_stored_and_kept(harness: Harness) -> None:
    nodes = [harness.add(f"{size}", size) for size in SIZES]
    results = await harness.fetch(*nodes)
    assert [result and (result.where, result.size, result.failed) for result in results] == [
        (FETCHED, size, False) for size in SIZES
    ]
    for node in nodes:
        assert harness.held(node) == (harness.root / os.fsdecode(node.path)).read_bytes()
        assert node.inode in harness.cache.engine.members
    assert harness.counted("origin_reads") == harness.counted("source_requests") == len(SIZES)
    assert harness.counted("origin_bytes") == sum(SIZES)
    assert harness.content.usage().landing_entries == 0


async def test_samples_side_by_side_come_with_one_request(harness: Harness) -> None:
    chunks = [harness.pieces(f"{number}", *SIZES[:4]) for number in range(3)]
    nodes = [node for chunk in chunks for node in chunk.nodes]
    harness.begin_chunks(*chunks)
    results = await harness.all_ended(*nodes)
    assert [(result.where, result.size, result.placed) for result in results] == [
        (FETCHED, size, True) for size in 3 * SIZES[:4]
    ]
    for chunk in chunks:
        pieces = [harness.held(node) for node in chunk.nodes]
        assert b"".join(pieces) == (harness.root / os.fsdecode(chunk.read[0])).read_bytes()
    assert harness.counted("origin_reads") == harness.counted("source_requests") == len(chunks)
    assert harness.counted("origin_bytes") == 3 * sum(SIZES[:4])
    assert harness.in_flight[-1] == 0


async def test_of_a_chunk_only_what_is_missing_is_stored(harness: Harness) -> None:
    chunk = harness.pieces("file", 20_000, 50_000, TORN, 30_000)
    stored, torn = chunk.nodes[1], chunk.nodes[2]
    harness.content.land(ContentKey(stored.inode), bytes(50_000))
    harness.begin_chunks(chunk)
    results = await harness.all_ended(*chunk.nodes)
    assert [result and result.where for result in results] == [FETCHED, None, None, FETCHED]
    content = (harness.root / "file").read_bytes()
    assert harness.held(chunk.nodes[0]) == content[:20_000]
    assert harness.held(stored) == bytes(50_000)
    assert harness.held(torn) is None
    assert harness.held(chunk.nodes[3]) == content[-30_000:]
    # Of what was leased, chunks of 16 KiB are taken by what is stored, and no others.
    assert len(harness.leased()) == 2 + 4 + 2


async def test_a_chunk_that_fails_is_handed_back_as_samples(harness: Harness) -> None:
    away, refused = harness.pieces("away", 20_000, 30_000), harness.pieces("refused", 20_000, 30_000)
    (harness.root / "refused").unlink()
    away = away._replace(read=(*away.read[:2], 60_000, away.read[3]))
    harness.begin_chunks(away, refused)
    assert await harness.all_ended(*away.nodes) == [None, None]
    failed = PrefetchResult(None, failed=True)
    assert await harness.all_ended(*refused.nodes) == [failed, failed]


async def test_the_kernel_is_given_what_is_to_be_pushed(harness: Harness) -> None:
    nodes = [harness.add(f"{number}", 20_000 + number) for number in range(100)]
    given: dict[int, bytes] = {}

    async def receive() -> None:
        kernel = trio.socket.from_stdlib_socket(harness.kernel)
        while message := await kernel.recv(1 << 20):
            inode, _, size, _ = _STORE.unpack_from(message, OUT_HEADER.size)
            given[inode] = message[len(store(inode, size)) :]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        results = await harness.fetch(*nodes, push=True)
        # Those whose places in the table of flights were taken are handed back.
        pushed = [node for node, result in zip(nodes, results, strict=True) if result is not None]
        assert len(pushed) > len(nodes) // 2
        assert all(result is None or (result.where, result.pushed) == (FETCHED, True) for result in results)
        await eventually(lambda: len(given) >= len(pushed))
        nursery.cancel_scope.cancel()
    assert given == {node.inode: (harness.root / os.fsdecode(node.path)).read_bytes() for node in pushed}
    assert harness.reading.room == 8


async def test_a_sample_is_stored_though_the_kernel_refuses_it(harness: Harness) -> None:
    node, gone = harness.add("file", 50_000), harness.add("gone", 50_000)
    (harness.root / "gone").unlink()
    harness.kernel.close()
    result, handed_back = await harness.fetch(node, gone, push=True)
    assert (result.where, result.pushed, result.failed) == (FETCHED, False, False)
    assert handed_back == PrefetchResult(None, failed=True)
    assert harness.held(node) == (harness.root / "file").read_bytes()
    assert harness.reading.room == 8


# A reader who waits goes on with the report, and then waits no more: it must be too late for the look that is slow.
@pytest.mark.parametrize("look_s", [0.0, 0.3])
async def test_a_sample_that_a_reader_waits_for_is_not_given_to_the_kernel(harness: Harness) -> None:
    node = harness.add(HELD, 50_000)

    harness.begin(node, push=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(harness.flights.wait, node.inode, MANAGER)
        await harness.awaited(node)
        harness.source.give()
        (result,) = await harness.all_ended(node)
    assert (result.where, result.pushed) == (FETCHED, True)
    harness.kernel.setblocking(False)
    with pytest.raises(BlockingIOError):
        harness.kernel.recv(1)


async def test_the_slot_of_a_read_that_is_given_up_is_free_once_its_bytes_are_with_the_kernel(harness: Harness) -> None:
    late = harness.add(HELD, 50_000)

    harness.limit(0.5)
    harness.begin(late, push=True)
    assert await harness.all_ended(late) == [PrefetchResult(None, failed=True)]
    assert harness.reading.room == 7
    harness.source.give()
    message = await trio.socket.from_stdlib_socket(harness.kernel).recv(1 << 20)
    assert message.endswith((harness.root / HELD).read_bytes())
    with trio.fail_after(10):
        while harness.reading.room != 8:
            await trio.sleep(0.005)


async def test_no_more_bytes_are_in_flight_than_may_be(harness: Harness) -> None:
    nodes = [harness.add(f"{number}", 200_000) for number in range(6)]
    results = await harness.fetch(*nodes)
    assert all(result is None or result.where == FETCHED for result in results)
    assert (max(harness.in_flight), harness.in_flight[-1]) == (400_000, 0)


async def test_what_the_store_has_or_another_fetches_is_handed_back(harness: Harness) -> None:
    stored, locked, free = (harness.add(name, 50_000) for name in ("stored", "locked", "free"))
    harness.content.land(ContentKey(stored.inode), (harness.root / "stored").read_bytes())
    other = FetchLock(harness.lock_path)
    assert other.try_hold(ContentKey(locked.inode))
    results = await harness.fetch(stored, locked, free)
    assert results[:2] == [None, None]
    assert results[2] is not None
    assert harness.counted("origin_reads") == 1
    other.close()


async def test_a_record_that_came_meanwhile_stays_and_is_kept(harness: Harness) -> None:
    node = harness.add(HELD, 50_000)

    harness.begin(node)
    harness.content.land(ContentKey(node.inode), (harness.root / HELD).read_bytes())
    harness.source.give()
    (result,) = await harness.all_ended(node)
    assert result.where == HIT
    member = harness.content.member(ContentKey(node.inode))
    assert member.section != "landing"
    assert node.inode in harness.cache.engine.members


async def test_a_source_that_fails_hands_back_and_one_that_refuses_does_not(harness: Harness) -> None:
    gone, changed, good = (harness.add(name, 50_000) for name in ("gone", "changed", "good"))
    (harness.root / "gone").unlink()
    (harness.root / "changed").write_bytes(b"of another size")
    results = await harness.fetch(gone, changed, good)
    assert [result and (result.where, result.failed) for result in results] == [
        (None, True),
        (None, True),
        (FETCHED, False),
    ]


async def test_a_source_that_hangs_costs_its_time_limit(harness: Harness) -> None:
    hanging, good = harness.add(HELD, 50_000), harness.add("good", 50_000)

    began = trio.current_time()
    harness.limit(1.0)
    harness.begin(hanging)
    harness.limit(LIMITS.timeout_s)
    harness.begin(good)
    results = await harness.all_ended(hanging, good)
    assert results[0] == PrefetchResult(None, failed=True)
    assert results[1] is not None
    assert 1.0 <= trio.current_time() - began < 10
    assert harness.counted("source_timeouts") == 1


async def test_the_chunks_of_a_late_read_are_free_once_it_returns(harness: Harness) -> None:
    late = harness.add(HELD, 50_000)

    harness.limit(0.5)
    harness.begin(late)
    assert await harness.all_ended(late) == [PrefetchResult(None, failed=True)]
    (meanwhile,) = harness.content.extents.lease([50_000])
    assert meanwhile.runs[0][0] > 0
    harness.source.give()
    with trio.fail_after(10):
        while harness.reading.room != 8:
            await trio.sleep(0.005)
    harness.content.extents.free([meanwhile])
    harness.content.extents._at = 0
    assert harness.content.extents.lease([50_000])[0].runs == ((0, 4),)


async def test_a_failure_after_records_were_stored_frees_none_of_their_chunks(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = harness.add(HELD, 50_000)

    def full(*changes: object) -> None:
        raise StoreFull("no space left for the cache")

    harness.begin(node)
    harness.content.land(ContentKey(node.inode), (harness.root / HELD).read_bytes())
    monkeypatch.setattr(harness.cache, "apply", full)
    harness.source.give()
    (result,) = await harness.all_ended(node)
    assert result.where == HIT
    (other,) = harness.content.extents.lease([200_000])
    harness.content.extents.write(other, bytes(200_000))
    assert harness.held(node) == (harness.root / HELD).read_bytes()


async def test_a_full_disk_costs_the_samples_that_do_not_fit(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [harness.add(f"{number}", 50_000) for number in range(3)]
    land_kept = harness.content.land_kept

    def full(records, sections, drop):  # type: ignore[no-untyped-def]
        if len(records) > 1 or records[0][0].inode == nodes[1].inode:
            raise StoreFull("no space left for the cache")
        return land_kept(records, sections, drop)

    monkeypatch.setattr(harness.content, "land_kept", full)
    results = await harness.fetch(*nodes)
    assert [result and (result.where, result.failed) for result in results] == [
        (FETCHED, False),
        (UNSTORED, True),
        (FETCHED, False),
    ]
    assert set(harness.cache.engine.members) == {nodes[0].inode, nodes[2].inode}
    assert harness.counted("store_failures") == 1


async def test_what_does_not_fit_beside_what_is_kept_is_refused(harness: Harness) -> None:
    harness.cache.set_capacity(100_000)
    node = harness.add("file", 300_000)
    (result,) = await harness.fetch(node)
    assert (result.where, result.failed) == (REFUSED, True)
    # Its chunks are free again.
    assert harness.content.extents.lease([300_000])[0].runs[0][0] == 0 or harness.held(node) is None


def test_who_wants_a_sample_waits_until_it_is_stored(idle: Harness) -> None:
    """One process is the manager, and another one a worker."""
    node = idle.add(HELD, 50_000)

    async def worker() -> None:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(idle.flights.attend, WORKER)
                while node.inode not in idle.flights:
                    await trio.sleep(0.001)
                await idle.flights.wait(node.inode, WORKER)
                nursery.cancel_scope.cancel()

    # The process that is forked must not be within trio.
    child = forked(lambda: trio.run(worker))

    async def manager() -> None:
        async with running(idle) as harness:
            harness.begin(node)
            await harness.awaited(node)
            harness.source.give()
            await harness.all_ended(node)
            assert await trio.to_thread.run_sync(exit_status, child) == 0
            assert harness.held(node) is not None

    trio.run(manager)


async def test_a_process_that_stood_still_gives_the_source_its_time(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = harness.add(HELD, 50_000)
    # Every look comes too late.
    monkeypatch.setattr(planned_reads, "_STOOD_STILL_S", 0.0)
    harness.limit(0.1)

    harness.begin(node)
    (flight,) = harness.batches._under_way.values()
    until_s = flight.patience.until
    with trio.fail_after(20):
        while flight.patience.until == until_s:
            await trio.sleep(0.005)
    harness.source.give()
    (result,) = await harness.all_ended(node)
    assert result is not None
    assert result.where == FETCHED
