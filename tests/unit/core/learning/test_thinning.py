"""Thinning row by row: no sample is forgotten, whatever share of the rows there is time for."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from spiderfs.core.batches import ScoreAges, Thinning


def test_the_oldest_scores_come_first_and_each_sample_once() -> None:
    thinning = Thinning(6)
    assert thinning.take(np.array([0, 1, 2]), 2).tolist() == [0, 1], "among equals the first"
    assert thinning.take(np.array([0, 1, 2, 3]), 2).tolist() == [2, 3]
    assert thinning.take(np.array([3, 0, 3, 0, 4]), 2).tolist() == [3, 4], "the last row of a sample is the newest"
    assert thinning.take(np.array([5, 5]), 2).tolist() == [0, 1], "all rows, if there is time for all"
    assert (thinning.rows_scored, thinning.rows_left_out) == (8, 6)


def test_ages_are_in_epochs() -> None:
    thinning = Thinning(4)
    assert thinning.ages() == ScoreAges(0, 0)
    thinning.take(np.arange(4), 4)
    thinning.take(np.array([0, 1]), 2)
    thinning.leave_out(2)
    assert thinning.ages() == ScoreAges(0.75, 1.0)
    assert thinning.left_out_share == 0.25


@given(
    seed=st.integers(0, 10_000),
    samples=st.integers(64, 600),
    rows=st.integers(16, 128),
    every=st.integers(1, 5),
    dropped=st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_every_sample_is_scored_in_time(seed: int, samples: int, rows: int, every: int, dropped: bool) -> None:
    """With time for one row of `every`, a sample that each epoch offers is scored at least every `every` + 2 epochs."""
    rng = np.random.default_rng(seed)
    thinning = Thinning(samples)
    scored_in = np.zeros(samples, np.int64)
    for epoch in range(1, 4 * every):
        order = rng.permutation(samples)
        for start in range(0, samples, rows):
            indices = order[start : start + rows]
            if dropped:
                # Half of what waited was dropped before the scorer came to it.
                kept = thinning.oldest(indices, -(-len(indices) // 2))
                thinning.leave_out(len(indices) - len(kept))
                indices = indices[kept]
            scored_in[indices[thinning.take(indices, -(-len(indices) // every))]] = epoch
        assert epoch - scored_in.min() <= (2 * every if dropped else every) + 1
    assert thinning.rows_scored + thinning.rows_left_out == samples * (4 * every - 1)
