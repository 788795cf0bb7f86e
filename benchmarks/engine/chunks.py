"""What neighbours in an archive save that come together: requests and bytes, by the engine alone, without a mount.

    .venv-dev/bin/python -m benchmarks.engine.chunks --json FILE     two minutes
    .venv-dev/bin/python -m benchmarks.engine.chunks --quick         some seconds

Samples of one size lie side by side in one archive, and a fifth of them is cached. A reader takes a batch at a time,
and as much again is fetched ahead by its plan; each sample that has to be fetched brings neighbours along, by the rule
of `core/chunks.py`. The rows vary how many come with one request at most, and how near their use has to be, in caches
(`NEAR_CACHES`). The reader draws uniformly, or by a PoolSampler whose pool is a little smaller than the cache, or half
as large. Of the epochs after the first, requests and bytes are shares of all samples.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

from benchmarks.common.command import command_line
from benchmarks.common.interruption import exit_status
from benchmarks.common.results import machine, plain_table, save
from spiderfs.core.chunks import MOST_MEMBERS, NEAR_CACHES, Member, chunk_of, is_worth_it
from spiderfs.core.engine import Engine
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Key
from spiderfs.policies.baselines import LRU
from trainer_hook import PoolSampler

CACHED_SHARE = 0.20
# The share of a PoolSampler's pool, and its blocks.
POOLS = {
    "pool": {"pool": 0.9 * CACHED_SHARE},
    "half a pool": {"pool": 0.5 * CACHED_SHARE},
    "half a pool, blocks of 16": {"pool": 0.5 * CACHED_SHARE, "block": 16},
}
# Such as FEW_BYTES are of photos.
FEW_MEMBERS = 4
BATCH = 64
SEED = 0
READER, LIST = "reader", "list"
EVERY_NEIGHBOUR = math.inf


@dataclass(frozen=True)
class Extent:
    samples: int
    epochs: int


FULL, QUICK = Extent(samples=3_000, epochs=4), Extent(samples=800, epochs=3)


@dataclass(frozen=True)
class Row:
    draws: str
    most_members: int
    near_caches: float
    requests: float
    bytes: float


RULES = (
    (1, NEAR_CACHES),
    *((few, near) for few in (FEW_MEMBERS, MOST_MEMBERS) for near in (NEAR_CACHES / 2, NEAR_CACHES, EVERY_NEIGHBOUR)),
)


class Reader:
    """Reads epochs through an engine, and counts what is fetched after the first one."""

    def __init__(self, samples: int, most_members: int, near_caches: float) -> None:
        self._cached = int(CACHED_SHARE * samples)
        self._engine = Engine(LRU(), self._cached)
        self._samples, self._most, self._near = samples, most_members, near_caches
        self.requests = self.bytes = 0

    def read(self, orders: list[npt.NDArray[np.uint32]]) -> None:
        engine = self._engine
        keys: list[Key] = list(range(1, self._samples + 1))
        index_of = {key: index for index, key in enumerate(keys)}
        epochs = [PlannedEpoch(number, keys, index_of, order) for number, order in enumerate(orders)]
        for number, order in enumerate(orders[:-1]):
            engine.plan(READER, LIST, epochs[number], 0.0)
            engine.plan(READER, LIST, epochs[number + 1], 0.0, begun=False)
            if number == 1:
                self.requests = self.bytes = 0
            for position, sample in enumerate(order.tolist()):
                if position % BATCH == 0:
                    engine.progressed(READER, LIST, number, position + BATCH, position, float(position))
                    self._fetch_ahead()
                if sample + 1 not in engine.members:
                    self.requests, self.bytes = self.requests + 1, self.bytes + 1
                engine.wanted(READER, sample + 1, float(position))
                engine.opened(sample + 1, 1)

    def _fetch_ahead(self) -> None:
        reader = self._engine.schedule.readers[READER, LIST]
        reader.look_ahead = BATCH
        for _, key in list(reader.coming(BATCH)):
            assert isinstance(key, int)
            if key in self._engine.members:
                continue
            if not self._engine.would_keep(key, 1):
                return
            after, before = self._members(key, 1), self._members(key, -1)
            chunk = chunk_of(Member(key, key, key + 1), before, after, self._admits, self._most)
            self.requests, self.bytes = self.requests + 1, self.bytes + len(chunk)
            for member in chunk:
                self._engine.place(member.number, 1)

    def _members(self, key: int, step: int) -> Iterator[Member]:
        while 1 <= (key := key + step) <= self._samples:
            yield Member(key, key, key + 1)

    def _admits(self, member: Member) -> bool:
        engine, key = self._engine, member.number
        reader = engine.schedule.readers[READER, LIST]
        return key not in engine.members and is_worth_it(engine, reader, key, 1, reader.reached, self._near)


def orders_of(draws: str, extent: Extent) -> list[npt.NDArray[np.uint32]]:
    """The epochs, and one more that is known and never read."""
    if draws in POOLS:
        sampler = PoolSampler(extent.samples, seed=SEED, **POOLS[draws])  # type: ignore[arg-type]
        return [np.array(list(sampler), np.uint32) for _ in range(extent.epochs + 1)]
    rng = np.random.default_rng(SEED)
    return [rng.permutation(extent.samples).astype(np.uint32) for _ in range(extent.epochs + 1)]


def run(arguments: argparse.Namespace, console: Console) -> None:
    extent = QUICK if arguments.quick else FULL
    rows = []
    cells = [(draws, rule) for draws in ("uniform", *POOLS) for rule in RULES]
    for draws, (most_members, near_caches) in track(cells, console=console, transient=True):
        reader = Reader(extent.samples, most_members, near_caches)
        reader.read(orders_of(draws, extent))
        later = extent.samples * (extent.epochs - 1)
        rows.append(Row(draws, most_members, near_caches, reader.requests / later, reader.bytes / later))
    table = plain_table("", "draws", "at most", "near, caches", "requests", "bytes")
    for row in rows:
        near = "any" if row.near_caches == EVERY_NEIGHBOUR else f"{row.near_caches:g}"
        table.add_row(row.draws, str(row.most_members), near, f"{row.requests:.3f}", f"{row.bytes:.3f}")
    console.print(table)
    found = {"extent": asdict(extent), "rows": [asdict(row) | {"near_caches": str(row.near_caches)} for row in rows]}
    save(arguments.json, {"machine": machine()} | found)


def main() -> int:
    arguments = command_line(__doc__).parse_args()
    return exit_status("chunks", lambda: run(arguments, Console()), "interrupted")


if __name__ == "__main__":
    sys.exit(main())
