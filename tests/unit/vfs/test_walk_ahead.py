"""Walking ahead: the next directories are known when a reader comes to them, and nothing else is asked."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator, Container, Iterator, Sequence

import pytest
import trio
from trio.testing import MockClock

from benchmarks.fakes import MemorySource
from spiderfs.errors import SourceDenied
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.source import SourceStat
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs.catalogue import TABLES, Catalogue, Node
from spiderfs.vfs.lister import AHEAD, LEAST_AHEAD, Lister, WalkAhead

TTL_S = 10.0
PATIENCE_S = 60.0
LIMITS = SourceLimits(attempts=1, max_concurrent=8)


class Source(MemorySource):
    """It notes which directories are scanned, and refuses some."""

    def __init__(self) -> None:
        super().__init__()
        self.scanned: list[bytes] = []
        self.refused: set[bytes] = set()

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        self.scanned.append(path)
        if path in self.refused:
            raise SourceDenied("no")
        return super().scan(path, known)


class Reader:
    """A reader who lists directories, with clocks that stand still unless the test moves them.

    By trio's clock its pace is measured: on a busy machine a reader would be a slow one.
    """

    latency_s = 0.01

    def __init__(self, nursery: trio.Nursery, source: Source, clock: MockClock) -> None:
        self.clock = clock
        self.now = 1_800_000_000.0
        self.source = source
        self.catalogue = Catalogue(MemoryRecords(TABLES), lambda: self.now)
        client = SourceClient(source, LIMITS, rng=random.Random(1), on_event=lambda event: None)
        self.lister = Lister(self.catalogue, client, lambda: self.now)
        self.client = client
        self.ahead = WalkAhead(nursery, client, self.catalogue, self.lister)

    async def lists(self, path: bytes, ttl_s: float = TTL_S) -> list[bytes]:
        """List a directory as `Filesystem.opendir` does, and wait for what that makes; returns what was scanned."""
        node = await self.node(path)
        self.source.scanned.clear()
        self.client.stat_latency_s = self.latency_s
        self.ahead.asked(node, ttl_s)
        await self.lister.complete(node, ttl_s)
        until = time.monotonic() + PATIENCE_S
        while self.ahead.busy:
            assert time.monotonic() < until, "directories are still being listed ahead"
            await trio.to_thread.run_sync(time.sleep, 0.001)
        return list(self.source.scanned)

    async def node(self, path: bytes) -> Node:
        if not path:
            return await self.lister.root()
        dentry = self.catalogue.find(*self.catalogue.parent_of(path))
        return self.catalogue.node(dentry.inode)

    async def in_order(self, parent: bytes) -> list[bytes]:
        """The directories in one, in the order of readdir."""
        entries = self.catalogue.entries((await self.node(parent)).inode, 0, 10_000)
        return [parent + b"/" + entry.name if parent else entry.name for entry in entries]


CLASSES = [b"n%05d" % (number * 7919 % 100_000) for number in range(300)]
ALL = pytest.mark.parametrize("directories", [CLASSES], ids=["300"])


@pytest.fixture
def clock() -> MockClock:
    return MockClock()


@pytest.fixture
def directories() -> Sequence[bytes]:
    return CLASSES[:20]


@pytest.fixture
@contextlib.asynccontextmanager
async def reader(directories: Sequence[bytes], clock: MockClock) -> AsyncIterator[Reader]:
    source = Source()
    for path in directories:
        source.add(path + b"/file")
    async with trio.open_nursery() as nursery:
        reader = Reader(nursery, source, clock)
        await reader.lists(b"")
        yield reader
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("by_name", [False, True])
async def test_the_next_directories_are_known_before_they_are_asked_for(reader: Reader, by_name: bool) -> None:
    order = await reader.in_order(b"")
    if by_name:
        order.sort()
    asked = 0
    scanned: list[bytes] = []
    for path in order:
        known = reader.lister.is_fresh(await reader.node(path), TTL_S)
        asked += not known
        scanned += await reader.lists(path)
    assert asked == 1, "the first one"
    assert sorted(scanned) == sorted(order), "each was scanned once"


@ALL
async def test_a_walk_that_stops_leaves_the_rest_alone(reader: Reader) -> None:
    order = await reader.in_order(b"")
    assert await reader.lists(order[0]) != []
    found = await reader.lists(order[1])
    assert found == [order[1 + AHEAD]], "one more for each that a reader has come to"


@ALL
async def test_a_reader_of_single_directories_has_none_listed_ahead(reader: Reader) -> None:
    order = await reader.in_order(b"")
    places = {path: place for place, path in enumerate(order)}
    names = {path: place for place, path in enumerate(sorted(order))}
    asked = [order[250]]
    for path in order:
        if all(abs(place[path] - place[asked[-1]]) > 10 for place in (places, names)) and names[path] > 100:
            asked.append(path)
    assert len(asked) > 10
    for path in asked:
        assert await reader.lists(path) == [path]


@ALL
async def test_a_slow_reader_has_fewer_listed_ahead(reader: Reader) -> None:
    order = await reader.in_order(b"")
    scanned = await reader.lists(order[0], ttl_s=0.1)
    assert len(scanned) == 1 + AHEAD
    for path in order[1:4]:
        reader.clock.jump(0.12)
        reader.now += 1.0
        reader.source.calls.clear()
        await reader.lists(path, ttl_s=0.1)
    assert 1 < sum(reader.source.calls.values()) <= 1 + LEAST_AHEAD, "a listing is trusted for two of its steps"


@pytest.mark.parametrize("directories", [[b"video%d/frames/left" % number for number in range(3)]], ids=["deep"])
async def test_a_reader_that_goes_down_finds_the_first_directory_known(reader: Reader) -> None:
    first, *others = await reader.in_order(b"")
    await reader.lists(first)
    for path in others:
        assert reader.lister.is_fresh(await reader.node(path + b"/frames/left"), TTL_S)
        assert await reader.lists(path) == []


async def test_a_second_walk_asks_again_what_is_too_old(reader: Reader) -> None:
    order = await reader.in_order(b"")
    for path in order:
        await reader.lists(path)
    reader.source.add(order[5] + b"/new")
    reader.now += 2 * TTL_S
    assert not reader.lister.is_fresh(await reader.node(order[5]), TTL_S)
    assert await reader.lists(order[0]) == [order[5]], "the one that has changed; the others by their mtime"
    assert all([reader.lister.is_fresh(await reader.node(path), TTL_S) for path in order[1:]])


async def test_directories_that_cannot_be_listed_are_the_reader_s_errors(reader: Reader) -> None:
    order = await reader.in_order(b"")
    reader.source.refused.add(order[2])
    await reader.lists(order[0])
    with pytest.raises(SourceDenied):
        await reader.lists(order[2])
    assert await reader.lists(order[3]) == []


async def test_nothing_is_listed_ahead_where_no_listing_is_trusted(reader: Reader) -> None:
    order = await reader.in_order(b"")
    assert await reader.lists(order[0], ttl_s=0.0) == [order[0]]


@pytest.mark.parametrize(("latency_s", "ttl_s"), [(0.001, TTL_S), (0.02, 0.1)])
async def test_nothing_is_listed_ahead_where_nothing_is_gained(reader: Reader, latency_s: float, ttl_s: float) -> None:
    reader.latency_s = latency_s
    order = await reader.in_order(b"")
    for path in order[:3]:
        assert await reader.lists(path, ttl_s) == [path]


async def test_an_open_directory_that_has_become_a_file_is_not_answered_for_by_that_file(reader: Reader) -> None:
    order = await reader.in_order(b"")
    await reader.lists(order[0])
    node = await reader.node(order[0])
    mtime_ns = node.stat.mtime_ns
    reader.source.remove(order[0])
    found = reader.source.add(order[0], b"a file now", mtime_ns=mtime_ns)
    reader.catalogue.record(1, order[0], found, reader.now)
    assert reader.lister.looked_up(node, TTL_S) is None
