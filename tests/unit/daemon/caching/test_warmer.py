"""What becomes of requests to warm files: how they are counted, ended and refused, and what the source is asked."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import trio
from waiting import eventually

from benchmarks.fakes import MemoryContent, MemorySource
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.prefetch_backend import BackgroundRate
from spiderfs.daemon.caching.warmer import Pattern, Warmer
from spiderfs.errors import SourceDenied
from spiderfs.linux import steady_clock
from spiderfs.metrics import SharedCounters
from spiderfs.shared.warming import Warming
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.source import Version
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs.catalogue import TABLES, Catalogue
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.fetcher import Episode, Fetcher
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.on_demand import Supply

AT_ONCE = 16


class HeldSource(MemorySource):
    """One that answers reads only while `open` is set, and knows how many wait at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.waiting = self.most = 0
        self._count = threading.Lock()

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        with self._count:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
        self.open.wait(20)
        with self._count:
            self.waiting -= 1
        return super().read(path, offset, length, version)


class Harness:
    def __init__(self, directory: Path) -> None:
        self.source = HeldSource()
        row = SharedCounters(1).row(0)
        limits = SourceLimits(attempts=1, max_concurrent=AT_ONCE)
        client = SourceClient(self.source, limits, rng=random.Random(1), on_event=lambda event: None)
        records, self.content = MemoryRecords(TABLES), MemoryContent()
        self.catalogue = Catalogue(records)
        self.lock = FetchLock(directory / "lock")
        fetcher = Fetcher(client, self.content, self.lock, Episode(directory / "full"), row)
        lister = Lister(self.catalogue, client)
        self.at_once = lister.at_once
        supply = Supply(self.content, records, client, self.catalogue, lister, fetcher, row)
        self.content.set_capacity(1 << 30)
        self.warmer = Warmer(supply, 8 << 20, lambda *event: None, BackgroundRate(0))

    def add(self, *paths: bytes) -> None:
        for path in paths:
            self.source.add(path, b"x" * 100)

    def warm(self, *lines: bytes) -> None:
        self.warmer.warm([Pattern(line, b"/mnt") for line in lines])

    async def done(self) -> Warming:
        # Looking at it has an effect once it is done.
        await eventually(lambda: not self.warmer._warming.working)
        return self.warmer.status()


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Harness]:
    harness = Harness(directory)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(harness.warmer.run)
            with trio.fail_after(30):
                yield harness
            nursery.cancel_scope.cancel()
    finally:
        harness.source.open.set()
        harness.lock.close()


@pytest.fixture
def harness(tmp_path: Path) -> AbstractAsyncContextManager[Harness]:
    return running(tmp_path)


async def test_requests_are_counted_together_until_someone_has_seen_that_all_is_done(harness: Harness) -> None:
    harness.add(b"a/1", b"a/2", b"b/1", b"c/1")
    harness.warm(b"a")
    await eventually(lambda: not harness.warmer._warming.working)
    harness.warm(b"b", b"a/1", b"no/such", b"nor.this")
    done = await harness.done()
    assert done == Warming(found=4, fetched=3, fetched_bytes=300, present=1, missing=2, unknown="no/such")
    assert done.line() == (
        "idle: 4 files found, 3 fetched (300 bytes), 1 cached before, 0 failed, 2 missing, 0 without room,"
        " 0 not kept, 0 left (0 bytes); the mount has no file no/such\n"
    )
    harness.warm(b"c", b"*/2")
    assert await harness.done() == Warming(found=2, fetched=1, fetched_bytes=100, present=1)


async def test_what_has_no_room_among_pins_is_not_fetched(harness: Harness) -> None:
    harness.add(b"a/1", b"a/2", b"a/3", b"a*", b"b/1")
    cache = CacheControl(harness.content, "lru", 0.5, SharedCounters(1).row(0))
    cache.restore(500, None)  # room for pins: 250 bytes less half of what landing takes
    harness.warmer.warm([Pattern(b"a", b"/mnt"), Pattern(b"a*", b"/mnt")], cache)
    done = await harness.done()
    assert (done.found, done.fetched, done.roomless, done.left) == (4, 2, 2, 0)
    assert len(cache.engine.pins) == 2
    await harness.warmer.unpin([Pattern(b"b", b"/mnt")], cache)
    assert (harness.warmer.last_unpinned, len(cache.engine.pins)) == (0, 2)
    await harness.warmer.unpin([Pattern(b"/", b"/mnt")], cache)
    assert (harness.warmer.last_unpinned, len(cache.engine.pins)) == (2, 0)


async def test_earlier_versions_give_their_room_to_pins_at_once(harness: Harness) -> None:
    cache = CacheControl(harness.content, "lru", 0.5, SharedCounters(1).row(0))
    cache.restore(700, None)
    paths = [b"a/%d" % number for number in range(3)]
    harness.add(*paths)
    for _ in range(2):
        harness.warmer.warm([Pattern(b"a", b"/mnt")], cache)
        status = await harness.done()
        assert (status.roomless, len(cache.engine.pins), cache.engine.pins.bytes) == (0, 3, 300)
        for path in paths:
            harness.source.change(path, b"y" * 100)
        # Listings are trusted for a second.
        for path in paths:
            now = harness.source.stat(path)
            harness.catalogue.record(*harness.catalogue.parent_of(path), now, steady_clock.now())


async def test_all_is_found_while_the_first_files_are_fetched(harness: Harness) -> None:
    harness.source.open.clear()
    harness.add(*(b"%02d/%02d" % (above, below) for above in range(20) for below in range(20)))
    harness.warm(b"/")
    assert harness.warmer.status().searching
    await eventually(lambda: not harness.warmer.status().searching)
    assert harness.warmer.status() == Warming(found=400, left=400, left_bytes=40_000)
    await eventually(lambda: harness.source.waiting == harness.at_once)
    harness.source.open.set()
    assert await harness.done() == Warming(found=400, fetched=400, fetched_bytes=40_000)
    assert harness.source.most == harness.at_once < AT_ONCE, "readers have the other threads"


async def test_a_list_is_looked_up_by_directories_side_by_side(harness: Harness) -> None:
    paths = [b"%02d/%02d" % (above, below) for above in range(20) for below in range(20)]
    harness.add(*paths)
    harness.warm(*paths, b"absent/1", b"absent/2", b"00/absent")
    done = await harness.done()
    assert (done.found, done.fetched, done.missing) == (400, 400, 3)
    assert harness.source.calls["scan"] == 21, "each directory once"


async def test_what_cannot_be_read_is_counted(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    harness.add(b"a/1", b"b/1")
    harness.warm(b"c")
    await harness.done()
    harness.source.fail_next(SourceDenied("no"), SourceDenied("no"))
    harness.warm(b"/")
    assert await harness.done() == Warming(failed=2), "both directories"
    harness.source.fail_next(SourceDenied("no"))
    harness.warm(b"a/1", b"a/2", b"b/1")
    done = await harness.done()
    assert (done.fetched + done.failed, done.missing) in ((2, 1), (3, 0)), "one of the directories"
    assert done.failed in (1, 2)
    assert "warming /a: no" in caplog.text
