"""What is pushed ahead, how much of it, and what becomes of the orders; without a process that pushes."""

from __future__ import annotations

import errno
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from waiting import eventually

from benchmarks.fakes import MemoryContent
from spiderfs.core.events import FETCHED, FORGOTTEN, HIT, PUSHED, REFUSED, UNREAD, UNSTORED, Access
from spiderfs.core.plans.fetch_limits import Concurrency
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.plans.schedule import PlannedReader
from spiderfs.daemon.caching import push_ahead
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.planned_reads import Chunk
from spiderfs.daemon.caching.prefetch_backend import Admission, Done, PrefetchResult
from spiderfs.daemon.caching.push_ahead import PushAhead
from spiderfs.daemon.caching.push_ahead import Pusher as Pushing
from spiderfs.daemon.caching.push_process import IN_MEMORY
from spiderfs.linux import steady_clock
from spiderfs.linux.mounts import Mount
from spiderfs.metrics import SharedCounters
from spiderfs.options.model import Options
from spiderfs.shared.shared_memory import SharedSlots
from spiderfs.sources.source import SourceStat
from spiderfs.vfs.catalogue import Node

SIZE, FILES, MOST_BYTES = 1000, 100, 10_000


class Pusher:
    """In place of the process: takes orders."""

    def __init__(self) -> None:
        self.ready = self.takes = True
        self.broken = False
        self.ordered: list[int] = []
        self.sent = 0

    def need(self) -> None:
        pass

    def order(self, number: int, path: bytes) -> None:
        assert path == b"%d" % number
        self.ordered.append(number)

    def send(self) -> list[int]:
        refused = [] if self.takes else self.ordered[self.sent :]
        self.sent = len(self.ordered)
        return refused


class Together:
    """In place of the backend that fetches into the store: fetches chunks of two, when the test says so."""

    def __init__(self) -> None:
        self.concurrency = Concurrency(2)
        self.has_neighbours = self.pushes = False
        self.given: list[int] = []
        self.begun: list[int] = []
        self.since = -1
        self.done: Done | None = None
        self.resident: set[int] = set()

    def is_resident(self, inode: int) -> bool:
        return inode in self.resident

    def chunk(
        self,
        node: Node,
        reader: PlannedReader,
        since: int,
        is_resident: Callable[[int], bool],
        concurrency: Concurrency,
    ) -> Chunk | None:
        self.since = since
        beside = node._replace(inode=node.inode + 1)
        if not self.has_neighbours or is_resident(beside.inode):
            return None
        return SimpleNamespace(nodes=[node, beside])  # type: ignore[return-value]

    def begin(self, chunk: Chunk, reader: PlannedReader, done: Done, push: bool = False) -> int:
        (self.given if push else self.begun).extend(node.inode for node in chunk.nodes)
        self.done = done
        return sum(node.stat.size for node in chunk.nodes)


