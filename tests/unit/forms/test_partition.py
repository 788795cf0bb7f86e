"""The law of the bottleneck: what must hold for all parameters, and known cases."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.training.equation_9 import samples_in
from spiderfs.forms.partition import (
    MOST_AUGMENTED,
    Capacities,
    Demand,
    FormSizes,
    Places,
    Split,
    best_split,
    bottleneck,
    samples_held,
    splits,
    view_share,
)

percent = st.integers(0, 100)
SPLITS = st.tuples(percent, percent).map(
    lambda cut: Split(min(cut) / 100, (max(cut) - min(cut)) / 100, (100 - max(cut)) / 100)
)
SIZES = st.builds(FormSizes, st.floats(1, 1e6), st.floats(1, 1e7), st.floats(1, 1e7))
rate = st.floats(1, 1e6)
bandwidth = st.floats(1e3, 1e12)
cost = st.floats(0, 1)
amount = st.floats(0, 1e7)
DEMAND = st.builds(Demand, st.floats(1e-6, 1), cost, amount, cost, cost, amount)
DEMANDS = st.builds(Places, DEMAND, DEMAND, DEMAND, DEMAND)
COUNTS = st.builds(Places, *[st.floats(0, 1e6)] * 3, st.floats(1, 1e6))
CAPACITIES = st.builds(Capacities, st.floats(1, 64), st.floats(1, 64), rate, bandwidth, st.floats(1, 8), bandwidth)


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
def test_more_uses_cost_less(counts: Places, demands: Places, capacities: Capacities, uses: float) -> None:
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


FAST_READS = Places(Demand(0.0005), Demand(0.002), Demand(0.008), Demand(0.008, storage_bytes=100e3))


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
def test_the_best_split_is_best(demands: Places, capacities: Capacities, cache_bytes: float, uses: float) -> None:
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
