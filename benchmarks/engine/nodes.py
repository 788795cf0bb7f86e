"""One training on several nodes, each with a mount of its own: what they fetch from the source, engine alone.

    .venv/bin/python -m benchmarks.engine.nodes --json FILE      two minutes
    .venv/bin/python -m benchmarks.engine.nodes --quick          some seconds

An epoch is one random order of all samples, of which each node reads every n-th one (DistributedSampler). All samples
have one size, and each node caches the same share of all of them, by the product's engine and its default policy. The
nodes read in step; each fetches ahead as the mount does, from a source that answers at once. The systems:

    this epoch    each node knows what it reads in this epoch
    awaited       it also knows its next epoch, as trainings tell it: what that reads stays (core/plans/foresight.py)

A figure is what all nodes fetch from the source in an epoch, as a share of the samples; the first two epochs are left
out. No system can be below 1 - n c if the nodes give each other what they have, nor below 1 - c for one node.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

from benchmarks.common.command import command_line
from benchmarks.common.interruption import exit_status
from benchmarks.common.results import machine, plain_table, save
from spiderfs.core.engine import Engine
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Key
from spiderfs.policies.spider import Spider

READER, LIST = "reader", "list"
THIS_EPOCH, AWAITED = "this epoch", "awaited"
SYSTEMS = (THIS_EPOCH, AWAITED)
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
NODES, CACHED = (1, 2, 3, 4, 8), (0.1, 0.2, 0.3)


class Node:
    """One node's mount, and the training's reader on it. Sample s has the key s + 1 and size 1."""

    def __init__(self, setting: Setting, orders: list[npt.NDArray[np.uint32]]) -> None:
        self._setting = setting
        self.engine = Engine(Spider(), setting.room)
        self._keys: list[Key] = list(range(1, setting.samples + 1))
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
        epoch = PlannedEpoch(number, self._keys, self._index_of, self._orders[number].copy())
        self.engine.plan(READER, LIST, epoch, float(number * len(epoch)), begun)

    def read(self, position: int) -> None:
        """The training takes what is at this position of its epoch, and the mount fetches ahead."""
        order, now_s = self._orders[self._number], float(position)
        self.engine.progressed(READER, LIST, self._number, position + 1, position, now_s)
        self._fetch_ahead()
        key = int(order[position]) + 1
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
        self.from_source += 1


def fetched_shares(setting: Setting) -> list[float]:
    """What all nodes fetch from the source in each epoch, as a share of the samples."""
    rng = np.random.default_rng(setting.seed)
    whole = [rng.permutation(setting.samples).astype(np.uint32) for _ in range(setting.epochs + 1)]
    own = setting.samples // setting.nodes
    orders = [[order[node :: setting.nodes][:own] for order in whole] for node in range(setting.nodes)]
    nodes = [Node(setting, order) for order in orders]
    shares, before = [], 0
    for epoch in range(setting.epochs):
        for node in nodes:
            node.begin(epoch)
        for position in range(own):
            for node in nodes:
                node.read(position)
        fetched = sum(node.from_source for node in nodes)
        shares.append((fetched - before) / setting.samples)
        before = fetched
    return shares


def settings(extent: Setting) -> Iterator[Setting]:
    for cached in CACHED:
        for nodes in NODES:
            for system in SYSTEMS:
                yield replace(extent, system=system, nodes=nodes, cached=cached)


def run(extent: Setting, console: Console) -> dict[str, object]:
    rows = []
    for setting in track(list(settings(extent)), console=console, transient=True):
        shares = fetched_shares(setting)
        row = {name: asdict(setting)[name] for name in ("system", "nodes", "cached")}
        rows.append(row | {"first": round(shares[0], 4), "later": round(float(np.mean(shares[2:])), 4)})
    for cached in CACHED:
        table = plain_table(f"{cached:.0%} of {extent.samples:,} samples cached on each node", "nodes", *SYSTEMS)
        for nodes in NODES:
            found = [row for row in rows if (row["nodes"], row["cached"]) == (nodes, cached)]
            table.add_row(str(nodes), *(f"{row['later']:.3f}" for row in found))
        console.print(table)
    return {"extent": {"samples": extent.samples, "epochs": extent.epochs}, "rows": rows}


def main() -> int:
    arguments = command_line(__doc__).parse_args()

    def measure() -> None:
        save(arguments.json, {"machine": machine()} | run(QUICK if arguments.quick else FULL, Console()))

    return exit_status("nodes", measure, "interrupted")


if __name__ == "__main__":
    sys.exit(main())