class Harness:
    def __init__(self, directory: Path, most: int = 8, size: int = SIZE, order: Sequence[int] = range(FILES)) -> None:
        self.counters = SharedCounters(1).row(0)
        self.cache = CacheControl(MemoryContent(), "minio", 0.5, self.counters)
        self.cache.restore(1 << 30, None)
        options = Options(source=directory, mountpoint=directory, cache_dir=directory, source_timeout_s=30)
        self.pushed = SharedSlots(1 << 16)
        self.passing = SharedSlots(1 << 12)
        threads = SharedSlots(1024)
        self.together = Together()
        shared = threads, self.pushed, self.passing, self.counters
        together: Any = self.together
        self.backend = PushAhead(options, *shared, self.cache, most, lambda: False, together, MOST_BYTES)
        self.pusher = Pusher()
        self.backend._pusher = self.pusher  # type: ignore[assignment]
        self.size = size
        inodes = [*range(1, FILES + 1)]
        places = {inode: place for place, inode in enumerate(inodes)}
        epoch = PlannedEpoch(0, inodes, places, np.array(order, np.uint32))
        self.reader = PlannedReader(epoch, 0.0)
        self.done: list[tuple[int, PrefetchResult]] = []
        self.look()

    def node(self, inode: int) -> Node:
        found = SourceStat(stat.S_IFREG | 0o644, 0, 0, self.size, 0)
        return Node(inode, b"%d" % inode, found)

    def look(self, again: bool = False) -> None:
        self.backend.look((self.reader,), again=again, idle=False)

    def prefetch(self, position: int, reader: PlannedReader | None = None, inode: Any = None) -> None:
        """Have the file at this position of the plan prefetched; `inode`: that at a position of a later epoch."""
        reader = reader or self.reader
        inode = inode or reader.epoch.key(position)
        self.backend.prefetch(
            self.node(inode), reader, position, lambda node, reader, result: self.done.append((node.inode, result))
        )

    def push(self, files: int) -> list[int]:
        """Bring the next files, as many as there is room for, like the prefetcher."""
        before = len(self.pusher.ordered)
        for position in range(before, before + files):
            if not self.backend.has_room() or self.backend.judge(self.node(position + 1)) is not Admission.PREFETCH:
                break
            self.prefetch(position)
        self.backend.send()
        return self.pusher.ordered[before:]

    def comes(self, inode: int, where: int | None, **told: Any) -> None:
        """What was to be fetched into the store has come, or has failed."""
        self.together.done(self.node(inode), self.reader, PrefetchResult(where, SIZE, 0.1, **told))

    def tell(self, *inodes: int, where: int = FETCHED | PUSHED) -> list[int]:
        accesses = [Access(time.time(), inode, inode, self.size, 0, 0, 0, where) for inode in inodes]
        return [inode for inode, _ in self.backend.on_events(accesses)]


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_so_many_wait_for_the_source_and_the_next_goes_when_one_has_come(harness: Harness) -> None:
    assert harness.push(20) == [*range(1, 9)]
    assert harness.backend.under_way == 8
    assert harness.tell(3, 5) == []
    assert [(inode, found.where, found.size) for inode, found in harness.done] == [
        (3, FETCHED, SIZE),
        (5, FETCHED, SIZE),
    ]
    assert harness.push(20) == [9, 10]


def test_no_more_bytes_wait_for_their_reader_than_the_limit(harness: Harness) -> None:
    for _ in range(5):
        harness.tell(*harness.push(20))
    assert harness.pusher.ordered == [*range(1, 11)]
    harness.reader.progressed(4, 4, 0.0)
    harness.look()
    harness.tell(*harness.push(20))
    assert harness.pusher.ordered == [*range(1, 15)]
    # The plan is gone, and with it everything that waited for its reader.
    harness.backend.look((), again=False, idle=False)
    assert harness.backend.judge(harness.node(1)) is Admission.PREFETCH


def test_what_was_read_sooner_than_it_was_pushed_for_waits_no_more(harness: Harness) -> None:
    harness.reader.exchanges = True
    for position in range(50, 58):
        harness.prefetch(position)
        harness.tell(position + 1)
    assert harness.backend.waiting_bytes == 8 * SIZE
    for position in range(6):
        harness.reader.epoch.swap(position, 50 + position)
    harness.reader.progressed(6, 6, 0.0)
    harness.look()
    # The other job has ended; what has changed places stays so.
    harness.reader.exchanges = False
    harness.look(again=True)
    assert harness.backend.waiting_bytes == 2 * SIZE
    harness.reader.progressed(58, 58, 0.0)
    harness.look()
    assert harness.backend.waiting_bytes == 0


def test_what_is_stored_is_pushed_without_waiting_for_the_source(harness: Harness) -> None:
    harness.cache.engine.members = dict.fromkeys(range(1, 6))  # type: ignore[misc]
    assert harness.push(5) == [1, 2, 3, 4, 5]
    assert harness.backend.under_way == 0
    harness.tell(1, where=HIT | PUSHED)
    ((inode, found),) = harness.done
    assert (inode, found.fetched, found.failed) == (1, False, False)


