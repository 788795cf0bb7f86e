"""Which inodes the kernel reads by itself, with a kernel that only remembers what it was told."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from benchmarks.fakes import MemoryContent, MemorySource, bare_filesystem
from spiderfs.core.events import HIT
from spiderfs.fuse import wire
from spiderfs.fuse.passthrough import LINGER_S, Passthrough
from spiderfs.shared.layout import RunLayout
from spiderfs.sources.source import SourceStat
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.store.store import BLOCK_BYTES
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES
from spiderfs.vfs.large_files import PASSED_BLOCKS, PASSED_PAUSE_S

WHOLE, PARTIAL = 11, 12


class Kernel:
    """Numbers the files that it is given; `refuses` is what it says to the next one."""

    def __init__(self) -> None:
        self.open: dict[int, int] = {}
        self.registered = 0
        self.refuses: int | None = None

    def register(self, fd: int) -> int:
        if self.refuses is not None:
            raise OSError(self.refuses, os.strerror(self.refuses))
        self.registered += 1
        self.open[self.registered] = os.fstat(fd).st_ino
        return self.registered

    def give_up(self, number: int) -> None:
        del self.open[number]


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    (tmp_path / "run").mkdir()
    return RunLayout(tmp_path / "run")


class Plain:
    """All files are whole but those of `partial`."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._path = path
        self.partial = {PARTIAL}
        self.opened: list[int] = []

    def is_whole(self, inode: int) -> bool:
        return inode not in self.partial

    def plain_file(self, inode: int) -> int | None:
        if inode in self.partial:
            return None
        self.opened.append(os.open(self._path, os.O_RDONLY))
        return self.opened[-1]


@pytest.fixture
def plain_files(tmp_path: Path) -> Iterator[Plain]:
    plain_files = Plain(tmp_path / "plain")
    yield plain_files
    for fd in plain_files.opened:
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.fstat(fd)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_handle_decides_for_those_beside_it(kernel: Kernel, run: RunLayout, plain_files: Plain) -> None:
    clock = Clock()
    book = Passthrough(kernel, plain_files, run, clock)
    assert book.opened(WHOLE, may_begin=False) == 0
    assert book.opened(WHOLE, may_begin=True) == 1
    plain_files.partial.add(WHOLE)
    assert book.opened(WHOLE, may_begin=False) == 1, "evicted or not, all handles are of one kind"
    assert kernel.registered == 1
    book.closed(WHOLE)
    clock.now += LINGER_S
    book.tidy()
    assert kernel.open == {}
    assert book.opened(WHOLE, may_begin=True) == 0
    plain_files.partial.clear()
    assert book.opened(WHOLE, may_begin=True) == 2


def test_who_comes_back_soon_finds_it_as_it_was(kernel: Kernel, run: RunLayout, plain_files: Plain) -> None:
    clock = Clock()
    book = Passthrough(kernel, plain_files, run, clock)
    for _ in range(5):
        assert book.opened(WHOLE, may_begin=True) == 1
        clock.now += 10 * LINGER_S
        book.tidy()
        assert list(kernel.open) == [1], "it is open"
        book.closed(WHOLE)
        clock.now += LINGER_S / 2
        book.tidy()
    assert kernel.registered == 1
    # Evicted while no one had it open.
    plain_files.partial.add(WHOLE)
    assert book.opened(WHOLE, may_begin=True) == 0
    assert kernel.open == {}
    assert list(run.directory.iterdir()) == []


async def test_no_one_has_to_tidy_while_nothing_lingers(kernel: Kernel, run: RunLayout, plain_files: Plain) -> None:
    clock = Clock()
    book = Passthrough(kernel, plain_files, run, clock)
    with trio.fail_after(20):
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(book.lingers)
                assert book.opened(WHOLE, may_begin=True)
                await trio.testing.wait_all_tasks_blocked()
                assert len(nursery.child_tasks) == 1
                book.closed(WHOLE)
            await book.lingers()
            clock.now += LINGER_S
            book.tidy()
            assert kernel.open == {}


def test_only_so_many_are_left_registered(kernel: Kernel, run: RunLayout, plain_files: Plain) -> None:
    book = Passthrough(kernel, plain_files, run, Clock())
    for inode in range(1000, 2000):
        assert book.opened(inode, may_begin=True)
        book.closed(inode)
    assert 100 < len(kernel.open) < 500
    assert max(kernel.open) == 1000, "the last ones"


def test_what_is_not_whole_is_cached(kernel: Kernel, run: RunLayout, plain_files: Plain) -> None:
    book = Passthrough(kernel, plain_files, run)
    assert book.opened(PARTIAL, may_begin=True) == 0
    book.closed(PARTIAL)
    assert kernel.registered == 0


