"""What follows from a limit on memory: each bound, and which limits are too low."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spiderfs.core.memory import _COPIES, MemoryBounds, _of_processes, least_limit, memory_bounds

MIB = 1 << 20
WORKERS, SIZES, MORE = st.integers(1, 64), st.integers(1, 1 << 30), st.integers(0, 1 << 40)


@given(WORKERS, SIZES, MORE)
def test_all_that_is_bounded_fits_into_the_limit(workers: int, size: int, more: int) -> None:
    limit = least_limit(workers, size) + more
    bounds = memory_bounds(limit, workers)
    assert bounds.in_flight >= max(size, MIB)
    assert min(bounds) > 0
    each = _COPIES * bounds.in_flight + bounds.transit + bounds.landing
    shared = bounds.recent + bounds.unstored + bounds.pushed + bounds.samples
    assert _of_processes(workers) + (workers + 1) * each + shared <= limit
    # Parts are in flight, too.
    assert bounds.parts <= workers * bounds.in_flight


@given(WORKERS, SIZES, MORE, MORE)
def test_a_higher_limit_lowers_nothing(workers: int, size: int, more: int, still_more: int) -> None:
    limit = least_limit(workers, size) + more
    lower, higher = memory_bounds(limit, workers), memory_bounds(limit + still_more, workers)
    assert all(one <= other <= most for one, other, most in zip(lower, higher, MemoryBounds(), strict=True))


@given(WORKERS, SIZES)
def test_below_the_least_limit_no_file_fits(workers: int, size: int) -> None:
    least = least_limit(workers, size)
    assert least % MIB == 0
    assert memory_bounds(least - MIB, workers).in_flight < max(size, MIB)


def test_without_a_limit_each_bound_is_its_own() -> None:
    assert memory_bounds(None, 4) == MemoryBounds()
