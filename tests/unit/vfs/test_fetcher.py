"""Bringing bytes: once, whoever asks; into the store if it can take them; and past it if it cannot."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from benchmarks.fakes import MemoryContent, MemorySource
from spiderfs.core.events import FETCHED, UNSTORED
from spiderfs.errors import SourceChanged, SourceTimeout, SourceUnavailable, StoreCorrupt, StoreError, StoreFull
from spiderfs.metrics import SharedCounters
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.in_flight import InFlight
from spiderfs.store.content import LmdbContent
from spiderfs.store.store import BLOCK_BYTES, Content, ContentKey, Keep
from spiderfs.vfs import fetcher as module
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.fetcher import ENTRY_BYTES, Episode, Fetcher, Landing, Transit

pytestmark = pytest.mark.clock

PATIENCE_S = 20.0
LIMITS = SourceLimits(timeout_s=PATIENCE_S, attempts=2, backoff_s=0.001, max_backoff_s=0.001)


class FailingContent(MemoryContent):
    """A store that answers with errors while there are some."""

    def __init__(self) -> None:
        super().__init__()
        self.landing_fails: StoreError | None = None
        self.fitting: set[bytes] = set()
        self.reading_fails: StoreError | None = None

    def land(self, key: ContentKey, payload: bytes) -> bool:
        if self.landing_fails and payload not in self.fitting:
            raise self.landing_fails
        return super().land(key, payload)

    def read(self, key: ContentKey, offset: int = 0, size: int | None = None) -> memoryview | bytes | None:
        if self.reading_fails:
            raise self.reading_fails
        return super().read(key, offset, size)

    def has(self, key: ContentKey) -> bool:
        if self.reading_fails:
            raise self.reading_fails
        return super().has(key)


class Harness:
    def __init__(self, directory: Path, content: Content | None = None) -> None:
        self.passing: set[int] = set()
        self.source = MemorySource()
        self.memory = FailingContent()
        self.memory.set_capacity(1 << 30)
        self.content = content or self.memory
        self.counters = SharedCounters(1)
        row = self.counters.row(0)
        self.row = row
        self.client = SourceClient(self.source, LIMITS, rng=random.Random(1), on_event=row.add)
        self.lock = directory / "fetch.lock"
        self.interlock = FetchLock(self.lock)
        self.full_disk = Episode(directory / "full-disk")
        self.fetcher = Fetcher(self.client, self.content, self.interlock, self.full_disk, row, passing=self.passing)

    def add(self, content: bytes, inode: int = 100_000, path: bytes = b"file") -> Node:
        return Node(inode, path, self.source.add(path, content))

    def counted(self, *names: str) -> list[int]:
        totals = self.counters.totals()
        return [totals[name] for name in names]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.interlock.close()


def local(fetcher: Fetcher, key: ContentKey) -> bytes | None:
    payload = fetcher.local(key)
    return None if payload is None else bytes(payload)


async def test_what_passes_is_not_stored_and_its_further_reads_find_it(harness: Harness) -> None:
    node = harness.add(b"content")
    key = ContentKey(node.inode)
    harness.passing.add(node.inode)
    assert await harness.fetcher.fetch(node) == (b"content", UNSTORED)
    assert not harness.fetcher.stored(key)
    assert harness.memory.usage().landing_entries == 0
    assert bytes(harness.fetcher.passing(key, 3, 4)) == b"tent"
    harness.passing.clear()
    assert await harness.fetcher.fetch(node) == (b"content", FETCHED)


async def test_blocks_of_a_large_file_never_pass(harness: Harness) -> None:
    node = harness.add(b"x" * (BLOCK_BYTES + 1))
    harness.passing.add(node.inode)
    assert (await harness.fetcher.fetch(node, 2))[1] == FETCHED


async def test_blocks_are_fetched_by_number_and_the_last_is_short(harness: Harness) -> None:
    data = random.Random(1).randbytes(2 * BLOCK_BYTES + 10)
    node = harness.add(data)
    assert (await harness.fetcher.fetch(node, 1))[0] == data[:BLOCK_BYTES]
    assert (await harness.fetcher.fetch(node, 3))[0] == data[2 * BLOCK_BYTES :]
    assert harness.fetcher.stored(ContentKey(node.inode, 3))
    assert not harness.fetcher.stored(ContentKey(node.inode, 2))
    assert not harness.fetcher.stored(ContentKey(node.inode))


async def test_a_changed_source_is_reported_and_nothing_lands(harness: Harness) -> None:
    node = harness.add(b"content")
    harness.source.change(b"file", b"CONTENT")
    with pytest.raises(SourceChanged):
        await harness.fetcher.fetch(node)
    assert not harness.fetcher.stored(ContentKey(node.inode))
    assert harness.fetcher.local(ContentKey(node.inode)) is None
    assert harness.counted("origin_reads") == [0]


# -- a store that cannot take them


async def test_a_record_that_left_the_store_is_in_transit_still(harness: Harness) -> None:
    node = harness.add(b"content")
    await harness.fetcher.fetch(node)
    harness.memory.apply([ContentKey(node.inode)], ())
    assert local(harness.fetcher, ContentKey(node.inode)) == b"content"


@pytest.mark.usefixtures("jumping_clock")
async def test_what_is_in_transit_is_let_go_when_nothing_is_fetched_any_more() -> None:
    transit, key = Transit(), ContentKey(1)
    rested = 0

    async def rest() -> None:
        nonlocal rested
        while True:
            await transit.rests()
            rested += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rest)
        await trio.sleep(10 * module.REST_S)
        assert rested == 0, "no one is woken for nothing"
        for round_ in range(2):
            for _ in range(5):
                transit.put(key, b"content")
                await trio.sleep(0.9 * module.REST_S)
                assert transit.get(key) == b"content"
            await trio.sleep(1.2 * module.REST_S)
            assert transit.get(key) is None
            assert rested == round_ + 1
        nursery.cancel_scope.cancel()


def test_transit_is_bounded_in_bytes() -> None:
    transit = Transit(100 + 3 * ENTRY_BYTES)
    for inode in range(10):
        transit.put(ContentKey(inode), bytes(30))
    assert [inode for inode in range(10) if transit.get(ContentKey(inode)) is not None] == [7, 8, 9]
    transit.put(ContentKey(9), bytes(40))
    assert [inode for inode in range(10) if transit.get(ContentKey(inode)) is not None] == [7, 8, 9]
    transit.put(ContentKey(10), bytes(1000))
    assert transit.get(ContentKey(10)) == bytes(1000), "the one that was fetched last is always there"
    assert transit.get(ContentKey(9)) is None
    transit.put(ContentKey(11), b"x")
    assert transit.get(ContentKey(10)) is None


def test_transit_is_bounded_for_the_smallest_files_too() -> None:
    transit = Transit(1 << 20)
    tracemalloc.start()
    try:
        for inode in range(100_000, 120_000):
            transit.put(ContentKey(inode), b"%02d" % (inode % 100))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.5 * (1 << 20)


async def test_a_full_disk_is_passed_by_with_one_warning(
    harness: Harness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.memory.landing_fails = StoreFull("no space left for the cache")
    for inode in range(100_000, 100_020):
        node = harness.add(b"%d" % inode, inode)
        assert await harness.fetcher.fetch(node) == (b"%d" % inode, UNSTORED)
    assert harness.counted("store_failures") == [1], "while it is known to be full, no one tries"
    monkeypatch.setattr(module, "FULL_PAUSE_S", 0.0)
    harness.fetcher._full_until = time.monotonic()
    for inode in range(100_020, 100_023):
        node = harness.add(b"%d" % inode, inode)
        assert await harness.fetcher.fetch(node) == (b"%d" % inode, UNSTORED)
    assert harness.counted("store_failures") == [4]
    harness.memory.landing_fails = None
    assert await harness.fetcher.fetch(harness.add(b"room", 300_000)) == (b"room", FETCHED)
    assert [record.getMessage() for record in caplog.records] == [
        "no space left for the cache: files are read from the source until there is room again"
    ]


async def test_a_store_that_cannot_be_read_is_passed_by(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    node = harness.add(b"content")
    harness.memory.reading_fails = StoreError("too many readers")
    assert harness.fetcher.local(ContentKey(node.inode)) is None
    assert not harness.fetcher.stored(ContentKey(node.inode))
    assert await harness.fetcher.fetch(node) == (b"content", FETCHED)
    assert local(harness.fetcher, ContentKey(node.inode)) == b"content"
    assert harness.counted("store_failures") == [3]
    assert {record.getMessage() for record in caplog.records} == {"too many readers: reading from the source instead"}


async def test_a_damaged_store_is_passed_up(harness: Harness) -> None:
    node = harness.add(b"content")
    harness.memory.landing_fails = StoreCorrupt("a page is missing")
    with pytest.raises(StoreCorrupt):
        await harness.fetcher.fetch(node)
    assert harness.source.calls["read"] == 1, "the store's fault does not repeat the read"
    harness.memory.reading_fails = StoreCorrupt("a page is missing")
    for ask in (harness.fetcher.local, harness.fetcher.stored):
        with pytest.raises(StoreCorrupt):
            ask(ContentKey(node.inode))


async def test_a_record_whose_bytes_are_damaged_is_fetched_again(tmp_path: Path) -> None:
    content = LmdbContent(tmp_path)
    content.set_capacity(1 << 20)
    harness = Harness(tmp_path, content)
    payload = random.Random(1).randbytes(20_000)
    node = harness.add(payload)
    key = ContentKey(node.inode)
    content.land(key, payload)
    file = tmp_path / "extents"
    at = file.read_bytes().index(payload[10_000:10_050])
    with open(file, "r+b") as data:
        data.seek(at)
        data.write(b"damaged")
    assert harness.fetcher.local(key) is None
    assert harness.counted("checksum_failures") == [1]
    content.apply((), [Keep(key, "samples")])
    assert await harness.fetcher.fetch(node) == (payload, FETCHED)
    content.end_read()
    assert local(harness.fetcher, key) == payload
    assert content.member(key).section == "samples"
    harness.interlock.close()
    content.close()


# -- between processes


KEY = ContentKey(100_000)


class Other:
    """Another process of the mount, which holds the lock of KEY and lands its bytes when it is told to."""

    def __init__(self, directory: Path) -> None:
        ready, self._ready = os.pipe()
        self._go, self._tell = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            # Else the end of a test that failed would not be noticed here.
            os.close(self._tell)
            try:
                self._hold(directory)
            finally:
                os._exit(1)
        for fd in (self._ready, self._go):
            os.close(fd)
        assert os.read(ready, 1) == b"r"
        os.close(ready)

    def _hold(self, directory: Path) -> None:
        lock = FetchLock(directory / "fetch.lock")
        assert lock.try_hold(KEY)
        os.write(self._ready, b"r")
        payload = os.read(self._go, 100)
        if payload != b"dies":
            LmdbContent(directory).land(KEY, payload)
        os._exit(0)

    def go_on(self, payload: bytes = b"dies") -> None:
        """Land this, or die without a word."""
        os.write(self._tell, payload)

    def close(self) -> None:
        # Whatever it still waited for, it ends now.
        os.close(self._tell)
        os.waitpid(self._pid, 0)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    with contextlib.closing(Other(tmp_path)) as other:
        yield other


@pytest.mark.parametrize("lands", [True, False])
async def test_who_waited_for_another_process_takes_what_it_landed(other: Other, tmp_path: Path, lands: bool) -> None:
    content = LmdbContent(tmp_path)
    content.set_capacity(1 << 20)
    harness = Harness(tmp_path, content)
    node = harness.add(b"content")
    found: list[tuple[bytes, int]] = []

    async def want() -> None:
        # As an open does it: look first, then fetch.
        assert not harness.fetcher.stored(KEY)
        found.append(await harness.fetcher.fetch(node))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(want)
        await trio.testing.wait_all_tasks_blocked()
        assert not found
        other.go_on(b"content" if lands else b"dies")
    assert found == [(b"content", FETCHED)] * 3
    # Where the other one died without a word, its lock was free and the source was asked.
    assert harness.counted("origin_reads") == [0 if lands else 1]
    harness.interlock.close()
    content.close()


@pytest.mark.usefixtures("other")
async def test_who_waits_for_a_process_that_stands_still_asks_the_source_in_time(harness: Harness) -> None:
    client = SourceClient(harness.source, SourceLimits(timeout_s=2.0), rng=random.Random(1), on_event=harness.row.add)
    fetcher = Fetcher(client, harness.content, harness.interlock, harness.full_disk, harness.row)
    assert (await fetcher.fetch(harness.add(b"content")))[0] == b"content"
    assert harness.interlock.held(KEY)


@pytest.mark.parametrize("go_on_after_s", [0.5, None])
async def test_both_waits_together_have_one_limit(other: Other, harness: Harness, go_on_after_s: float | None) -> None:
    """A reader waits for another process and then for a source that hangs, for both together only once."""
    limit_s, hanging = 0.6, threading.Event()
    harness.source.read = lambda *args: hanging.wait() and b""  # type: ignore[assignment]
    limits = SourceLimits(timeout_s=limit_s)
    client = SourceClient(harness.source, limits, rng=random.Random(1), on_event=harness.row.add)
    fetcher = Fetcher(client, harness.content, harness.interlock, harness.full_disk, harness.row)
    took_s = []

    async def want() -> None:
        began = time.monotonic()
        with pytest.raises(SourceTimeout):
            await fetcher.fetch(harness.add(b"content"))
        took_s.append(time.monotonic() - began)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(want)
            if go_on_after_s is not None:
                await trio.sleep(go_on_after_s)
                other.go_on()
    finally:
        hanging.set()
    assert not client.reachable
    assert harness.counted("source_timeouts") == [1]
    (longest_s,) = took_s
    assert longest_s == pytest.approx(limit_s, abs=0.3)


async def test_what_another_process_landed_just_before_the_lock_was_free_is_not_fetched_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = harness.interlock.try_hold

    def land_and_take(key: ContentKey) -> bool:
        harness.memory.land(key, b"content")
        return take(key)

    monkeypatch.setattr(harness.interlock, "try_hold", land_and_take)
    node = harness.add(b"content")
    assert await harness.fetcher.fetch(node) == (b"content", FETCHED)
    assert harness.counted("origin_reads") == [0]
    assert not harness.interlock.held(ContentKey(node.inode))
    assert take(ContentKey(node.inode))


async def test_it_is_known_what_another_process_fetches(other: Other, harness: Harness) -> None:
    mine, none = ContentKey(200_000), ContentKey(300_000)
    assert [harness.interlock.held(key) for key in (mine, KEY, none)] == [False, True, False]
    assert [harness.fetcher.under_way(key) for key in (mine, KEY, none)] == [False, True, False]
    # One's own lock is none to wait for; a fetch of one's own is.
    assert harness.interlock.try_hold(mine)
    assert not harness.interlock.held(mine)
    harness.interlock.let_go(mine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(harness.fetcher.fetch, harness.add(b"content", mine.inode))
        await trio.sleep(0)
        while not harness.fetcher.under_way(mine):
            await trio.sleep(0)
    assert not harness.fetcher.under_way(mine)
    # It dies, and its lock with it.
    other.go_on()
    while harness.fetcher.under_way(KEY):
        await trio.sleep(0.001)


@pytest.mark.usefixtures("other")
async def test_files_do_not_wait_for_each_other(harness: Harness) -> None:
    # Its blocks are other records than the whole file.
    for node, block in ((harness.add(b"x", 200_000, b"one"), 0), (harness.add(b"x", 100_000, b"two"), 1)):
        assert await harness.fetcher.fetch(node, block) == (b"x", FETCHED)


async def test_a_caller_that_gives_up_leaves_no_lock(harness: Harness) -> None:
    node = harness.add(b"content")
    harness.source.fail_next(SourceUnavailable("so that there is a pause to give up in"))
    with trio.CancelScope() as scope:
        scope.cancel()
        await harness.fetcher.fetch_bytes(node)
    assert scope.cancelled_caught
    other = FetchLock(harness.lock)
    assert other.try_hold(ContentKey(node.inode))
    other.close()


# -- behind the reader's back


async def test_a_reader_has_its_bytes_before_they_are_in_the_store(harness: Harness) -> None:
    """Between both, everybody of this process is given them, and no one else fetches them."""
    alone = Fetcher(harness.client, harness.content, harness.interlock, harness.full_disk, harness.row, alone=True)
    told: list[int] = []
    node = harness.add(b"content")
    key = ContentKey(node.inode)
    other = FetchLock(harness.lock)
    fetched = await alone.fetch_bytes(node)
    fetched.when_settled(told.append)
    assert fetched.payload == b"content"
    assert not harness.content.has(key)
    assert not told
    assert other.held(key)
    assert alone.stored(key)
    assert local(alone, key) == b"content"
    assert await alone.fetch_bytes(node) is fetched
    assert await alone.fetch(node) == (b"content", FETCHED)
    assert harness.content.has(key)
    assert told == [FETCHED]
    fetched.when_settled(told.append)
    assert told == [FETCHED] * 2
    assert not other.held(key)
    assert harness.source.calls["read"] == 1
    other.close()


async def test_one_that_does_not_fit_on_the_disk_costs_the_others_nothing(harness: Harness) -> None:
    harness.memory.landing_fails = StoreFull("no space left for the cache")
    harness.memory.fitting = {b"fits"}
    found = {}

    async def want(node: Node) -> None:
        payload, where = await harness.fetcher.fetch(node)
        found[payload] = where

    async with trio.open_nursery() as nursery:
        for inode, payload in ((200_000, b"fits"), (200_001, b"does not")):
            nursery.start_soon(want, harness.add(payload, inode, payload))
    assert found == {b"fits": FETCHED, b"does not": UNSTORED}


async def test_who_fetches_more_than_may_wait_waits_for_room(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spiderfs.vfs.fetcher.ENTRY_BYTES", 0)
    held: list[int] = []
    noted: list[int] = []
    landing = Landing(harness.content, 0.0, 100, InFlight(note=noted.append))

    async def put(number: int) -> None:
        await landing.put(ContentKey(number), bytes(60), lambda _: None)
        held.append(landing._bytes)

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(put, number)
    await landing.drain()
    assert max(held) <= 100 + 60
    # Those that waited were in flight.
    assert (max(noted), noted[-1]) == (18 * 60, 0)
    assert all(harness.content.has(ContentKey(number)) for number in range(20))
