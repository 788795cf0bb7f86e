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


def test_orders_are_compared() -> None:
    order = random.Random(1).sample(range(4000), 4000)
    assert correlation(order, order) == pytest.approx(1)
    assert abs(correlation(order, order[::-1])) == pytest.approx(1)
    labels = np.array(order) % 10
    assert abs(runs_off(labels)) < 3
    assert abs(serial_off(labels)) < 3
    assert runs_off(np.sort(labels)) < -50
    assert serial_off(np.sort(labels)) > 50
