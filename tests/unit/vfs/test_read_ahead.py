"""Which blocks are fetched ahead of whom."""

from __future__ import annotations

import contextlib
import random
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
import trio.testing

from benchmarks.fakes import MemoryContent, MemorySource
from spiderfs.errors import SourceUnavailable
from spiderfs.metrics import SharedCounters
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.source import SourceStat
from spiderfs.store.store import BLOCK_BYTES, ContentKey
from spiderfs.vfs import large_files as module
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.fetcher import Episode, Fetcher
from spiderfs.vfs.large_files import ReadAhead

DEPTH = 4
# Bytes in a row for which all is fetched ahead that may be.
LONG = 100 * BLOCK_BYTES


def node(blocks: float, inode: int = 100_000, mtime_ns: int = 1) -> Node:
    return Node(inode, b"large", SourceStat(stat.S_IFREG | 0o644, 0, 0, int(blocks * BLOCK_BYTES), mtime_ns))


class Harness:
    def __init__(self, nursery: trio.Nursery, directory: Path) -> None:
        self.source = MemorySource()
        self.content = MemoryContent()
        self.content.set_capacity(1 << 30)
        self.counters = SharedCounters(1)
        row = self.counters.row(0)
        limits = SourceLimits(attempts=1)
        client = SourceClient(self.source, limits, rng=random.Random(1), on_event=lambda event: None)
        self.interlock = FetchLock(directory / "fetch.lock")
        fetcher = Fetcher(client, self.content, self.interlock, Episode(directory / "full-disk"), row)
        self.ahead = ReadAhead(nursery, fetcher, row, DEPTH)


@contextlib.asynccontextmanager
async def reading_ahead(directory: Path) -> AsyncIterator[Harness]:
    """When it ends, all has been fetched ahead."""
    async with trio.open_nursery() as nursery:
        harness = Harness(nursery, directory)
        yield harness
    harness.interlock.close()


@pytest.fixture
def harness(tmp_path: Path) -> contextlib.AbstractAsyncContextManager[Harness]:
    return reading_ahead(tmp_path)


@pytest.mark.parametrize(
    ("size_blocks", "blocks", "ahead"),
    [
        pytest.param(100, [1, 2, 3], [[2, 3, 4, 5], [6], [7]], id="a window that moves along"),
        pytest.param(100, [1, 1, 1, 2, 2], [[2, 3, 4, 5], [], [], [6], []], id="several reads of one block"),
        pytest.param(3.5, [1, 2, 3, 4], [[2, 3, 4], [], [], []], id="nothing past the end"),
        pytest.param(
            100,
            [50, 51, 20, 80, 81],
            [[51, 52, 53, 54], [55], [21, 22, 23, 24], [81, 82, 83, 84], [85]],
            id="a window for each place",
        ),
        pytest.param(3, [1, 2, 3, 1, 2], [[2, 3], [], [], [2, 3], []], id="a second pass"),
    ],
)
async def test_windows(harness: Harness, size_blocks: float, blocks: list[int], ahead: list[list[int]]) -> None:
    """What each read of a block asks for, by a reader that has been in order for long."""
    file = node(size_blocks)
    assert [list(harness.ahead.wanted(file, range(block, block + 1), LONG)) for block in blocks] == ahead


async def test_the_window_grows_while_the_reader_goes_on(harness: Harness) -> None:
    for pieces, ahead in ((0.1, []), (1, [2]), (1.5, []), (2, [3]), (3, [4]), (4, [5])):
        in_a_row = int(pieces * (128 << 10))
        assert list(harness.ahead.wanted(node(100), range(1, 2), in_a_row)) == ahead
    # It stays as wide, also if READs come in another order, and the bytes in a row are lost.
    assert list(harness.ahead.wanted(node(100), range(2, 3), 0)) == [6]


async def test_what_was_fetched_ahead_is_reached_in_any_order(harness: Harness) -> None:
    assert not harness.ahead.has_reached(node(100), 1)
    harness.ahead.wanted(node(100), range(50, 51), LONG)
    assert [block for block in range(1, 100) if harness.ahead.has_reached(node(100), block)] == [51, 52, 53, 54]


async def test_a_read_across_a_border_of_blocks_asks_for_its_second_block_too(harness: Harness) -> None:
    assert list(harness.ahead.wanted(node(100), range(52, 54), LONG)) == [53, 54, 55, 56, 57]
    assert list(harness.ahead.wanted(node(100), range(54, 55), LONG)) == [58]


async def test_positions_of_many_files_are_bounded(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FILES", 3)
    for inode in range(1, 10):
        harness.ahead.wanted(node(100, inode), range(1, 2), LONG)
    assert harness.ahead.has_reached(node(100, 9), 2)
    assert not harness.ahead.has_reached(node(100, 1), 2), "it was forgotten"


async def test_blocks_ahead_are_fetched_unless_they_are_there(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3 * BLOCK_BYTES + 5)

    async with reading_ahead(tmp_path) as harness:
        version = harness.source.add(b"large", data).version
        file = node(0, mtime_ns=version.mtime_ns)._replace(stat=harness.source.stat(b"large"))
        harness.content.land(ContentKey(file.inode, 2), data[BLOCK_BYTES : 2 * BLOCK_BYTES])
        for block in harness.ahead.wanted(file, range(1, 2), LONG):
            harness.ahead.start(file, block)
    assert harness.counters.totals()["readahead_blocks"] == 2
    assert harness.source.calls["read"] == 2
    assert harness.content.read(ContentKey(100_000, 3)) == data[2 * BLOCK_BYTES : 3 * BLOCK_BYTES]
    assert harness.content.read(ContentKey(100_000, 4)) == data[3 * BLOCK_BYTES :]


async def test_a_block_that_is_being_fetched_is_not_fetched_ahead(tmp_path: Path) -> None:
    async with reading_ahead(tmp_path) as harness:
        harness.source.add(b"large", bytes(3 * BLOCK_BYTES))
        file = node(0)._replace(stat=harness.source.stat(b"large"))
        for _ in range(3):
            harness.ahead.start(file, 2)
            await trio.testing.wait_all_tasks_blocked()
    assert harness.counters.totals()["readahead_blocks"] == harness.source.calls["read"] == 1


async def test_a_fetch_ahead_that_fails_is_no_ones_error(tmp_path: Path) -> None:
    async with reading_ahead(tmp_path) as harness:
        harness.source.fail_next(SourceUnavailable("down"))
        harness.ahead.start(node(3), 2)
        await trio.testing.wait_all_tasks_blocked()
        harness.ahead.start(node(3), 3)
    assert harness.counters.totals()["origin_reads"] == 0
