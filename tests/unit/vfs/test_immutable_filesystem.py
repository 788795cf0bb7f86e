"""What a READ and a GETATTR do where the kernel opens files without asking."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from benchmarks.common.sources import patterned
from benchmarks.fakes import Bare, FakeKernel, MemoryContent, MemorySource, bare_filesystem
from spiderfs.core.events import FETCHED, HIT, PUSHED, UNREAD, UNSTORED
from spiderfs.errors import SourceUnavailable, Stale
from spiderfs.linux.process_table import started_at
from spiderfs.shared.published import Attached
from spiderfs.shared.shared_memory import SharedSlots
from spiderfs.sources.client import SourceLimits
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.store.store import ContentKey
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.catalogue import PROVISIONAL, ROOT_INODE, TABLES
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.redirects import redirect_row
from spiderfs.vfs.rules import FOREVER_S, Settings
from spiderfs.views.recipe import Recipe
from spiderfs.views.tree import Forms, ViewSource

CALLER = Caller(0, 0, os.getpid())
PUSHER = Caller(0, 0, os.getppid())
LIST, TRAINER = 3, 7
VIEW = b"a view"
LARGE = patterned(0, 256 << 10)
SETTINGS = Settings(ttl_s=FOREVER_S, sample_max_bytes=1 << 16, checks_permissions=True)


class Events:
    def __init__(self) -> None:
        self.noted: list[tuple[int, int, int, int]] = []
        self.asked_s: list[float] = []

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
        self.noted.append((inode, where, trainer, wanted))
        self.asked_s.append(at_s)

    def flush(self) -> None:
        pass


class Harness:
    """`x` and `h` are two files; what is asked of the file system is asked by this thread."""

    def __init__(self, source: MemorySource, kernel: FakeKernel, bare: Bare, events: Events, records: MemoryRecords):
        self.source, self.kernel, self.bare, self.events, self.records = source, kernel, bare, events, records
        self.fs = bare.filesystem

    async def lookup(self, name: bytes) -> int:
        return (await self.fs.lookup(ROOT_INODE, name, CALLER)).attributes.inode

    async def read(self, inode: int, offset: int = 0, size: int = 100, caller: Caller = CALLER) -> bytes:
        piece = bytes(await self.fs.read_immutable(inode, offset, size, caller))
        self.bare.content.end_read()
        await self.bare.fetcher.drain()
        return piece

    def attach(self, lists: tuple[int, ...] = (LIST,), sends_batches: bool = True) -> None:
        trainer = Attached(TRAINER, os.getpid(), started_at(os.getpid()), lists, sends_batches)
        self.bare.redirects.set_trainers([trainer], "trainer")

    def redirect(self, wanted: int, given: int) -> None:
        self.records.put([redirect_row(LIST, wanted, given)])


class Makers:
    """All views are the same."""

    def make(self, original: bytes, recipe: Recipe) -> bytes:
        return VIEW

    def close(self) -> None:
        pass


@pytest.fixture
def forms() -> Forms | None:
    return None


@pytest.fixture
@contextlib.asynccontextmanager
async def harness(tmp_path: Path, forms: Forms | None) -> AsyncIterator[Harness]:
    source, content, records = MemorySource(), MemoryContent(), MemoryRecords(TABLES)
    source.add(b"x", b"content of x")
    source.add(b"h", b"content of h, longer")
    source.add(b"large", LARGE)
    content.set_capacity(1 << 20)
    kernel, events, threads = FakeKernel(), Events(), SharedSlots(1024)
    threads.replace([PUSHER.pid])
    longest = SETTINGS.sample_max_bytes
    shown = ViewSource(source, forms, Makers(), longest, lambda name: None) if forms else source
    async with bare_filesystem(
        shown, content, records, tmp_path, settings=SETTINGS, limits=SourceLimits(attempts=1), events=events,
        alone=True, immutable=kernel, pusher_threads=threads, forms=forms,
    ) as bare:  # fmt: skip
        yield Harness(source, kernel, bare, events, records)


VIEWS = Forms({"v": Recipe("bmp", 64)}, "v")
AS_VIEWS = pytest.mark.parametrize("forms", [VIEWS], ids=["views"])


async def test_the_first_read_fetches_all_of_a_small_file_and_counts_as_an_open(harness: Harness) -> None:
    x = await harness.lookup(b"x")
    assert await harness.read(x, 8, 4) == b"of x", "this one is no open"
    assert harness.events.noted == []
    assert await harness.read(x, 0, 7) == b"content"
    assert await harness.read(x) == b"content of x"
    assert harness.events.noted == [(x, HIT, 0, x)] * 2
    h = await harness.lookup(b"h")
    assert await harness.read(h, 0, 7) == b"content"
    assert harness.events.noted[2:] == [(h, FETCHED, 0, h)]
    assert harness.source.calls["read"] == 2
    counters = harness.bare.counters
    assert (counters.value("opens"), counters.value("opens_hit"), counters.value("reads")) == (3, 2, 4)


async def test_an_open_is_of_the_time_at_which_the_reader_asked(harness: Harness) -> None:
    """Who has read the bytes may say so before they have landed, and before the news of the open."""
    read, read_at_s = harness.source.read, []

    def noting(*question: Any) -> bytes:
        read_at_s.append(time.time())
        return read(*question)

    harness.source.read = noting  # type: ignore[method-assign]
    await harness.read(await harness.lookup(b"x"))
    (asked_s,) = harness.events.asked_s
    assert 0 < asked_s <= read_at_s[0]


async def test_errors_of_the_source_are_those_of_the_read(harness: Harness) -> None:
    x = await harness.lookup(b"x")
    harness.source.fail_next(SourceUnavailable("the source is away"))
    # The kernel sends a READ that has failed once more, on behalf of the same call.
    for _ in range(2):
        with pytest.raises(SourceUnavailable, match="the source is away"):
            await harness.read(x)
    assert harness.source.calls["read"] == 1
    assert harness.kernel.doubted == []
    assert await harness.read(x) == b"content of x"


async def test_a_failure_is_no_other_reader_s(harness: Harness) -> None:
    x = await harness.lookup(b"x")
    harness.source.fail_next(SourceUnavailable("the source is away"))
    with pytest.raises(SourceUnavailable):
        await harness.read(x)
    other = Caller(0, 0, os.getpid() + 1)
    assert bytes(await harness.fs.read_immutable(x, 0, 100, other)) == b"content of x"


async def test_a_changed_file_is_doubted_and_looked_up_again(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    x = await harness.lookup(b"x")
    assert (await harness.fs.getattr(x, is_open=False)).timeout_s == FOREVER_S
    harness.source.change(b"x", b"another content")
    for _ in range(3):
        with pytest.raises(Stale):
            await harness.read(x)
    assert harness.kernel.doubted == [x] * 3
    with pytest.raises(Stale):
        await harness.fs.getattr(x, is_open=False)
    known = await harness.fs.getattr(x, is_open=True)
    assert (known.size, known.timeout_s) == (12, 0.0), "who has it open goes on, and the next open asks"
    newer = await harness.lookup(b"x")
    assert newer != x
    assert await harness.read(newer) == b"another content"
    assert (await harness.fs.getattr(newer, is_open=False)).timeout_s == FOREVER_S
    with pytest.raises(Stale):
        await harness.fs.getattr(x, is_open=False)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("x has changed at the source, but the mount is `immutable`")


async def test_an_inode_that_is_not_known_any_more_is_doubted(harness: Harness) -> None:
    with pytest.raises(Stale):
        await harness.read(70_001)
    assert harness.kernel.doubted == [70_001]
    with pytest.raises(Stale):
        await harness.fs.getattr(70_001, is_open=False)


async def test_a_trainers_substitute_is_reported_at_the_look_up_and_once(harness: Harness) -> None:
    x, h = await harness.lookup(b"x"), await harness.lookup(b"h")
    assert await harness.read(h) == b"content of h, longer"
    harness.attach()
    harness.redirect(x, h)
    harness.events.noted.clear()
    for _ in range(2):  # the kernel looks up twice where it had trusted otherwise
        given = await harness.fs.lookup(ROOT_INODE, b"x", CALLER)
        assert (given.attributes.inode, given.timeout_s) == (h, 0.0)
    assert harness.events.noted == [(h, HIT, TRAINER, x)]
    assert await harness.read(h) == b"content of h, longer"
    assert harness.events.noted[1:] == [(h, HIT, 0, h)], "no one's: it was told"
    assert harness.bare.counters.value("redirects") == 1
    # The next epoch: whether the bytes come from the page cache is not known.
    await harness.lookup(b"large")
    await harness.lookup(b"x")
    assert harness.events.noted[2:] == [(h, HIT, TRAINER, x)]
    # What it is given as itself is its own.
    await harness.lookup(b"h")
    assert await harness.read(h) == b"content of h, longer"
    assert harness.events.noted[3:] == [(h, HIT, TRAINER, h)]


@pytest.mark.parametrize("is_known", [True, False], ids=["looked up since", "found out by a read"])
async def test_a_version_that_was_superseded_is_no_substitute(harness: Harness, is_known: bool) -> None:
    x, h = await harness.lookup(b"x"), await harness.lookup(b"h")
    await harness.read(h)
    harness.attach()
    harness.redirect(x, h)
    assert await harness.lookup(b"x") == h
    harness.source.change(b"h", b"another h")
    harness.bare.catalogue.expire(b"h")
    if is_known:
        assert await harness.lookup(b"h") != h
    # Its bytes are there still, and may be gone before they are read.
    assert await harness.lookup(b"x") == x
    assert await harness.read(x) == b"content of x"


async def test_while_trainers_may_be_given_substitutes_no_name_is_trusted(harness: Harness) -> None:
    async def trusted() -> set[float]:
        listed = await harness.fs.readdir((await harness.fs.opendir(ROOT_INODE)).handle, 0, 100)
        entries = [await harness.fs.lookup(ROOT_INODE, name, CALLER) for name in (b"x", b"large")]
        return {entry.timeout_s for entry in entries} | {entry.timeout_s for _, entry, _ in listed}

    assert min(await trusted()) > FOREVER_S - 60
    harness.attach(lists=(), sends_batches=False)
    assert min(await trusted()) > FOREVER_S - 60, "it only plans"
    harness.attach(lists=())
    assert await trusted() == {0.0}, "it will be given some"
    harness.attach()
    assert await trusted() == {0.0}
    harness.bare.redirects.set_trainers([], "trainer")
    assert min(await trusted()) > FOREVER_S - 60


async def test_what_is_pushed_ahead_is_fetched_and_counts_for_no_reader(harness: Harness) -> None:
    x, h = await harness.lookup(b"x"), await harness.lookup(b"h")
    assert await harness.read(x, 0, 8, PUSHER) == b"content "
    assert await harness.read(x, 0, 8, PUSHER) == b"content "
    harness.source.fail_next(SourceUnavailable("the source is away"))
    with pytest.raises(SourceUnavailable):
        await harness.read(h, caller=PUSHER)
    harness.source.change(b"h", b"another content")
    with pytest.raises(Stale):
        await harness.read(h, caller=PUSHER)
    assert await harness.read(x, 8, 4, PUSHER) == b"of x", "of a file's READs only the first is told"
    pushed = [(x, FETCHED | PUSHED), (x, HIT | PUSHED), (h, UNREAD | PUSHED), (h, UNREAD | PUSHED)]
    assert harness.events.noted == [(inode, where, 0, 0) for inode, where in pushed]
    counters = harness.bare.counters
    assert (counters.value("opens"), counters.value("stall_microseconds")) == (0, 0)
    assert await harness.read(x) == b"content of x"
    assert (counters.value("opens"), counters.value("opens_hit")) == (1, 1)


async def test_a_fetch_is_reported_once_however_many_reads_wait_for_it(harness: Harness) -> None:
    x = await harness.lookup(b"x")
    async with trio.open_nursery() as nursery:
        # The READs of one file may come in any order.
        for offset in (8, 0, 4):
            nursery.start_soon(harness.read, x, offset, 4, PUSHER)
    assert [where for _, where, _, _ in harness.events.noted if where != HIT | PUSHED] == [FETCHED | PUSHED]
    assert harness.source.calls["read"] == 1


async def test_what_another_process_fetched_is_a_hit_here(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    x = await harness.lookup(b"x")
    hold = FetchLock.try_hold

    def landed_meanwhile(lock: FetchLock, key: ContentKey) -> bool:
        harness.bare.content.land(key, b"content of x")
        return hold(lock, key)

    monkeypatch.setattr(FetchLock, "try_hold", landed_meanwhile)
    assert await harness.read(x, 0, 8, PUSHER) == b"content "
    assert harness.events.noted == [(x, HIT | PUSHED, 0, 0)]
    assert harness.source.calls["read"] == 0


@AS_VIEWS
@pytest.mark.parametrize("gives", [False, True], ids=["", "while substitutes are given"])
async def test_a_pushers_look_up_finds_out_the_size_of_a_view_for_no_reader(harness: Harness, gives: bool) -> None:
    if gives:
        harness.attach()
    found = (await harness.fs.lookup(ROOT_INODE, b"x", PUSHER)).attributes
    assert found.size == len(VIEW)
    assert harness.events.noted == [(found.inode, FETCHED | PUSHED, 0, 0)]
    assert await harness.read(found.inode, caller=PUSHER) == VIEW
    assert harness.events.noted[1:] == [(found.inode, HIT | PUSHED, 0, 0)]
    assert await harness.read(found.inode) == VIEW
    counters = harness.bare.counters
    assert (counters.value("opens"), counters.value("opens_hit")) == (1, 1)
    assert counters.value("stall_microseconds") == 0
    assert harness.source.calls["read"] == 1


@AS_VIEWS
async def test_who_has_opened_a_young_version_reads_the_original_when_its_view_was_made(harness: Harness) -> None:
    """The kernel goes on with the number of the provisional version, and would cut it off at the size of the view."""
    await harness.fs.opendir(ROOT_INODE)
    for name, is_made in ((b"x", True), (b"h", False)):
        known = harness.bare.catalogue.find(ROOT_INODE, name)
        content, young = harness.source.read(name, 0, 100, known.stat.version), known.inode | PROVISIONAL
        if is_made:
            assert await harness.lookup(name) == known.inode
        for caller in (CALLER, PUSHER):
            assert (await harness.fs.getattr(young)).size == len(content)
            assert await harness.read(young, caller=caller) == content
        # The manager waits for what it has had pushed.
        assert harness.events.noted[-1] == (known.inode, UNSTORED | PUSHED, 0, 0)
        assert await harness.read(await harness.lookup(name)) == VIEW
        assert (await harness.fs.getattr(known.inode)).size == len(VIEW)


async def test_a_version_that_is_young_again_has_the_size_of_the_original(tmp_path: Path) -> None:
    """The clock was set back after the view was made: the file is shown as it is, and all of it."""
    source, content, ahead_s = MemorySource(), MemoryContent(), 3600.0
    source.add(b"x", b"content of x", mtime_ns=time.time_ns())
    content.set_capacity(1 << 20)
    shown = ViewSource(source, VIEWS, Makers(), SETTINGS.sample_max_bytes, lambda name: None)
    async with bare_filesystem(
        shown, content, MemoryRecords(TABLES), tmp_path, settings=SETTINGS, forms=VIEWS,
        clock=lambda: time.time() + ahead_s,
    ) as bare:  # fmt: skip
        await bare.filesystem.opendir(ROOT_INODE)
        entry = await bare.filesystem.lookup(ROOT_INODE, b"x", CALLER)
        assert entry.attributes.size == len(VIEW)
        ahead_s = 0.0
        entry = await bare.filesystem.lookup(ROOT_INODE, b"x", CALLER)
        assert entry.attributes.inode & PROVISIONAL
        assert entry.attributes.size == len(b"content of x")


async def test_what_is_pushed_ahead_is_no_substitute(harness: Harness) -> None:
    x, h = await harness.lookup(b"x"), await harness.lookup(b"h")
    await harness.read(h)
    harness.attach()
    harness.redirect(x, h)
    parent = Attached(TRAINER, PUSHER.pid, started_at(PUSHER.pid), (LIST,), True)
    harness.bare.redirects.set_trainers([parent], "trainer")
    found = await harness.fs.lookup(ROOT_INODE, b"x", PUSHER)
    assert (found.attributes.inode, found.timeout_s) == (x, 0.0)
    assert (await harness.fs.lookup(ROOT_INODE, b"x", CALLER)).attributes.inode == h
