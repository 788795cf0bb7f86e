"""Several nodes, each with a mount of its own: what they fetch from the source, engine alone.

    .venv-dev/bin/python -m benchmarks.engine.nodes --json FILE      two minutes
    .venv-dev/bin/python -m benchmarks.engine.nodes --quick          some seconds

Of one training, an epoch is one random order of all samples, of which each node reads every n-th one
(DistributedSampler). All samples have one
size, and each node caches the same share of all of them, by the product's engine and its default policy. The nodes read
in step; each fetches ahead as the mount does, from a source that answers at once. The systems:

    this epoch    each node knows what it reads in this epoch
    awaited       it also knows its next epoch, as trainings publish it: what that reads stays (core/plans/foresight.py)
    homes         each sample has a home, which alone keeps it, and of which the other nodes ask it (core/homes.py)

A figure is what all nodes fetch from the source in an epoch, as a share of what is read; the first two epochs are left
out. No system can be below 1 - n c if the nodes give each other what they have, nor below 1 - c for
one node.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

from benchmarks.common.command import command_line, main
from benchmarks.common.results import plain_table
from spiderfs.core.engine import Engine
from spiderfs.core.homes import Homes
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Key
from spiderfs.policies.spider import Spider

READER, LIST = "reader", "list"
THIS_EPOCH, AWAITED, HOMES = "this epoch", "awaited", "homes"
SYSTEMS = (THIS_EPOCH, AWAITED, HOMES)
_SPREAD = 0x9E3779B97F4A7C15
# Of the cache, as in a mount that has yet to find out how fast its source is; at least and at most this many samples.
WINDOW_SHARE, LEAST_WINDOW, MOST_WINDOW = 0.02, 1, 32


@dataclass(frozen=True)
class Setting:
    system: str = AWAITED
    nodes: int = 3
    cached: float = 0.2
    """The share of the samples that each node's cache holds."""
    samples: int = 6_000
    epochs: int = 5
    seed: int = 1

    @property
    def room(self) -> int:
        return int(self.samples * self.cached)

    @property
    def window(self) -> int:
        return max(LEAST_WINDOW, min(MOST_WINDOW, int(self.room * WINDOW_SHARE)))


FULL = Setting()
QUICK = Setting(samples=1_200, epochs=4)
NODES = (1, 2, 3, 4, 8)


class Node:
    """One node's mount, and the training's reader on it. All samples have size 1."""

    def __init__(
        self, setting: Setting, orders: list[npt.NDArray[np.uint32]], homes: Homes | None, nodes: list[Node]
    ) -> None:
        """`nodes` are all of them, by their places in `homes`."""
        self._setting = setting
        self._homes = homes
        self._nodes = nodes
        self.engine = Engine(Spider(), setting.room, homes=homes)
        # Keys of samples are hashes.
        self._keys: list[Key] = [(index * _SPREAD) % 2**63 for index in range(1, setting.samples + 1)]
        self._index_of = {key: index for index, key in enumerate(self._keys)}
        self._orders = orders
        self.from_source = 0

    def begin(self, number: int) -> None:
        self._plan(number)
        if self._setting.system != THIS_EPOCH:
            self._plan(number + 1, begun=False)
        reader = self.engine.schedule.readers[READER, LIST]
        reader.look_ahead = self._setting.window
        self._number = number

    def _plan(self, number: int, begun: bool = True) -> None:
        order = self._orders[number]
        epoch = PlannedEpoch(number, self._keys, self._index_of, order.copy())
        self.engine.plan(READER, LIST, epoch, float(number * len(order)), begun)

    def read(self, position: int) -> None:
        """The training takes what is at this position of its epoch, and the mount fetches ahead."""
        order = self._orders[self._number]
        now_s = float(self._number * len(order) + position)
        self.engine.progressed(READER, LIST, self._number, position + 1, position, now_s)
        while self.engine.rank_some(len(self._keys)):
            pass
        self._fetch_ahead()
        key = self._keys[int(order[position])]
        assert isinstance(key, int)
        missed = key not in self.engine.members
        if missed:
            self.fetch(key)
        self.engine.wanted(READER, key, now_s, missed)
        self.engine.opened(key, 1)

    def _fetch_ahead(self) -> None:
        for _, key in self.engine.schedule.readers[READER, LIST].coming(self._setting.window):
            assert isinstance(key, int)
            if key not in self.engine.members:
                if not self.engine.would_keep(key, 1):
                    return
                self.fetch(key)
                self.engine.place(key, 1)

    def fetch(self, key: int) -> None:
        """Bring a sample that is not cached here."""
        if self._homes is None or not self._homes.is_remote(key):
            self.from_source += 1
            return
        home = self._nodes[self._homes.home(key)]
        if key not in home.engine.members:
            home.fetch(key)
        home.engine.opened(key, 1)


def fetched_shares(setting: Setting) -> list[float]:
    """What all nodes fetch from the source in each epoch, as a share of what they read."""
    rng = np.random.default_rng(setting.seed)
    own = setting.samples // setting.nodes
    whole = [rng.permutation(setting.samples).astype(np.uint32) for _ in range(setting.epochs + 1)]
    orders = [[order[node :: setting.nodes][:own] for order in whole] for node in range(setting.nodes)]
    names = [f"node {number}" for number in range(setting.nodes)]
    nodes: list[Node] = []
    for name, order in zip(names, orders, strict=True):
        homes = Homes(dict.fromkeys(names, 1.0), name) if setting.system == HOMES else None
        nodes.append(Node(setting, order, homes, nodes))
    shares, before = [], 0
    for epoch in range(setting.epochs):
        for node in nodes:
            node.begin(epoch)
        for position in range(own):
            for node in nodes:
                node.read(position)
        fetched = sum(node.from_source for node in nodes)
        shares.append((fetched - before) / (own * setting.nodes))
        before = fetched
    return shares


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, object]:
    extent = QUICK if arguments.quick else FULL
    first: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    later: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    chosen = [replace(extent, system=system, nodes=nodes) for system in SYSTEMS for nodes in NODES]
    for setting in track(chosen, console=console, transient=True):
        shares = fetched_shares(setting)
        first[setting.system].append(round(shares[0], 4))
        later[setting.system].append(round(float(np.mean(shares[2:])), 4))
    title = f"{extent.cached:.0%} of {extent.samples:,} samples cached on each node"
    table = plain_table(title, "nodes", *SYSTEMS, "1 - n c")
    for nodes, *found in zip(NODES, *later.values(), strict=True):
        table.add_row(str(nodes), *(f"{share:.3f}" for share in found), f"{max(0.0, 1 - nodes * extent.cached):.1f}")
    console.print(table)
    return {"extent": asdict(extent), "nodes": NODES, "first": first, "later": later}


if __name__ == "__main__":
    main(measure, command_line(__doc__))
