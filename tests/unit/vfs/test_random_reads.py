"""Which reads of large files bring a piece, and which a block."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fakes import Bare, MemoryContent, MemorySource, bare_filesystem
from spiderfs.errors import SourceTimeout
from spiderfs.linux import steady_clock
from spiderfs.sources.client import SourceLimits
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.store.store import BLOCK_BYTES, ContentKey
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES
from spiderfs.vfs.large_files import Touches
from spiderfs.vfs.rules import Settings

BLOCKS = 40
CONTENT = random.Random(1).randbytes(BLOCKS * BLOCK_BYTES - 1000)
PIECE = 128 << 10
CALLER = Caller(0, 0, 1)


class Harness:
    def __init__(self, source: MemorySource, bare: Bare, inode: int) -> None:
        self.source, self.bare, self.inode = source, bare, inode

    async def brings(self, offset: int, size: int) -> list[int]:
        """Read, compare, and tell the requests and bytes that it took; read-ahead has ended then."""
        before = [self.bare.counters.value(name) for name in ("origin_reads", "origin_bytes")]
        piece = bytes(await self.bare.filesystem.read(self.inode, offset, size))
        assert piece == CONTENT[offset : offset + size]
        self.bare.content.end_read()
        while not self.bare.filesystem.at_rest:
            await trio.sleep(0.001)
        await self.bare.fetcher.drain()
        after = [self.bare.counters.value(name) for name in ("origin_reads", "origin_bytes")]
        return [late - early for early, late in zip(before, after, strict=True)]


@pytest.fixture
@contextlib.asynccontextmanager
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    source, content = MemorySource(), MemoryContent()
    source.add(b"large", CONTENT)
    content.set_capacity(1 << 30)
    settings, limits = Settings(sample_max_bytes=1 << 16), SourceLimits(attempts=1)
    async with bare_filesystem(
        source, content, MemoryRecords(TABLES), tmp_path, settings=settings, limits=limits
    ) as bare:
        entry = await bare.filesystem.lookup(ROOT_INODE, b"large", CALLER)
        yield Harness(source, bare, entry.attributes.inode)


def block(number: float) -> int:
    """Where a block begins, counted from 0."""
    return int(number * BLOCK_BYTES)


async def test_a_block_is_fetched_once_pieces_of_half_of_it_were_read(harness: Harness) -> None:
    for place in (0, 0.5, 0.3, 0.8):
        assert await harness.brings(block(20 + place), PIECE) == [1, PIECE]
        assert await harness.brings(block(30 + place), PIECE // 2) == [1, PIECE // 2]
    assert await harness.brings(block(20.6), PIECE) == [1, BLOCK_BYTES]
    assert await harness.brings(block(20.7), PIECE) == [0, 0]
    assert harness.bare.counters.value("block_reads") == 10
    assert harness.bare.counters.value("block_hits") == 1


async def test_while_ranges_are_learned_pages_come_with_others_and_no_block_is_bought(harness: Harness) -> None:
    window, page = 64 << 10, 4096
    harness.bare.filesystem._read_log.keep(steady_clock.now())
    await touch_half(harness, 20)
    assert await harness.brings(block(20.6), PIECE) == [1, PIECE]
    assert await harness.brings(block(30.5), page) == [1, window]
    for at in (window - page, page, 3 * page):
        assert await harness.brings(block(30.5) + at, page) == [0, 0]
    assert await harness.brings(block(30.5) + window, page) == [1, window]
    # The last window is shorter, and the last page too.
    end = len(CONTENT) // page * page
    assert await harness.brings(end, page) == [1, len(CONTENT) - end // window * window]
    for number in range(128):
        await harness.brings(block(12) + number * window, page)
    assert await harness.brings(block(30.5), page) == [1, window]


async def test_a_block_that_was_evicted_is_touched_again(harness: Harness) -> None:
    await touch_half(harness, 20)
    assert await harness.brings(block(20.6), PIECE) == [1, BLOCK_BYTES]
    harness.bare.content.set_capacity(0)
    harness.bare.content.set_capacity(1 << 30)
    for number in range(40):
        harness.bare.fetcher._transit.put(ContentKey(1, number), bytes(1 << 20))
    await harness.brings(block(5), PIECE)
    assert await harness.brings(block(20.7), PIECE) == [1, PIECE]


async def touch_half(harness: Harness, number: int) -> None:
    """Read four pieces of a block, none where another one has ended."""
    for place in (0.8, 0.5, 0.3, 0):
        assert await harness.brings(block(number + place), PIECE) == [1, PIECE]


async def test_a_read_across_a_border_is_one_request_and_touches_each_block_by_its_part(harness: Harness) -> None:
    for _ in range(4):
        assert await harness.brings(block(20) - PIECE, PIECE + 1000) == [1, PIECE + 1000]
    assert await harness.brings(block(20.5), PIECE) == [1, PIECE]
    assert await harness.brings(block(19), PIECE) == [1, BLOCK_BYTES]


async def test_a_read_across_a_border_fetches_a_piece_of_the_block_that_is_not_there(harness: Harness) -> None:
    assert await harness.brings(block(20), BLOCK_BYTES) == [1, BLOCK_BYTES]
    assert await harness.brings(block(20) - 1000, 3000) == [1, 1000]
    assert await harness.brings(block(21) - 1000, 3000) == [1, 2000]
    assert await harness.brings(block(20) - 1000, BLOCK_BYTES + 3000) == [2, 3000]


async def test_a_reader_in_order_gets_blocks(harness: Harness) -> None:
    assert await harness.brings(0, PIECE) == [2, 2 * BLOCK_BYTES], "with the block behind it"
    for turn in range(4):
        # Each goes on where it stopped, though the other one has read somewhere else meanwhile.
        assert await harness.brings(block(20) + turn * PIECE, PIECE) == [1, PIECE]
        assert await harness.brings(block(30.75) + turn * PIECE, PIECE) == [1, PIECE]
    assert await harness.brings(block(20) + 4 * PIECE, PIECE) == [6, 6 * BLOCK_BYTES], "five times as much ahead"
    assert await harness.brings(block(31.25), PIECE) == [6, 6 * BLOCK_BYTES]
    for turn in range(1, 16):
        await harness.brings(turn * PIECE, PIECE)
    assert await harness.brings(block(2), PIECE) == [1, BLOCK_BYTES], "all that may be is ahead of it"
    assert harness.bare.content.blocks(harness.inode) == 11 + 6 + 6


@pytest.mark.parametrize(
    "offsets",
    [
        # A sample of up to half a MiB, which the kernel asks for in several READs, or by its page faults.
        [block(number + 0.3) + turn * PIECE for number in range(5, 35, 3) for turn in range(4)],
        [block(20) - turn * PIECE for turn in range(4)],
    ],
    ids=["samples of several reads", "backwards"],
)
async def test_who_does_not_read_on_fetches_no_more_than_it_asks_for(harness: Harness, offsets: list[int]) -> None:
    for offset in offsets:
        assert await harness.brings(offset, PIECE) == [1, PIECE]


@pytest.mark.parametrize(
    ("offset", "size", "again"),
    [
        # The kernel asks for the first page alone when a READ has failed.
        pytest.param(block(20) - 1000, 2000, [block(20), block(20) - 1000], id="a piece, and then its block"),
        pytest.param(block(20), BLOCK_BYTES, [block(20)], id="a block, and then a piece of it"),
    ],
)
async def test_what_was_waited_for_in_vain_is_not_waited_for_again(
    harness: Harness, offset: int, size: int, again: list[int]
) -> None:
    harness.source.fail_next(SourceTimeout("too late"))
    with pytest.raises(SourceTimeout):
        await harness.brings(offset, size)
    for place in again:
        with pytest.raises(SourceTimeout, match="just left this unanswered"):
            await harness.brings(place, 100)
    assert harness.source.calls["read"] == 1


@given(inode=st.integers(1, 1 << 62), position=st.integers(0, 1 << 62))
def test_touches_know_what_was_noted_last(inode: int, position: int) -> None:
    touches = Touches()
    assert touches.in_a_row(inode, position, position + 5) == 0
    assert touches.in_a_row(inode, position + 5, position + 8) == 5
    assert touches.in_a_row(inode, position + 8, position + 9) == 8
    key = ContentKey(inode, position)
    touches.touch(key, 5)
    touches.touch(key, 7)
    assert touches.touched_bytes(key) == 12
    assert touches.touched_bytes(ContentKey(inode, position + 1)) == 0
    touches.forget(key)
    assert touches.touched_bytes(key) == 0
