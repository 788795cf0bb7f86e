"""Small parts of benchmarks: intervals, what a split of a mount shows where, when augmented samples are made again."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_up_profile import MADE_UP

from benchmarks.common.intervals import Interval, interval_of, is_equivalent
from benchmarks.serving.refurbish_speed import SCHEDULES
from benchmarks.training.equation_9 import (
    Cluster,
    by_equation_9,
    cluster_of,
    mean_throughput,
    samples_in,
    throughputs,
)
from benchmarks.training.partition import Row, auto_of_best, chosen, judged, pearson
from spiderfs.forms.partition import FormSizes, Split
from spiderfs.views.recipe import READY
from spiderfs.views.tree import Forms


def test_the_interval_is_that_of_students_table() -> None:
    # t(0.975) is 4.303 with 2 degrees of freedom and 2.571 with 5; the deviation of 1, 2, 3 is 1.
    found = interval_of([1.0, 2.0, 3.0])
    assert (found.mean, found.seeds) == (2.0, 3)
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    six = interval_of([-0.1, -0.1, -1.4, -0.3, -0.7, -1.6])
    assert six.mean == pytest.approx(-0.7)
    assert six.half_width == pytest.approx(2.5706 * 0.6603 / math.sqrt(6), abs=1e-3)
    assert (six.low, six.high) == (six.mean - six.half_width, six.mean + six.half_width)


def test_one_seed_says_nothing_of_the_spread() -> None:
    found = interval_of([0.4])
    assert found == Interval(0.4, math.inf, 1)
    assert not is_equivalent(found)
    with pytest.raises(ValueError, match="at least one"):
        interval_of([])


def test_only_an_interval_above_the_margin_is_equivalent() -> None:
    assert is_equivalent(Interval(-0.1, 0.39, 9))
    assert not is_equivalent(Interval(-0.1, 0.4, 9))
    assert not is_equivalent(Interval(0.3, 0.9, 3))


def test_augmented_images_are_shown_as_originals_as_long_as_there_are_any() -> None:
    names = [f"{number}.jpg" for number in range(60)]
    forms = Forms(READY, "bmp256", 0.5)
    originals = {index for index, name in enumerate(names) if forms.place(name.encode()).form == "original"}
    few, many = chosen(10, names, 0.5), chosen(50, names, 0.5)
    assert len(few) == 10
    assert few <= originals <= many
    assert len(many) == 50


def test_predictions_are_judged_over_the_six_splits_and_the_named_split_by_the_best() -> None:
    rows = [
        Row("", predicted, 7 - predicted, [measured] * 3) for predicted, measured in enumerate((10, 20, 30, 40, 50, 60))
    ]
    named = Row("", 99, 0, [30.0, 57.0, 99.0])
    assert pearson(rows, "predicted") == pytest.approx(1)
    assert pearson(rows, "equation_9") == pytest.approx(-1)
    assert auto_of_best([*rows, named]) == pytest.approx(0.95)
    assert judged([*rows, named]) == pytest.approx({"pearson": 1, "pearson_of_equation_9": -1, "auto_of_best": 0.95})


def test_schedules_without_revampers_features_make_the_same_samples_at_other_times() -> None:
    naive, balanced, whole = (schedule(60, 3, 60, 0) for schedule in SCHEDULES.values())
    assert [int(naive.renewed(epoch).sum()) for epoch in range(7)] == [60, 0, 0, 60, 0, 0, 60]
    assert [int(balanced.renewed(epoch).sum()) for epoch in range(1, 7)] == [20] * 6
    assert all((balanced.renewed(epoch) == whole.renewed(epoch)).all() for epoch in range(7))
    for schedule in (naive, balanced, whole):
        assert sorted(schedule.order(5)) == list(range(60))
    spread = [np.ptp(of.renewed(5)[of.order(5)].reshape(6, 10).sum(1)) for of in (balanced, whole)]
    assert spread[0] > 1 >= spread[1]


# -- equation 9 of Seneca's paper: what must hold for all parameters, and known cases

ENCODED = Split(1, 0, 0)
percent = st.integers(0, 100)
SPLITS = st.tuples(percent, percent).map(
    lambda cut: Split(min(cut) / 100, (max(cut) - min(cut)) / 100, (100 - max(cut)) / 100)
)
SIZES = st.builds(FormSizes, st.floats(1, 1e6), st.floats(1, 1e7), st.floats(1, 1e7))


@given(SPLITS, st.floats(0, 1e12), st.floats(1, 1e7), SIZES)
@example(Split(0.0, 0.55, 0.45), 859973556529.0, 1529908.0350600418, FormSizes(1.0, 1.0, 803994.0703125))
def test_each_sample_is_in_one_place_and_the_cache_holds_them(
    split: Split, cache_bytes: float, samples: float, sizes: FormSizes
) -> None:
    counts = samples_in(split, cache_bytes, samples, sizes)
    assert min(counts) >= 0
    assert sum(counts) == pytest.approx(samples)
    kept = counts.encoded * sizes.encoded + counts.decoded * sizes.decoded + counts.augmented * sizes.augmented
    assert kept <= cache_bytes * (1 + 1e-9) + 1e-9


def test_the_equations_with_numbers_that_can_be_done_by_head() -> None:
    cluster = Cluster(2, 1000, 400, 100, 1e9, 1e8, 5e7, 1e6, gradient_nic_bytes=1e5, gradient_pcie_bytes=4e5)
    sizes = FormSizes(1e5, 5e5, 6e5)
    # 1: 5e7/6e5, 2e8/7e5, 2e9/1e6, 2000   3: 5e7/5e5, 2e8/6e5, 800, ...   5: 5e7/1e5, 2e8/2e5, 200   7: 1e6/1e5
    assert throughputs(cluster, sizes) == pytest.approx((5e7 / 6e5, 100, 200, 10))
    # 2: 0.3e8/6e5 = 50   4: 0.3e8/5e5 = 60   6: 0.4e8/1e5 = 400   8: 1000 - 510
    counts = samples_in(Split(0.4, 0.3, 0.3), 1e8, 1000, sizes)
    assert counts == pytest.approx((50, 60, 400, 490))
    expected = 0.05 * 5e7 / 6e5 + 0.06 * 100 + 0.4 * 200 + 0.49 * 10
    assert mean_throughput(cluster, sizes, Split(0.4, 0.3, 0.3), 1e8, 1000) == pytest.approx(expected)


def test_the_parameters_of_a_profile_are_those_of_the_paper() -> None:
    cluster = cluster_of(MADE_UP, "bmp256")
    assert (cluster.decode_augment_rate, cluster.augment_rate) == (pytest.approx(500), pytest.approx(2000))
    assert cluster.cache_bandwidth == pytest.approx(100e6)
    # Half of the samples at 500 a second, half as fast as the source brings them, which is as fast.
    assert by_equation_9(MADE_UP, ENCODED, "bmp256") == pytest.approx(500)
    four = replace(MADE_UP, nodes=4, cache_bytes=50e6)
    assert cluster_of(four, "bmp256").cache_bandwidth == pytest.approx(400e6)
    assert by_equation_9(four, ENCODED, "bmp256") == pytest.approx(0.5 * 2000 + 0.5 * 500)
