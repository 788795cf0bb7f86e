"""Equation 9 of Seneca's paper: what must hold for all parameters, and known cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_up_profile import MADE_UP

from benchmarks.training.equation_9 import (
    Cluster,
    by_equation_9,
    cluster_of,
    mean_throughput,
    samples_in,
    throughputs,
)
from spiderfs.forms.partition import FormSizes, Split

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
