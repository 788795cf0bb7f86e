"""A plan beside peers: several nodes fetch no more from the source than they do without plans."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.engine.nodes import HOMES, Node, Setting
from spiderfs.core.engine import Engine
from spiderfs.core.homes import Homes
from spiderfs.core.plans.fetch_limits import AHEAD_SHARE
from spiderfs.core.rooms import LANDING_SHARE
from spiderfs.policies.spider import Spider

NODES, SAMPLES, EPOCHS = 3, 900, 4
SETTING = Setting(system=HOMES, nodes=NODES, samples=SAMPLES)
Orders = list[list[npt.NDArray[np.uint32]]]


class NodeWithoutPlan(Node):
    """Reads in the same order, and tells no one."""

    def begin(self, number: int) -> None:
        self._number = number

    def read(self, position: int) -> None:
        key = self._keys[int(self._orders[self._number][position])]
        assert isinstance(key, int)
        if key not in self.engine.members:
            self.fetch(key)
        self.engine.opened(key, 1)


def ranks(rng: np.random.Generator) -> Orders:
    """An epoch is one random order, of which each node reads its part."""
    whole = [rng.permutation(SAMPLES).astype(np.uint32) for _ in range(EPOCHS + 1)]
    return [[order[node::NODES] for order in whole] for node in range(NODES)]


def weighted(rng: np.random.Generator) -> Orders:
    """Draws by weights, with replacement: a sample comes several times in an epoch, at any node."""
    weights = rng.pareto(1.2, SAMPLES) + 0.2
    shares = weights / weights.sum()
    drawn = [rng.choice(SAMPLES, SAMPLES, p=shares).astype(np.uint32) for _ in range(EPOCHS + 1)]
    return [[order[node::NODES] for order in drawn] for node in range(NODES)]


def jobs(rng: np.random.Generator) -> Orders:
    """Each node reads all samples."""
    return [[rng.permutation(SAMPLES).astype(np.uint32) for _ in range(EPOCHS + 1)] for _ in range(NODES)]


def fetched(kind: type[Node], orders: Orders, landing_share: float) -> float:
    """The share of what is read that comes from the source in later epochs; landing has this share of each cache."""
    names = [f"node {number}" for number in range(NODES)]
    nodes: list[Node] = []
    for name, own in zip(names, orders, strict=True):
        homes = Homes(dict.fromkeys(names, 1.0), name)
        node = kind(SETTING, own, homes, nodes)
        node.engine = Engine(Spider(), SETTING.room, round(SETTING.room * landing_share), homes=homes)
        nodes.append(node)
    before, length = 0, len(orders[0][0])
    for epoch in range(EPOCHS):
        if epoch == 2:
            before = sum(node.from_source for node in nodes)
        for node in nodes:
            node.begin(epoch)
        for position in range(length):
            for node in nodes:
                node.read(position)
    return (sum(node.from_source for node in nodes) - before) / ((EPOCHS - 2) * length * NODES)


@pytest.mark.parametrize("draw", [ranks, weighted, jobs])
def test_a_plan_beside_peers_fetches_no_more_than_peers_alone(draw: Callable[[np.random.Generator], Orders]) -> None:
    orders = draw(np.random.default_rng(1))
    alone = fetched(NodeWithoutPlan, orders, LANDING_SHARE)
    planned = fetched(Node, orders, LANDING_SHARE - AHEAD_SHARE)
    assert planned <= alone + 0.005
    if draw is jobs:
        assert planned < alone - 0.03, "a home knows what its own job reads next"
