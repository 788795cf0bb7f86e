"""What several nodes fetch from the source, each with a share of every epoch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.engine.nodes import AWAITED, HOMES, PLANS, QUICK, THIS_EPOCH, fetched_shares


def later(system: str, nodes: int) -> float:
    return float(np.mean(fetched_shares(replace(QUICK, system=system, nodes=nodes))[2:]))


@pytest.mark.parametrize(("nodes", "most"), [(2, 0.67), (3, 0.64), (4, 0.66)])
def test_what_a_nodes_next_epoch_reads_stays(nodes: int, most: float) -> None:
    assert later(AWAITED, nodes) <= most < later(THIS_EPOCH, nodes)


@pytest.mark.parametrize(("nodes", "most"), [(2, 0.62), (3, 0.46), (4, 0.27)])
def test_with_homes_the_caches_of_all_nodes_act_as_one(nodes: int, most: float) -> None:
    first, _, *later = fetched_shares(replace(QUICK, system=HOMES, nodes=nodes))
    assert (first <= 1.02, float(np.mean(later)) <= most) == (True, True)


@pytest.mark.thorough
def test_one_node_fetches_what_it_does_not_hold_either_way() -> None:
    for system in (THIS_EPOCH, AWAITED, HOMES):
        assert later(system, 1) == pytest.approx(0.8, abs=0.005)


@pytest.mark.thorough
@pytest.mark.parametrize(("system", "most"), [(HOMES, 0.40), (PLANS, 0.25)])
def test_a_job_on_each_of_three_nodes_fetches_less_than_alone(system: str, most: float) -> None:
    _, _, *later = fetched_shares(replace(QUICK, system=system, jobs=True))
    assert 0.15 < float(np.mean(later)) <= most


@pytest.mark.thorough
def test_plans_on_other_nodes_do_no_harm_to_one_training() -> None:
    assert later(PLANS, 3) == pytest.approx(later(HOMES, 3), abs=0.02)
