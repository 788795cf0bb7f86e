"""How many fetches at a time, against simulated sources."""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

import pytest

from spiderfs.core.plans.fetch_limits import FIRST_FETCHES, SLICE_S, TRY_AGAIN, Concurrency

SIZE = 100_000
MOST = 256


class Simulated:
    """A source with a latency, and a line that all fetches share; as many fetches run as the limit allows."""

    def __init__(self, latency_s: float, bytes_per_s: float, most: int = MOST, sizes: Sequence[int] = (SIZE,)) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.concurrency = Concurrency(most)
        self.now_s = 0.0
        self.limits: list[int] = []
        self._line_free_s = 0.0
        self._sizes, self._random = sizes, random.Random(1)
        self._under_way: list[tuple[float, float]] = []

    def run(self, seconds: float) -> list[int]:
        """Limits after each fetch of this time."""
        until_s, self.limits = self.now_s + seconds, []
        while self.now_s < until_s:
            while len(self._under_way) < self.concurrency.limit:
                self._line_free_s = max(self._line_free_s, self.now_s) + SIZE / self.bytes_per_s
                heappush(self._under_way, (max(self._line_free_s, self.now_s) + self.latency_s, self.now_s))
            self.now_s, began_s = heappop(self._under_way)
            self.concurrency.fetched(self._random.choice(self._sizes), self.now_s - began_s, self.now_s)
            self.limits.append(self.concurrency.limit)
        return self.limits


def test_grows_to_the_most_while_only_latency_binds() -> None:
    source = Simulated(0.05, 1e12)
    source.run(10)
    assert source.concurrency.limit == MOST
    assert source.concurrency.latency_s == pytest.approx(0.05, rel=1e-3)
    assert source.concurrency.bytes_per_s == pytest.approx(MOST * SIZE / 0.05, rel=0.05)


def test_stops_growing_when_a_higher_limit_gains_nothing() -> None:
    # The line is full with 20 fetches at a time: each takes 10 ms of the line, and 200 ms of latency.
    source = Simulated(0.2, 10e6)
    source.run(30)
    limits = source.run(60)
    assert min(limits) >= 21, "as many as keep the line busy"
    assert max(limits) < MOST
    assert source.concurrency.bytes_per_s == pytest.approx(10e6)
    # The limit grows every few seconds to try, and falls back.
    assert sum(one != other for one, other in pairwise(limits)) < 12
    assert sum(limits) / len(limits) < 1.1 * min(limits)


def test_files_that_differ_in_size_are_no_source_that_slows() -> None:
    source = Simulated(0.05, 1e12, most=8, sizes=[SIZE, 2 * SIZE, 4 * SIZE, 8 * SIZE, 16 * SIZE])
    limits = source.run(60)
    assert sum(limits) / len(limits) > 0.8 * 8


@pytest.mark.slow
def test_backs_off_when_the_source_slows_down_and_tries_again() -> None:
    source = Simulated(0.05, 1e12, most=64)
    source.run(10)
    source.latency_s, source.bytes_per_s = 0.05, 1e6
    limits = source.run(30)
    assert min(limits) < 64
    slow = source.concurrency.limit
    assert source.concurrency.bytes_per_s == pytest.approx(1e6, rel=0.2)
    source.bytes_per_s = 1e12
    # The limit grows again at the latest when it is tried again.
    windows_s = (TRY_AGAIN + 10) * max(SLICE_S, 8 * 64 * SIZE / 1e6)
    source.run(windows_s)
    assert source.concurrency.limit == 64 > slow


def test_a_pause_before_the_first_fetch_is_no_slow_source() -> None:
    concurrency = Concurrency(MOST)
    concurrency.short_of_work()
    concurrency.fetched(SIZE, 0.05, 1000.05)
    concurrency.fetched(SIZE, 0.05, 1000.3)
    assert concurrency.bytes_per_s == pytest.approx(SIZE / 0.25)


def test_it_doubles_from_the_start_until_that_gains_nothing() -> None:
    source = Simulated(0.02, 1e12)
    limits = source.run(0.5)
    assert limits[0] == FIRST_FETCHES
    assert list(dict.fromkeys(limits)) == [32, 64, 128, 256]


@pytest.mark.parametrize("bytes_per_s", [1e6, 3e6, 10e6, 50e6])
def test_a_narrow_line_is_not_drowned(bytes_per_s: float) -> None:
    """A reader's own fetch waits behind what is fetched ahead."""
    source = Simulated(0.02, bytes_per_s)
    limits = source.run(3 * FIRST_FETCHES * SIZE / bytes_per_s + 2)
    # What is under way when that is seen ends first.
    needed = 0.02 * bytes_per_s / SIZE + 1
    assert max(limits[16:]) <= max(12, 4 * needed)
    assert source.concurrency.bytes_per_s == pytest.approx(bytes_per_s, rel=0.2)


def test_first_fetches_that_end_together_leave_the_limit() -> None:
    concurrency = Concurrency(64)
    for number in range(16):
        concurrency.fetched(SIZE, 0.02, 1 + number / 10_000)
    assert concurrency.limit == FIRST_FETCHES


def test_first_fetches_that_had_to_wait_for_work_say_nothing() -> None:
    concurrency = Concurrency(64)
    for number in range(40):
        concurrency.fetched(SIZE, 0.02, 1 + number / 10)
        concurrency.short_of_work()
    assert concurrency.limit == FIRST_FETCHES
