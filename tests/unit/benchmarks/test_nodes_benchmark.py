"""What several nodes fetch from the source, each with a share of every epoch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.engine.nodes import AWAITED, QUICK, THIS_EPOCH, fetched_shares


def later(system: str, nodes: int) -> float:
    return float(np.mean(fetched_shares(replace(QUICK, system=system, nodes=nodes))[2:]))


@pytest.mark.parametrize(("nodes", "most"), [(2, 0.67), (3, 0.64), (4, 0.66)])
def test_what_a_nodes_next_epoch_reads_stays(nodes: int, most: float) -> None:
    assert later(AWAITED, nodes) <= most < later(THIS_EPOCH, nodes)


def test_one_node_fetches_what_it_does_not_hold_either_way() -> None:
    assert later(AWAITED, 1) == pytest.approx(0.8, abs=0.005) == later(THIS_EPOCH, 1)
