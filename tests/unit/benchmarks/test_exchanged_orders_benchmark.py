"""The benchmark of what trainings reach that exchange: the orders, and the differences."""

from __future__ import annotations

import pytest

from benchmarks.common.extent import Extent
from benchmarks.engine.jobs import correlation
from benchmarks.training.exchanged_orders import JOBS, Pair, Task, by_seed, exchanged_orders, own_orders

EXTENT = Extent(epochs=3, training=500, held_out=1, seeds=1)


def test_every_epoch_of_every_job_is_a_permutation() -> None:
    together = exchanged_orders(EXTENT, 1)
    assert sorted(together) == [*range(JOBS)]
    alone = {job: own_orders(EXTENT, Task(1, job)) for job in range(JOBS)}
    for orders in [*together.values(), *alone.values()]:
        assert len(orders) == EXTENT.epochs
        assert all(sorted(order) == [*range(EXTENT.training)] for order in orders)
    assert correlation(together[0][-1], together[1][-1]) > 0.7
    assert abs(correlation(alone[0][-1], alone[1][-1])) < 0.2


def test_a_seed_counts_once() -> None:
    pairs = [Pair(1, 0, 0.5, 0.52), Pair(1, 1, 0.5, 0.5), Pair(2, 0, 0.5, 0.4), Pair(2, 1, 0.5, 0.5)]
    assert by_seed(pairs) == pytest.approx([1, -5])
