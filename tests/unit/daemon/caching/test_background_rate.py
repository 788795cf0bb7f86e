"""The limit on what is fetched before a reader waits for it."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from spiderfs.daemon.caching.prefetch_backend import BackgroundRate


def in_no_time(*sizes: int, rate: BackgroundRate | None = None) -> float:
    """How long files of these sizes take to begin, by 64 tasks at a time, at 1,000 bytes a second."""

    async def all_of_them() -> float:
        shared = rate or BackgroundRate(1000)
        async with trio.open_nursery() as nursery:
            for size in sizes:
                nursery.start_soon(shared.turn, size)
        return trio.current_time()

    clock = MockClock(autojump_threshold=0)
    begun = clock.current_time()
    return trio.run(all_of_them, clock=clock) - begun


def test_files_begin_at_the_rate() -> None:
    # The last one begins when the others have come, but for what may be begun at once.
    assert in_no_time(*[500] * 9) == pytest.approx(4.0 - 0.1)
    assert in_no_time(5000) == 0.0
    assert in_no_time(*[500] * 9, rate=BackgroundRate(0)) == 0.0


def test_another_limit_holds_from_now_on() -> None:
    now = 0.0
    rate = BackgroundRate(1000, lambda: now)
    rate.begin(60_000)
    assert rate.wait_s() == pytest.approx(59.9)
    rate.change(1000)
    assert rate.wait_s() == pytest.approx(59.9)
    rate.change(2000)
    assert rate.wait_s() == 0.0
    rate.begin(2000)
    assert rate.wait_s() == pytest.approx(0.9)
    now = 1.0
    assert rate.wait_s() == 0.0
    rate.change(0)
    rate.begin(10**9)
    assert rate.wait_s() == 0.0
