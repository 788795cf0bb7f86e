"""Seneca's model and the law of the bottleneck: what must hold for all parameters, and known cases."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spiderfs.forms.partition import (
    MOST_AUGMENTED,
    Capacities,
    Cluster,
    Demand,
    FormSizes,
    Places,
    Split,
    best_split,
    bottleneck,
    mean_throughput,
    samples_held,
    samples_in,
    splits,
    throughputs,
    view_share,
)

percent = st.integers(0, 100)
SPLITS = st.tuples(percent, percent).map(
    lambda cut: Split(min(cut) / 100, (max(cut) - min(cut)) / 100, (100 - max(cut)) / 100)
)
SIZES = st.builds(FormSizes, st.floats(1, 1e6), st.floats(1, 1e7), st.floats(1, 1e7))
rate = st.floats(1, 1e6)
bandwidth = st.floats(1e3, 1e12)
CLUSTERS = st.builds(
    Cluster,
    nodes=st.integers(1, 8),
    gpu_rate=rate,
    augment_rate=rate,
    decode_augment_rate=rate,
    pcie_bandwidth=bandwidth,
    nic_bandwidth=bandwidth,
    cache_bandwidth=bandwidth,
    storage_bandwidth=bandwidth,
)
cost = st.floats(0, 1)
amount = st.floats(0, 1e7)
DEMAND = st.builds(Demand, st.floats(1e-6, 1), cost, amount, amount, amount, amount, cost)
DEMANDS = st.builds(Places, DEMAND, DEMAND, DEMAND, DEMAND)
COUNTS = st.builds(Places, *[st.floats(0, 1e6)] * 3, st.floats(1, 1e6))
CAPACITIES = st.builds(Capacities, st.floats(1, 64), st.floats(1, 64), rate, *[bandwidth] * 4)


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


@given(SPLITS, st.floats(0, 1e12), st.floats(0, 0.5), st.floats(1, 1e7), SIZES)
def test_a_mount_holds_each_sample_in_one_place_and_leaves_room_for_landing(
    split: Split, cache_bytes: float, landing: float, samples: float, sizes: FormSizes
) -> None:
    landing_bytes = landing * cache_bytes
    counts = samples_held(split, cache_bytes, landing_bytes, samples, sizes)
    assert min(counts) >= 0
    assert sum(counts) == pytest.approx(samples)
    policys = counts.encoded * sizes.encoded + counts.decoded * sizes.decoded
    kept = policys + counts.augmented * sizes.augmented
    assert kept <= max(cache_bytes - landing_bytes, MOST_AUGMENTED * cache_bytes) * (1 + 1e-9) + 1e-6


@given(CLUSTERS, SIZES, SPLITS, st.floats(0, 1e12), st.floats(1, 1e7))
def test_the_mean_lies_between_the_throughputs_of_the_places(
    cluster: Cluster, sizes: FormSizes, split: Split, cache_bytes: float, samples: float
) -> None:
    rates = throughputs(cluster, sizes)
    mean = mean_throughput(cluster, sizes, split, cache_bytes, samples)
    assert min(rates) * (1 - 1e-9) <= mean <= max(rates) * (1 + 1e-9)
    assert rates.storage <= rates.encoded


@given(CLUSTERS, SIZES)
def test_twice_the_nodes_are_twice_as_fast_where_a_node_is_the_limit(cluster: Cluster, sizes: FormSizes) -> None:
    alone = replace(cluster, cache_bandwidth=math.inf, storage_bandwidth=math.inf)
    twice = throughputs(replace(alone, nodes=2 * alone.nodes), sizes)
    assert twice == pytest.approx(tuple(2 * rate for rate in throughputs(alone, sizes)))
    more = throughputs(replace(cluster, nodes=2 * cluster.nodes), sizes)
    assert all(a <= b <= 2 * a * (1 + 1e-9) for a, b in zip(throughputs(cluster, sizes), more, strict=True))


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


@given(COUNTS, DEMANDS, CAPACITIES)
def test_the_law_is_what_the_slowest_resource_allows(counts: Places, demands: Places, capacities: Capacities) -> None:
    found = bottleneck(counts, demands, capacities, uses=math.inf)
    alone = [
        bottleneck(Places(*(float(place == other) for other in range(4))), demands, capacities, math.inf).samples_per_s
        for place in range(4)
    ]
    assert min(alone) * (1 - 1e-9) <= found.samples_per_s <= capacities.device_rate * (1 + 1e-9)


@given(COUNTS, DEMANDS, st.floats(1, 64))
def test_where_one_resource_is_the_limit_a_mean_of_throughputs_says_too_much(
    counts: Places, demands: Places, workers: float
) -> None:
    rates = [workers / sum(demand[:2]) for demand in demands]
    mean = sum(count * rate for count, rate in zip(counts, rates, strict=True)) / sum(counts)
    predicted = bottleneck(counts, demands, Capacities(workers, cores=math.inf), math.inf)
    assert min(rates) * (1 - 1e-9) <= predicted.samples_per_s <= mean * (1 + 1e-9)


@given(COUNTS, DEMANDS, CAPACITIES, st.floats(1, 10))
def test_more_of_a_resource_helps_only_where_it_is_the_bottleneck(
    counts: Places, demands: Places, capacities: Capacities, uses: float
) -> None:
    found = bottleneck(counts, demands, capacities, uses)
    for field in fields(Capacities):
        doubled = replace(capacities, **{field.name: 2 * getattr(capacities, field.name)})
        more = bottleneck(counts, demands, doubled, uses)
        if field.name == found.bottleneck:
            assert found.samples_per_s <= more.samples_per_s <= 2 * found.samples_per_s * (1 + 1e-9)
        else:
            assert more.samples_per_s == found.samples_per_s


@given(COUNTS, DEMANDS, CAPACITIES, st.floats(1, 10))
def test_what_is_used_more_often_costs_less(
    counts: Places, demands: Places, capacities: Capacities, uses: float
) -> None:
    once = bottleneck(counts, demands, capacities, 1).samples_per_s
    often = bottleneck(counts, demands, capacities, uses).samples_per_s
    assert once <= often * (1 + 1e-9) <= bottleneck(counts, demands, capacities, math.inf).samples_per_s * (1 + 1e-8)


def test_the_law_is_what_a_simulated_loader_does() -> None:
    """Workers that prepare one sample after the other, drawn at random from four places, with A remade after K uses."""
    rng = random.Random(1)
    demands = Places(Demand(0.001, 0.0001), Demand(0.003, 0.0005), Demand(0.010, 0.0002), Demand(0.010, 0.020))
    counts, uses, workers = Places(100, 200, 300, 400), 3, 4
    busy = [0.0] * workers
    kept = dict.fromkeys(range(100), uses)
    drawn = 40_000
    for _ in range(drawn):
        sample = rng.randrange(1000)
        place = 0 if sample < 100 else 1 if sample < 300 else 2 if sample < 600 else 3
        seconds = sum(demands[place][:2])
        if place == 0:
            kept[sample] -= 1
            if not kept[sample]:
                kept[sample] = uses
                seconds += sum(demands.storage[:2])
        worker = busy.index(min(busy))
        busy[worker] += seconds
    predicted = bottleneck(counts, demands, Capacities(workers, cores=64), uses)
    assert predicted.bottleneck == "workers"
    assert predicted.samples_per_s == pytest.approx(drawn / max(busy), rel=0.02)


def test_all_splits_of_one_percent_are_tried() -> None:
    found = list(splits())
    assert len(found) == len(set(found)) == 5151
    assert all(sum(split) == pytest.approx(1) for split in found)
    assert {Split(1, 0, 0), Split(0, 1, 0), Split(0, 0, 1), Split(0.5, 0, 0.5)} <= set(found)
    assert str(Split(0.34, 0.66, 0)) == "34-66-0"


SMALL = FormSizes(100e3, 250e3, 150e3)


def predicted_by(capacities: Capacities, demands: Places, cache_bytes: float, uses: float) -> Callable[[Split], float]:
    def predicted(split: Split) -> float:
        return bottleneck(samples_in(split, cache_bytes, 1000, SMALL), demands, capacities, uses).samples_per_s

    return predicted


FAST_READS = Places(
    Demand(0.0005, cache_bytes=150e3),
    Demand(0.002, cache_bytes=250e3),
    Demand(0.008, cache_bytes=100e3),
    Demand(0.008, storage_bytes=100e3),
)


def test_a_slow_source_asks_for_originals_and_a_slow_processor_for_decoded_ones() -> None:
    slow_source = Capacities(workers=64, cores=64, storage_bandwidth=1e6)
    assert best_split(predicted_by(slow_source, FAST_READS, 60e6, 1), 5) == Split(1, 0, 0)
    slow_cpu = Capacities(workers=2, cores=2, storage_bandwidth=1e9)
    assert best_split(predicted_by(slow_cpu, FAST_READS, 60e6, 1), 5) == Split(0, 1, 0)


@given(COUNTS, DEMANDS, CAPACITIES)
def test_without_reuse_augmented_samples_are_worth_no_more_than_an_empty_cache(
    counts: Places, demands: Places, capacities: Capacities
) -> None:
    without = counts._replace(augmented=0.0, storage=counts.storage + counts.augmented)
    kept = bottleneck(counts, demands, capacities, uses=1).samples_per_s
    assert kept <= bottleneck(without, demands, capacities, uses=1).samples_per_s * (1 + 1e-9)


@given(DEMANDS, CAPACITIES, st.floats(1e6, 1e9), st.floats(1, 8))
def test_no_split_is_better_than_the_best(
    demands: Places, capacities: Capacities, cache_bytes: float, uses: float
) -> None:
    predicted = predicted_by(capacities, demands, cache_bytes, uses)
    best = predicted(best_split(predicted, 20))
    assert all(predicted(split) <= best * (1 + 1e-5) for split in splits(20))


@given(SPLITS)
def test_a_split_is_read_as_it_is_written(split: Split) -> None:
    assert Split.parse(str(split)) == pytest.approx(split)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("50-50", "like 50-30-20"),
        ("a-b-c", "like 50-30-20"),
        ("-10-60-50", "like 50-30-20"),
        ("33.3-33.3-33.4", "like 50-30-20"),
        ("50-50-0\n", "like 50-30-20"),
        ("60-60-0", "add up to 120"),
        ("0-0-0", "add up to 0"),
    ],
)
def test_what_is_no_split_is_refused_with_what_to_write(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        Split.parse(text)


def test_so_many_samples_are_views_that_these_just_fit() -> None:
    sizes = FormSizes(encoded=100.0, decoded=200.0, augmented=150.0)
    few = 194 - 2 * math.sqrt(194 * 0.806)
    assert view_share(Split(0.5, 0.5, 0.0), 100_000, 20_000, 1_000, sizes) == pytest.approx(few / 1_000)
    assert view_share(Split(0.5, 0.5, 0.0), 1e11, 0, 1e9, sizes) == pytest.approx(0.97 * 0.25, rel=0.001)
    assert view_share(Split(0.2, 0.2, 0.6), 1e11, 2e10, 1e9, sizes) == pytest.approx(0.97 * 0.05, rel=0.001)
    assert view_share(Split(1.0, 0.0, 0.0), 100_000, 0, 1_000, sizes) == 0.0
    assert view_share(Split(0.0, 0.0, 1.0), 100_000, 5_000, 1_000, sizes) == 0.0
    assert view_share(Split(0.0, 1.0, 0.0), 1e9, 0, 1_000, sizes) == 1.0
