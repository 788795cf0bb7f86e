"""Where the benchmarks of reused augmented samples could silently be wrong: when samples are made again."""

from __future__ import annotations

import numpy as np

from benchmarks.serving.refurbish_speed import SCHEDULES


def test_schedules_without_revampers_features_make_the_same_samples_at_other_times() -> None:
    naive, balanced, whole = (schedule(60, 3, 60, 0) for schedule in SCHEDULES.values())
    assert [int(naive.renewed(epoch).sum()) for epoch in range(7)] == [60, 0, 0, 60, 0, 0, 60]
    assert [int(balanced.renewed(epoch).sum()) for epoch in range(1, 7)] == [20] * 6
    assert all((balanced.renewed(epoch) == whole.renewed(epoch)).all() for epoch in range(7))
    for schedule in (naive, balanced, whole):
        assert sorted(schedule.order(5)) == list(range(60))
    spread = [np.ptp(of.renewed(5)[of.order(5)].reshape(6, 10).sum(1)) for of in (balanced, whole)]
    assert spread[0] > 1 >= spread[1]
