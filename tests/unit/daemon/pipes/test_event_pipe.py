"""The road from the workers to the manager: nothing torn, nothing waited for, what is lost is counted."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import trio

from spiderfs.core.events import FETCHED, HIT
from spiderfs.daemon.pipes import (
    BATCH_EVENTS,
    FLUSH_INTERVAL_S,
    READ_EVENTS,
    EventWriter,
    open_pipe,
    read_events,
)
from spiderfs.metrics import SharedCounters


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = open_pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def all_events(reader: int) -> list[tuple[int, ...]]:
    """(inode, wanted, size, block, pid, trainer, where) of everything that waits."""
    found: list[tuple[int, ...]] = []
    while events := read_events(reader):
        assert len(events) <= READ_EVENTS
        found += [event[1:] for event in events]
    return found


def test_events_arrive_as_they_were_noted(pipe: tuple[int, int]) -> None:
    writer = EventWriter(pipe[1], SharedCounters(1).row(0))
    writer.record_access((1 << 63) - 1, 1 << 40, FETCHED, 4_000_000, 7)
    writer.record_access(2, 0, HIT, 0)
    writer.record_access(3, 9, HIT, 5, trainer=65535, wanted=(1 << 63) - 2, waited_us=(1 << 32) - 1)
    assert read_events(pipe[0]) == [], "a batch waits for its flush"
    writer.flush()
    writer.flush()
    events = read_events(pipe[0])
    assert events == sorted(events, key=lambda event: event.time_s)
    assert [event[1:] for event in events] == [
        ((1 << 63) - 1, (1 << 63) - 1, 1 << 40, 7, 4_000_000, 0, FETCHED, 0),
        (2, 2, 0, 0, 0, 0, HIT, 0),
        (3, (1 << 63) - 2, 9, 0, 5, 65535, HIT, (1 << 32) - 1),
    ]


def test_a_full_pipe_drops_and_counts(pipe: tuple[int, int]) -> None:
    counters = SharedCounters(1)
    writer = EventWriter(pipe[1], counters.row(0))
    noted = 60_000
    for inode in range(noted):
        writer.record_access(inode, 1, HIT, 1)
    writer.flush()
    dropped = counters.totals()["events_dropped"]
    assert 0 < dropped < noted
    arrived = [inode for inode, *_ in all_events(pipe[0])]
    assert len(arrived) == noted - dropped
    assert arrived == sorted(arrived)
    writer.record_access(noted, 1, HIT, 1)
    writer.flush()
    assert [inode for inode, *_ in all_events(pipe[0])] == [noted], "there is room again"
    assert counters.totals()["events_dropped"] == dropped


def test_many_writers_never_tear_a_record(pipe: tuple[int, int]) -> None:
    counters = SharedCounters(4)
    each = 20_000
    children = []
    for row in range(4):
        child = os.fork()
        if child == 0:
            try:
                writer = EventWriter(pipe[1], counters.row(row))
                for number in range(each):
                    # Every field says who wrote it, so that a torn record shows.
                    writer.record_access(row << 32 | number, row * 1000, HIT, row, row, trainer=row, wanted=number + 1)
                    if number % (row + 2) == 0:
                        writer.flush()
                writer.flush()
            finally:
                os._exit(0)
        children.append(child)
    found: list[tuple[int, ...]] = []
    while children:
        found += all_events(pipe[0])
        children = [child for child in children if not os.waitpid(child, os.WNOHANG)[0]]
    found += all_events(pipe[0])
    for inode, wanted, size, block, pid, trainer, where, _ in found:
        row, number = divmod(inode, 1 << 32)
        assert (wanted, size, block, pid, trainer, where) == (number + 1, row * 1000, row, row, row, HIT)
    for row in range(4):
        numbers = [inode & 0xFFFFFFFF for inode, *_ in found if inode >> 32 == row]
        assert numbers == sorted(set(numbers)), "one writer's events stay in order"
    assert len(found) + counters.totals()["events_dropped"] == 4 * each
    assert len(found) > 0


@pytest.mark.usefixtures("jumping_clock")
async def test_a_batch_that_does_not_become_full_is_passed_on_in_time_and_no_one_wakes_without_one(
    pipe: tuple[int, int],
) -> None:
    writer = EventWriter(pipe[1], SharedCounters(1).row(0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.flush_in_time)
        # The clock of the test jumps to when someone wants to wake: here it is the test alone.
        await trio.sleep(1e6)
        assert read_events(pipe[0]) == []
        for turn in range(3):
            writer.record_access(turn, 0, HIT, 0)
            writer.record_access(turn, 0, HIT, 1)
            await trio.sleep(FLUSH_INTERVAL_S / 2)
            assert read_events(pipe[0]) == []
            await trio.sleep(FLUSH_INTERVAL_S)
            assert len(read_events(pipe[0])) == 2
        # What was full has gone, and what came after it goes in time.
        for number in range(BATCH_EVENTS + 1):
            writer.record_access(number, 0, HIT, 0)
        assert len(read_events(pipe[0])) == BATCH_EVENTS
        await trio.sleep(2 * FLUSH_INTERVAL_S)
        assert len(read_events(pipe[0])) == 1
        nursery.cancel_scope.cancel()