@pytest.mark.parametrize(
    ("where", "fetched", "failed"),
    [(REFUSED | PUSHED, True, False), (UNREAD | PUSHED, False, True), (HIT, False, False)],
    ids=["no room in the store", "not read", "its reader was quicker"],
)
def test_what_became_of_an_order_is_what_workers_tell(
    harness: Harness, where: int, fetched: bool, failed: bool
) -> None:
    harness.push(1)
    harness.tell(1, where=where)
    ((_, found),) = harness.done
    assert (found.fetched, found.failed) == (fetched, failed)
    assert harness.backend.under_way == 0
    assert harness.counters.value("pushed") == (where == REFUSED | PUSHED)


@pytest.mark.parametrize(("outcome", "failed"), [(IN_MEMORY, False), (errno.ENOENT, True), (errno.EXDEV, True)])
def test_what_the_kernel_is_not_asked_for_the_process_reports(harness: Harness, outcome: int, failed: bool) -> None:
    harness.push(1)
    harness.backend._answered(1, outcome)
    harness.backend._answered(77, outcome)
    ((_, found),) = harness.done
    assert (found.where, found.failed) == (None if failed else HIT, failed)
    assert harness.backend.able


def test_what_lands_without_an_order_is_not_forgotten(harness: Harness) -> None:
    assert harness.tell(7, 8) == [7, 8]
    assert harness.tell(9, where=HIT | PUSHED) == []
    assert harness.tell(9, where=FETCHED) == [], "a reader's"


def test_a_file_whose_size_had_to_be_found_out_is_pushed_once(harness: Harness) -> None:
    harness.push(1)
    harness.tell(1, where=FETCHED | PUSHED)
    harness.tell(1, where=HIT | PUSHED)
    assert [(inode, found.where) for inode, found in harness.done] == [(1, FETCHED)]
    assert harness.counters.value("pushed") == 1


def test_a_file_that_another_read_than_the_first_one_fetched_is_pushed_once_and_for_its_reader(
    harness: Harness,
) -> None:
    harness.push(1)
    harness.tell(1, where=HIT | PUSHED)
    access = Access(time.time(), 1, 1, SIZE, 0, 0, 0, FETCHED | PUSHED)
    assert list(harness.backend.on_events([access])) == [(1, harness.reader)]
    assert harness.counters.value("pushed") == 1


def test_a_process_that_dies_lets_go_of_its_orders_and_the_next_begins_again(harness: Harness) -> None:
    harness.push(5)
    harness.backend._lost()
    assert [found.failed for _, found in harness.done] == [False] * 5
    assert (harness.backend.under_way, harness.backend.looks_again) == (0, True)
    harness.look(again=True)
    assert not harness.backend.looks_again
    harness.pusher.ordered.clear()
    assert len(harness.push(5)) == 5


