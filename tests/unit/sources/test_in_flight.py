"""Bytes in flight: who goes, who waits, and in which order."""

from __future__ import annotations

import trio
import trio.testing

from spiderfs.sources.in_flight import InFlight


async def test_no_large_read_waits_for_ever_behind_small_ones() -> None:
    in_flight, went = InFlight(10), list[int]()

    async def read(size: int) -> None:
        await in_flight.reserve(size)
        went.append(size)

    async with trio.open_nursery() as nursery:
        for size in (6, 9, 2, 3, 20, 1):
            nursery.start_soon(read, size)
            await trio.testing.wait_all_tasks_blocked()
        # Two bytes would fit, but it is not their turn.
        assert went == [6]
        for size, gone in ((6, [9]), (9, [2, 3]), (2, []), (3, [20]), (20, [1])):
            before = len(went)
            in_flight.remove(size)
            await trio.testing.wait_all_tasks_blocked()
            assert went[before:] == gone
    in_flight.remove(1)
    assert in_flight.held_bytes == 0


async def test_who_gives_up_lets_the_next_one_go() -> None:
    in_flight = InFlight(10)
    await in_flight.reserve(5)
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0.01):
            await in_flight.reserve(9)
        nursery.start_soon(in_flight.reserve, 5)
    assert in_flight.held_bytes == 10


def test_what_is_about_to_go_counts_too() -> None:
    in_flight = InFlight(10)
    assert in_flight.fits(20)
    assert not in_flight.fits(6, others=5)
    assert in_flight.fits(5, others=5)
    in_flight.add(1)
    assert not in_flight.fits(10)
