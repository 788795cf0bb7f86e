"""The matrix of mounts beside direct reading: its extent, and how a cell is shown."""

from __future__ import annotations

import pytest

from benchmarks.serving.never_slower import LEAST_FILES, MOST_BYTES, MOST_FILES, SIZES, SOURCES, count_of, shown


@pytest.mark.parametrize("size", SIZES.values())
@pytest.mark.parametrize("source", SOURCES.values())
def test_an_epoch_is_short_and_not_too_short(source, size):
    counts = [count_of(source, size, workers) for workers in (1, 2, 4, 8, 16)]
    assert counts == sorted(counts)
    assert LEAST_FILES <= counts[0] <= counts[-1] <= MOST_FILES
    assert counts[-1] * size <= MOST_BYTES


def test_a_cell_below_one_is_marked():
    cell = {"times": [0.8, 0.9, 1.1], "rate": [], "cpu_us": [900.0, 1000.0, 1100.0]}
    assert shown(cell) == "[red]< 0.90 0.80-1.10 1,000 us[/red]"
    assert shown(cell | {"times": [1.2]}) == "1.20 1,000 us"
