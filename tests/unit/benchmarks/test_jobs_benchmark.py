"""The benchmark of several jobs in one process: what each system fetches, and the figures about orders."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.engine.jobs import SYSTEMS, Setting, correlation, measure, runs_off, serial_off

SMALL = Setting(samples=800, epochs=3, batch=16, ready=4)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_reads_each_sample_once_an_epoch(system: str) -> None:
    # `run` raises an error if it does not.
    found = measure(system, replace(SMALL, jobs=2))
    assert SMALL.cached < found.fetched <= 1.1


@pytest.mark.parametrize("labels", [10, 100])
@pytest.mark.parametrize("jobs", [2, 3, 4])
def test_jobs_that_exchange_fetch_each_sample_once_for_all(jobs: int, labels: int) -> None:
    found = measure("exchange, ahead", replace(SMALL, jobs=jobs, labels=labels))
    assert found.over_bound <= 1.05
    assert found.waits <= 0.05


def test_jobs_of_several_paces_still_share_most_fetches() -> None:
    assert measure("exchange, ahead", replace(SMALL, paces=(1.0, 0.8, 0.6))).fetched <= 0.41


@pytest.mark.thorough
@pytest.mark.parametrize("labels", [4, 40])
def test_an_order_with_exchange_is_as_random_as_a_shuffle(labels: int) -> None:
    found = [measure("exchange, ahead", replace(SMALL, labels=labels), seed) for seed in range(9)]
    # Of a uniform shuffle each figure has the mean 0 and the deviation 1, and a mean of nine has the deviation 1/3.
    for figures in ([one.runs for one in found], [one.serial for one in found]):
        assert abs(np.mean(figures)) < 1
        assert np.abs(figures).max() < 3.5


@pytest.mark.thorough
def test_orders_of_jobs_that_exchange_become_alike() -> None:
    assert abs(measure("plans", SMALL).alike) < 0.15
    half = measure("exchange, ahead", replace(SMALL, exchanged_share=0.5)).alike
    assert 0.1 < half < 0.6
    assert measure("exchange, ahead", SMALL).alike > 0.9


def test_orders_are_compared() -> None:
    order = random.Random(1).sample(range(4000), 4000)
    assert correlation(order, order) == pytest.approx(1)
    assert abs(correlation(order, order[::-1])) == pytest.approx(1)
    labels = np.array(order) % 10
    assert abs(runs_off(labels)) < 3
    assert abs(serial_off(labels)) < 3
    assert runs_off(np.sort(labels)) < -50
    assert serial_off(np.sort(labels)) > 50
