"""Parts of large files: when their bytes are held, given up and freed, and how many may come at a time."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from waiting import eventually

from benchmarks.common.sources import patterned
from benchmarks.fakes import MemorySource
from spiderfs.core.events import FETCHED, REFUSED
from spiderfs.errors import SourceChanged, StoreFull
from spiderfs.linux.range_lock import try_lock
from spiderfs.metrics import SharedCounters
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.read_process import ReadProcess
from spiderfs.sources.source import SourceStat, Version
from spiderfs.store.content import LmdbContent, RecordWriter
from spiderfs.store.store import BLOCK_BYTES, ContentKey, Keep
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.fetcher import Episode, Fetcher
from spiderfs.vfs.large_files import FilePart, Parts, ReadAhead

INODE, BLOCKS = 100_000, 40
SIZE = BLOCKS * BLOCK_BYTES + 4099
# More than are in these tests; a read that should go on waits for no one.
MANY, ROOM = 1000, 12


class Held(MemorySource):
    """A source that gives a piece for each that it is told to give."""

    def __init__(self) -> None:
        super().__init__()
        self._told, self._tell = os.pipe()
        self.version = self.add(b"large", patterned(0, SIZE)).version
        self.fails = False

    def give(self, pieces: int = MANY) -> None:
        os.write(self._tell, bytes(pieces))

    def stream(self, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
        for at in range(offset, offset + length, BLOCK_BYTES):
            os.read(self._told, 1)
            yield self.read(path, at, min(BLOCK_BYTES, offset + length - at), version)


class Harness:
    def __init__(self, directory: Path, write_part: Any, timeout_s: float) -> None:
        (directory / "content").mkdir()
        self.source = Held()
        self._write_part = write_part or RecordWriter(directory / "content").write_part
        self.reading = ReadProcess(self.source, 16, 2 << 20, lambda: None, write_part=self._write_part)
        self.content = LmdbContent(directory / "content")
        self.content.set_capacity(1 << 30)
        self.counters = SharedCounters(1)
        row = self.counters.row(0)
        limits = SourceLimits(timeout_s=timeout_s, attempts=1)
        client = SourceClient(self.source, limits, rng=random.Random(1), on_event=lambda event: None)
        locks = (FetchLock(directory / "fetch.lock") for _ in range(2))
        self.fetcher = Fetcher(client, self.content, next(locks), Episode(directory / "full-disk"), row)
        self.supply: Any = SimpleNamespace(client=client, fetcher=self.fetcher, counters=row)
        self.lock = next(locks)
        self.plain = directory / "content/blocks" / f"{INODE}"
        attributes = SourceStat(stat.S_IFREG | 0o644, 0, 0, SIZE, self.source.version.mtime_ns)
        self.node = Node(INODE, b"large", attributes)

    def begin(self, first: int, count: int) -> FilePart:
        assert self.parts.begin(self.node, range(first, first + count), True) == count
        return self.parts.of(ContentKey(INODE, first))

    def is_held(self, block: int) -> bool:
        with open(self.plain, "r+b") as file:
            return not try_lock(file.fileno(), (block - 1) * BLOCK_BYTES, BLOCK_BYTES)


@pytest.fixture
def timeout_s() -> float:
    return 15.0


@pytest.fixture
def write_part() -> Any:
    """How a part is written; None: as it is in a mount."""
    return None


@pytest.fixture
def process(tmp_path: Path, write_part: Any, timeout_s: float) -> Iterator[Harness]:
    """One whose reading process has been forked, and not yet been heard."""
    harness = Harness(tmp_path, write_part, timeout_s)
    yield harness
    os.kill(harness.reading.pid, signal.SIGKILL)
    os.waitpid(harness.reading.pid, 0)
    harness.reading.close()
    harness.content.close()


@pytest.fixture
@contextlib.asynccontextmanager
async def h(process: Harness) -> AsyncIterator[Harness]:
    async with trio.open_nursery() as nursery:
        process.parts = Parts(nursery, process.supply, process.content, process.lock, process.reading.read, ROOM)
        process.ahead = ReadAhead(nursery, process.fetcher, process.supply.counters, 4, process.parts)
        nursery.start_soon(process.reading.attend)
        yield process
        nursery.cancel_scope.cancel()


async def test_blocks_can_be_read_while_the_part_is_coming(h: Harness) -> None:
    part = h.begin(BLOCKS - 1, 3)
    assert not part.has(BLOCKS - 1)
    h.source.give(1)
    await part.wait_for(BLOCKS - 1)
    at = (BLOCKS - 2) * BLOCK_BYTES
    assert part.read(BLOCKS - 1, 100, 5000) == patterned(at + 100, at + 5100)
    assert not h.content.has(ContentKey(INODE, BLOCKS - 1))
    assert not part.has(BLOCKS)
    # No one else fetches them, and none of them begins again.
    assert h.fetcher.under_way(ContentKey(INODE, BLOCKS))
    assert h.parts.begin(h.node, range(BLOCKS, BLOCKS + 2), True) == 0
    h.source.give()
    assert await part.settled() == FETCHED
    h.content.end_read()
    for block in range(BLOCKS - 1, BLOCKS + 2):
        begin = (block - 1) * BLOCK_BYTES
        assert h.content.read(ContentKey(INODE, block)) == patterned(begin, min(begin + BLOCK_BYTES, SIZE))
    assert h.supply.counters.value("origin_bytes") == 2 * BLOCK_BYTES + 4099
    # Evicted before its reader came: the bytes are there until it has passed.
    h.content.apply(part.keys, ())
    assert h.is_held(BLOCKS)
    assert part.read(BLOCKS, 0, 10) == patterned((BLOCKS - 1) * BLOCK_BYTES, (BLOCKS - 1) * BLOCK_BYTES + 10)
    part.passed.set()
    await eventually(lambda: h.parts.of(part.keys[0]) is None)
    h.content.free()
    assert not h.plain.exists()


@pytest.mark.parametrize("timeout_s", [0.3])
async def test_a_part_that_was_given_up_is_held_until_its_writer_has_ended(h: Harness) -> None:
    part = h.begin(1, 3)
    h.source.give(1)
    await part.wait_for(1)
    await part.settled()
    assert part.has_failed
    assert h.parts.of(ContentKey(INODE, 2)) is None, "its readers ask for blocks"
    # Another reader's fetch lands one of them meanwhile, and is dropped again.
    assert h.content.land(ContentKey(INODE, 2), patterned(BLOCK_BYTES, 2 * BLOCK_BYTES))
    assert h.content.land(ContentKey(INODE, 3), patterned(2 * BLOCK_BYTES, 3 * BLOCK_BYTES))
    h.content.apply([ContentKey(INODE, 3)], ())
    assert h.parts.in_flight == 3
    assert h.is_held(1)
    assert h.is_held(3)
    h.source.give()
    await eventually(lambda: h.parts.in_flight == 0)
    await eventually(lambda: h.plain.stat().st_blocks * 512 < BLOCK_BYTES * 3 // 2)
    h.content.end_read()
    assert h.content.read(ContentKey(INODE, 2)) == patterned(BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert not h.is_held(1)


async def test_a_part_may_take_longer_than_the_time_limit_while_its_blocks_come_within_it(h: Harness) -> None:
    part = h.begin(1, 4)
    await eventually(lambda: part.limit.deadline < math.inf)
    for block in range(1, 4):
        before_s = part.limit.deadline
        h.source.give(1)
        await part.wait_for(block)
        assert part.limit.deadline > before_s
    h.source.give(1)
    assert await part.settled() == FETCHED
    assert not part.has_failed


async def test_a_part_that_the_source_breaks_off_leaves_nothing(h: Harness) -> None:
    h.node = h.node._replace(stat=h.node.stat._replace(mtime_ns=5))
    part = h.begin(1, 3)
    h.source.give(3)
    await part.settled()
    assert (part.has_failed, part.read(1, 0, 1)) == (True, None)
    await eventually(lambda: not h.plain.exists())
    with pytest.raises(SourceChanged):
        await h.fetcher.fetch(h.node, 1)


async def test_what_the_store_has_no_room_for_is_read_and_freed(h: Harness) -> None:
    h.content.land(ContentKey(7), bytes(100))
    h.content.apply((), [Keep(ContentKey(7), "all")])
    h.content.set_capacity(150)
    h.source.give()
    part = h.begin(1, 2)
    assert await part.settled() == REFUSED
    assert part.read(2, 0, BLOCK_BYTES) == patterned(BLOCK_BYTES, 2 * BLOCK_BYTES)
    # Another reader of the file gets them from here, too.
    h.ahead.follow(h.node, range(1, 2), range(2, 3))
    assert not h.fetcher.busy
    part.passed.set()
    await eventually(lambda: not h.plain.exists())


def full(*_: object) -> bytes:
    raise StoreFull("no space left for the cache")


@pytest.mark.parametrize("write_part", [full])
async def test_after_the_disk_was_full_blocks_come_alone_for_a_while(h: Harness) -> None:
    part = h.begin(1, 2)
    await part.settled()
    assert part.has_failed
    assert not h.parts.take(h.node)
    assert h.supply.counters.value("store_failures") == 1
    await eventually(lambda: not h.plain.exists())


async def test_readers_together_have_no_more_on_its_way_than_there_is_room_for(h: Harness) -> None:
    for _ in range(5):
        # Each waits for what was asked for last, so its window grows.
        h.ahead.waited(h.node, BLOCKS)
        h.ahead._window(h.node).grown_at = 0
    others = [h.node._replace(inode=INODE + number) for number in range(4)]
    for _ in range(2):
        for node in (h.node, *others):
            h.ahead.follow(node, range(0), h.ahead.wanted(node, range(1, 2), 10 * BLOCK_BYTES))
            assert h.parts.in_flight <= ROOM
    assert h.parts.in_flight == ROOM
    h.source.give()
    await eventually(lambda: h.parts.in_flight == 0)
    # What found no room is asked for again.
    assert h.ahead.wanted(others[-1], range(1, 2), 10 * BLOCK_BYTES).start == 2


async def test_parts_are_longer_for_a_reader_that_waits(h: Harness) -> None:
    h.parts._room_blocks = BLOCKS
    h.ahead.follow(h.node, range(0), h.ahead.wanted(h.node, range(1, 2), SIZE))
    for _ in range(4):
        h.ahead.waited(h.node, BLOCKS)
        h.ahead._window(h.node).grown_at = 0
    h.ahead.follow(h.node, range(0), h.ahead.wanted(h.node, range(5, 6), SIZE))
    parts = [part for block in range(2, BLOCKS + 2) if (part := h.parts.of(ContentKey(INODE, block))) is not None]
    assert [len(part.keys) for part in dict.fromkeys(parts)] == [1] * 4 + [3] + [4] * 8 + [1]