@pytest.mark.parametrize("number", [errno.EPERM, errno.ELOOP, errno.ENOTTY])
def test_a_kernel_that_refuses_is_asked_once(
    kernel: Kernel, run: RunLayout, plain_files: Plain, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    book = Passthrough(kernel, plain_files, run)
    kernel.refuses = number
    with caplog.at_level(logging.INFO):
        assert book.opened(WHOLE, may_begin=True) == 0
        kernel.refuses = None
        assert book.opened(WHOLE, may_begin=True) == 0
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert list(run.directory.iterdir()) == []


def test_a_successor_answers_as_the_one_before_it(kernel: Kernel, run: RunLayout, plain_files: Plain) -> None:
    clock = Clock()
    before = Passthrough(kernel, plain_files, run, clock)
    assert before.opened(WHOLE, may_begin=True) == 1
    assert before.opened(99, may_begin=True) == 2
    before.closed(99)
    clock.now += LINGER_S
    before.tidy()
    after = Passthrough(kernel, plain_files, run)
    assert after.opened(WHOLE, may_begin=False) == 1
    assert after.opened(99, may_begin=False) == 0
    assert list(kernel.open) == [1]


def test_what_a_successor_could_not_learn_of_is_not_begun(kernel: Kernel, run: RunLayout, plain_files: Plain) -> None:
    book = Passthrough(kernel, plain_files, run)
    run.directory.rmdir()
    assert book.opened(WHOLE, may_begin=True) == 0
    assert kernel.open == {}


# -- what is agreed on with the kernel

EXT, PASSTHROUGH = 1 << 30, 1 << 5


def agreed(flags: int, flags2: int) -> tuple[int, int, int]:
    """Flags, further flags, and stack depth of the answer to an offer."""
    offer = wire._INIT_IN.pack(7, 45, 1 << 17, flags, flags2) + bytes(44)
    answer = wire.init_out(memoryview(offer))
    assert len(answer) == 64
    fields = wire._INIT_OUT.unpack(answer)
    return fields[3], fields[10], fields[11]


def test_passthrough_is_taken_where_it_is_offered() -> None:
    taken, further, depth = agreed(0xFFFFFFFF, 0xFFFFFFFF)
    assert taken & EXT
    assert (further, depth) == (PASSTHROUGH, 1)


def test_nothing_is_taken_that_was_not_offered() -> None:
    assert agreed(0, 0xFFFFFFFF) == (0, 0, 0)
    taken, further, depth = agreed(0xFFFFFFFF & ~EXT, PASSTHROUGH)
    assert not taken & EXT
    assert (further, depth) == (0, 0)
    assert agreed(EXT, 0) == (EXT, 0, 0)


# -- what the policies are told


class Whole(MemoryContent):
    def whole(self, inode: int, size: int) -> bool:
        return True


class Heard:
    """The blocks of each event that was noted."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.sizes: set[int] = set()

    def record_access(
        self,
        inode: int,
        size: int,
        where: int,
        pid: int,
        block: int = 0,
        trainer: int = 0,
        wanted: int = 0,
        at_s: float = 0.0,
        waited_us: int = 0,
    ) -> None:
        assert where == HIT
        self.blocks.append(block)
        self.sizes.add(size)


async def test_policies_hear_of_every_block_but_not_too_often_nor_of_too_many(tmp_path: Path) -> None:
    records = MemoryRecords(TABLES)
    blocks = PASSED_BLOCKS + 10
    size = blocks * BLOCK_BYTES - 5
    heard, now = Heard(), 100.0
    async with bare_filesystem(MemorySource(), Whole(), records, tmp_path, events=heard, clock=lambda: now) as bare:
        found = SourceStat(stat.S_IFREG | 0o644, 0, 0, size, 1)
        inode = bare.catalogue.record(ROOT_INODE, b"f", found, 0.0).inode
        for _ in range(5):
            bare.filesystem.large_files.passed_through(inode)
        assert heard.blocks == list(range(1, PASSED_BLOCKS + 1))
        now += PASSED_PAUSE_S
        bare.filesystem.large_files.passed_through(inode)
        assert heard.blocks[PASSED_BLOCKS:][:11] == [*range(PASSED_BLOCKS + 1, blocks + 1), 1]
        assert heard.sizes == {BLOCK_BYTES, BLOCK_BYTES - 5}
        bare.filesystem.large_files.passed_through(99)


class OnABrokenDisk(RunLayout):
    def backing_files(self) -> Iterator[tuple[int, int]]:
        raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))


def test_where_a_predecessors_notes_cannot_be_read_no_file_is_passed_through(
    kernel: Kernel, plain_files: Plain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = Passthrough(kernel, plain_files, OnABrokenDisk(tmp_path))
    assert "cannot be read" in caplog.text
    assert book.opened(WHOLE, may_begin=True) == 0