def test_an_order_that_no_one_reports_is_given_up(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.push(3)
    harness.look(again=True)
    assert harness.backend.under_way == 3
    later_s = steady_clock.now() + 60
    monkeypatch.setattr(steady_clock, "now", lambda: later_s)
    harness.look(again=True)
    assert harness.backend.under_way == 0
    assert all(found.failed for _, found in harness.done)


async def test_without_a_process_samples_are_fetched_into_the_store(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert harness.backend.able
    harness.pusher.broken = True
    assert not harness.backend.able
    lost: list[None] = []
    process = Pushing(tmp_path, 1, SharedSlots(1024), 30.0, lambda number, outcome: None, lambda: lost.append(None))
    monkeypatch.setattr(push_ahead, "mounted_at", lambda path: Mount("", path, "", "0:1"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    async with trio.open_nursery() as nursery:
        process.need()
        nursery.start_soon(process.run)
        await eventually(lambda: process.broken)
        nursery.cancel_scope.cancel()
    assert not process.ready
    assert "cannot start the process that pushes files ahead" in caplog.text


def test_a_sample_in_the_page_cache_takes_no_room_from_one_that_is_yet_to_be_read(harness: Harness) -> None:
    engine = harness.cache.engine
    engine.plan(1, "train", harness.reader.epoch, 0.0, True)
    engine.resize(4 * SIZE, 0)
    for inode in range(97, 101):
        engine.place(inode, SIZE)
    harness.push(3)
    harness.tell(1, 2)
    assert not engine.would_keep(1, SIZE), "the page cache has it"
    assert not engine.would_keep(3, SIZE), "it is on its way there"
    harness.tell(3, where=UNREAD | PUSHED)
    assert engine.would_keep(3, SIZE), "it has not come"
    engine.place(1, SIZE)
    assert set(engine.members) == {97, 98, 99, 100}


class Drawn:
    """A harness whose reader draws samples more than once; each of its files is pushed at its position."""

    def __init__(self, directory: Path, order: Sequence[int]) -> None:
        self.harness = Harness(directory, order=order)
        self.engine = self.harness.cache.engine
        self.engine.plan(1, "train", self.harness.reader.epoch, 0.0, True)
        self.reader = self.engine.schedule.readers[1, "train"]
        self.look()

    def look(self, again: bool = False) -> None:
        self.harness.backend.look((self.reader,), again=again, idle=False)

    def prefetch(self, *positions: int) -> None:
        for position in positions:
            self.harness.prefetch(position, self.reader)

    def progressed(self, taken: int) -> None:
        self.engine.progressed(1, "train", 0, taken, taken, 0.0)
        self.look()

    @property
    def ordered(self) -> list[int]:
        return self.harness.pusher.ordered

    def next_use(self, inode: int) -> int | None:
        """The next position for which the cache is to have a sample."""
        return self.reader.epoch.next_use(inode)


def test_a_sample_is_pushed_for_its_second_draw_when_the_first_was_taken(tmp_path: Path) -> None:
    drawn = Drawn(tmp_path, [0, 1, 0, 2, 0])
    drawn.prefetch(0, 1)
    drawn.harness.tell(1, 2)
    drawn.prefetch(2, 3)
    assert drawn.ordered == [1, 2, 3], "who reads it first may be the last who finds it in memory"
    assert drawn.next_use(1) == 2, "until then the cache is to have it"
    drawn.progressed(2)
    assert drawn.ordered == [1, 2, 3, 1]
    drawn.harness.backend._answered(1, IN_MEMORY)
    assert drawn.next_use(1) == 4
    # The last draw is pushed when its turn comes, and not sooner.
    drawn.progressed(3)
    assert drawn.ordered == [1, 2, 3, 1]
    drawn.prefetch(4)
    assert drawn.ordered == [1, 2, 3, 1, 1]


def test_a_draw_that_was_passed_by_while_its_sample_was_on_its_way_is_pushed_too(tmp_path: Path) -> None:
    drawn = Drawn(tmp_path, [0, 1, 0, 2])
    drawn.prefetch(0, 1)
    assert drawn.harness.backend.is_resident(1), "the prefetcher passes the third position by"
    drawn.prefetch(3)
    drawn.harness.tell(1, 2, 3)
    drawn.progressed(1)
    assert drawn.ordered == [1, 2, 3, 1]
    # Orders that are due wait for room, as all do.
    drawn.harness.tell(1)
    drawn.harness.pusher.ready = False
    drawn.prefetch(1)
    drawn.progressed(2)
    drawn.harness.pusher.ready = True
    drawn.look()
    assert drawn.ordered == [1, 2, 3, 1]


def test_what_waits_for_an_epoch_that_begins_goes_on_waiting(tmp_path: Path) -> None:
    """Its bytes count, it needs no substitute, and it is not pushed again."""
    drawn = Drawn(tmp_path, [0, 1])
    backend, pushed, first = drawn.harness.backend, drawn.harness.pushed, drawn.reader.epoch
    later = [
        PlannedEpoch(number, first.keys, first.index_of, np.array(order, np.uint32))
        for number, order in ((1, [2, 3, 0]), (2, [4]))
    ]
    for epoch in later:
        drawn.engine.plan(1, "train", epoch, 0.0, begun=False)
    drawn.look()

    def prefetch_all() -> None:
        for position, inode in drawn.reader.coming(100):
            drawn.harness.prefetch(position, drawn.reader, inode)
        drawn.harness.tell(*drawn.ordered)

    prefetch_all()
    assert drawn.ordered == [1, 2, 3, 4, 5], "the second draw of 1 was passed by"
    drawn.engine.plan(1, "train", PlannedEpoch(1, first.keys, first.index_of, later[0].order), 0.0, begun=True)
    drawn.look()
    assert backend.waiting_bytes == 4 * SIZE, "the second draw of 1 came into its turn"
    assert [inode in pushed for inode in range(1, 6)] == [True, False, True, True, True]
    assert drawn.ordered == [1, 2, 3, 4, 5, 1]
    prefetch_all()
    assert drawn.ordered == [1, 2, 3, 4, 5, 1]
    drawn.engine.progressed(1, "train", 1, 2, 2, 0.0)
    drawn.look()
    assert [inode in pushed for inode in range(1, 6)] == [True, False, False, False, True]
    # Another epoch than the one that was foreseen: nothing of it waits.
    drawn.engine.plan(1, "train", PlannedEpoch(2, first.keys, first.index_of, np.array([0, 1])), 0.0, begun=True)
    drawn.look()
    assert backend.waiting_bytes == 0
    assert not any(inode in pushed for inode in range(1, 6))


def test_what_the_kernel_was_made_to_forget_is_pushed_again(tmp_path: Path) -> None:
    drawn = Drawn(tmp_path, range(20))
    drawn.prefetch(0, 1, 2, 3)
    drawn.harness.tell(1, 2)
    assert [inode in drawn.harness.pushed for inode in range(1, 6)] == [True] * 4 + [False]
    assert drawn.next_use(2) is None
    drawn.harness.tell(0, where=FORGOTTEN)
    assert [drawn.next_use(inode) for inode in (1, 2, 3)] == [0, 1, 2]
    assert (drawn.harness.backend.under_way, drawn.harness.backend.looks_again) == (0, True)
    assert not any(inode in drawn.harness.pushed for inode in range(1, 6))
    drawn.look(again=True)
    drawn.prefetch(0)
    assert drawn.ordered == [1, 2, 3, 4, 1]


def test_what_the_engine_would_not_keep_is_not_for_the_store(harness: Harness) -> None:
    engine = harness.cache.engine
    engine.plan(1, "train", harness.reader.epoch, 0.0, True)
    engine.resize(4 * SIZE, 0)
    assert harness.push(1) == [1]
    assert 1 not in harness.passing, "there is room"
    for inode in range(97, 101):
        engine.place(inode, SIZE)
    assert harness.push(1) == [2]
    assert 2 in harness.passing
    harness.tell(2, where=UNSTORED | PUSHED)
    assert 2 not in harness.passing, "a reader that asks for it again may have it stored"
    assert harness.done[-1][1].where == UNSTORED


def test_what_comes_together_is_pushed_when_it_is_in_the_store(harness: Harness) -> None:
    together, backend = harness.together, harness.backend
    together.has_neighbours = True
    harness.cache.engine.plan(1, "train", harness.reader.epoch, 0.0, True)

    def comes(inode: int, where: int | None, failed: bool = False) -> None:
        if where == FETCHED:
            harness.cache.engine.place(inode, SIZE)
        harness.comes(inode, where, failed=failed)
        harness.look()

    harness.prefetch(0)
    assert together.begun == [1, 2]
    assert (harness.pusher.ordered, backend.under_way) == ([], 2)
    assert backend.is_resident(2), "it is on its way"
    harness.prefetch(10)
    assert together.since == 10, "what is read before waits in the page cache"
    assert together.begun == [1, 2, 11, 12]
    harness.prefetch(20)
    assert harness.pusher.ordered == [21], "more than two requests of this kind are not made at a time"
    comes(2, FETCHED)
    comes(1, FETCHED)
    assert harness.pusher.ordered == [21, 2, 1], "the plan was followed beyond both"
    assert [inode for inode, _ in harness.done] == [2, 1]
    harness.tell(1, 2, where=HIT | PUSHED)
    together.resident.add(32)
    harness.prefetch(30)
    assert harness.pusher.ordered[3:] == [31], "32 is there"
    # A disk that is full, and a source that fails: others come alone, and what was fetched in vain may come again.
    comes(11, UNSTORED, failed=True)
    assert harness.pusher.ordered[4:] == [11], "workers have it in memory"
    comes(12, None, failed=True)
    assert [found.failed for inode, found in harness.done if inode > 10] == [False, True]
    harness.prefetch(40)
    assert harness.pusher.ordered[5:] == [41]


def test_what_the_store_keeps_is_given_to_the_kernel_by_who_fetches_it(harness: Harness) -> None:
    harness.together.pushes = True
    assert harness.push(1) == []
    assert harness.together.given == [1]
    assert (harness.backend.under_way, harness.backend.is_ready(1), harness.backend.is_resident(1)) == (1, False, True)
    harness.comes(1, FETCHED, placed=True, pushed=True)
    assert [(inode, found.where, found.failed) for inode, found in harness.done] == [(1, FETCHED, False)]
    assert (harness.backend.under_way, harness.backend.is_ready(1)) == (0, True)
    assert harness.backend.waiting_bytes == SIZE
    assert harness.counters.value("pushed") == 1
    harness.reader.progressed(1, 1, 0.0)
    harness.look()
    assert harness.backend.waiting_bytes == 0


@pytest.mark.parametrize("failed", [False, True], ids=["a file that it does not know", "no room in the store"])
def test_what_the_kernel_was_not_given_is_pushed(harness: Harness, failed: bool) -> None:
    harness.together.pushes = True
    harness.push(1)
    where = UNSTORED if failed else FETCHED
    harness.comes(1, where, failed=failed, placed=not failed)
    assert harness.pusher.ordered == [1]
    assert harness.backend.under_way == failed, "only what is not in the store waits for the source"
    # Most likely it does not know the next ones either.
    harness.push(3)
    assert (harness.pusher.ordered, harness.together.given) == ([1, 2, 3, 4], [1])
    harness.tell(1, where=HIT | PUSHED)
    assert harness.counters.value("pushed") == 1


def test_what_could_not_be_fetched_for_the_kernel_is_left_to_its_reader(harness: Harness) -> None:
    harness.together.pushes = True
    harness.push(1)
    harness.comes(1, None, failed=True)
    assert (harness.pusher.ordered, harness.backend.under_way, 1 in harness.pushed) == ([], 0, False)
    assert [found.failed for _, found in harness.done] == [True]


def test_a_kernel_that_asks_for_each_name_is_given_nothing(harness: Harness) -> None:
    harness.together.pushes = True
    harness.backend._asks_for_names = lambda: True
    assert harness.push(1) == [1]
    assert harness.together.given == []


def test_what_was_being_fetched_for_the_kernel_when_that_forgot_its_pages_is_pushed(harness: Harness) -> None:
    harness.together.pushes = True
    harness.push(1)
    harness.tell(0, where=FORGOTTEN)
    harness.look(again=True)
    assert harness.backend.is_resident(1), "it is passed by while it is on its way"
    assert not harness.backend.looks_again
    harness.comes(1, FETCHED, placed=True, pushed=True)
    assert harness.backend.looks_again
    assert not harness.backend.is_resident(1)


def test_the_read_of_an_order_that_was_lost_counts_though_the_kernel_had_the_file_for_the_next(
    harness: Harness,
) -> None:
    harness.push(1)
    harness.backend._lost()
    harness.look(again=True)
    harness.pusher.ordered.clear()
    assert harness.push(1) == [1]
    harness.backend._answered(1, IN_MEMORY)
    assert harness.tell(1) == [1], "it has landed"
    assert harness.counters.value("pushed") == 1
    harness.tell(1)
    assert harness.counters.value("pushed") == 1, "once"
