"""How many bytes it costs to know a plan later, or to fetch earlier for it: the engine alone, without mount or clock.

    .venv-dev/bin/python -m benchmarks.training.lookahead --json FILE     two minutes
    .venv-dev/bin/python -m benchmarks.training.lookahead --quick         some seconds

The rows "known" say how much it costs to know the plan of the next epoch from some share of this one on. Epochs are
drawn with replacement by weights whose spread is that of a graph's scores (lognormal, sigma 0.5: 59 % of the draws are
different samples, as with SpiderSampler on CIFAR-10). All samples have one size, and a fifth is cached. The default
policy has the weights as scores, and no hubs.

The rows "settings" take the draws, files and sizes of the cache that stall.py measures through a mount, and the
settings of the daemon there: how far ahead it fetches, how much room it leaves for landing, and how many epochs it
knows. Each row changes one setting. The bytes are those of all epochs from an empty cache, with the plan of one more
epoch that never comes; each loader worker takes a whole batch at once.

Bytes are multiples of what MIN fetches for the same draws (the policy belady, which knows all of them).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

from benchmarks.common.command import command_line, main
from benchmarks.common.results import plain_table
from benchmarks.serving.stall import log_rank_weights
from spiderfs.core.engine import Engine
from spiderfs.core.plans.fetch_limits import FIRST, LEAST, MOST
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Key
from spiderfs.core.rooms import LANDING_FILES, LANDING_SHARE
from spiderfs.daemon.caching.fetch_ahead import BURST_SHARE
from spiderfs.policies.baselines import Belady
from spiderfs.policies.spider import Spider
from spiderfs.simulation import replay
from spiderfs.trace import Accesses

SAMPLE_BYTES = 100
CACHED_SHARE = 0.20
SPREAD = 0.5
SEED = 0
READER, LIST = "reader", "list"


@dataclass(frozen=True)
class Extent:
    samples: int
    epochs: int


FULL = Extent(samples=6_000, epochs=7)
QUICK = Extent(samples=1_000, epochs=4)


# The share of an epoch after which the next is known; None: not before it begins.
KNOWN: dict[str, float | None] = {
    "nothing but this epoch": None,
    **{f"the next from {share:.0%} of this one": share for share in (0.9, 0.5, 0.25, 0.0)},
}
MOUNT = "settings"
MOUNT_CAPACITIES = (0.10, 0.20, 0.25, 0.50, 0.75)
MOUNT_SAMPLES, MOUNT_EPOCHS = 4_000, 4
MOUNT_BURST = 32
# So many files the daemon fetches at a time before it has found out how fast the source is.
MOUNT_FETCHES = 8


@dataclass(frozen=True)
class Settings:
    """Settings of the daemon; functions take the number of samples that are cached."""

    window: Callable[[float], float] = lambda cached: min(FIRST, max(cached * BURST_SHARE, LEAST))
    known_epochs: int = 3
    expected_files: int | None = MOUNT_FETCHES


MOUNT_ROWS: dict[str, Settings] = {
    "the daemon, at first": Settings(),
    "its least window": Settings(window=lambda cached: LEAST),
    "its largest window": Settings(window=lambda cached: min(MOST, max(cached * BURST_SHARE, LEAST))),
    "a window of a quarter of the cache": Settings(window=lambda cached: min(MOST, cached / 4)),
    "landing's room without a plan": Settings(expected_files=None),
    "two epochs known": Settings(known_epochs=2),
    "nothing fetched ahead": Settings(window=lambda cached: 0),
}


@dataclass(frozen=True)
class Row:
    table: str
    variant: str
    fetched_share: float  # of the samples read after the first epoch
    times_min: float


def fetched_share(orders: list[npt.NDArray[np.uint32]], weights: npt.NDArray[np.float64], known: float | None) -> float:
    samples = len(weights)
    engine = Engine(Spider(ratio=1.0), int(samples * SAMPLE_BYTES * CACHED_SHARE))
    keys: list[Key] = list(range(1, samples + 1))
    index_of = {key: index for index, key in enumerate(keys)}
    for key, weight in zip(keys, weights.tolist(), strict=True):
        engine.scored(key, weight)
    fetched = 0
    epochs = [PlannedEpoch(number, keys, index_of, order) for number, order in enumerate(orders)]
    for number, epoch in enumerate(epochs):
        engine.plan(READER, LIST, epoch, 0.0)
        known_at = None if known is None else int(known * (samples - 1))
        for position, sample in enumerate(orders[number].tolist()):
            if position == known_at and number + 1 < len(epochs):
                engine.plan(READER, LIST, epochs[number + 1], 0.0, begun=False)
            key = keys[sample]
            fetched += number > 0 and key not in engine.members
            engine.progressed(READER, LIST, number, position + 1, position, float(position))
            engine.wanted(READER, key, float(position))
            engine.opened(key, SAMPLE_BYTES)
    return fetched / samples / (len(epochs) - 1)


def mount_rows() -> Iterator[Row]:
    """The rows of the last table: each of MOUNT_ROWS at each size of the cache."""
    rng = np.random.default_rng(MOUNT_SAMPLES)
    sizes = rng.integers(20_000, 80_000, MOUNT_SAMPLES).tolist()
    weights = log_rank_weights(MOUNT_SAMPLES)
    chances = weights / weights.sum()
    orders = [rng.choice(MOUNT_SAMPLES, MOUNT_SAMPLES, p=chances).astype(np.uint32) for _ in range(MOUNT_EPOCHS + 1)]
    for share in MOUNT_CAPACITIES:
        capacity = int(sum(sizes) * share)
        drawn = np.concatenate(orders[:-1]).tolist()
        accesses = Accesses.of([sample + 1 for sample in drawn], [sizes[sample] for sample in drawn])
        belady = Engine(Belady.foreseeing(accesses.keys), capacity)
        least = int(replay(belady, accesses, MOUNT_SAMPLES).origin_bytes.sum())
        for name, settings in MOUNT_ROWS.items():
            fetched = fetched_by_mount(orders, sizes, capacity, MOUNT_SAMPLES * share, settings)
            yield Row(f"{MOUNT}, {share:.0%} cached", name, fetched / sum(accesses.sizes), fetched / least)


def fetched_by_mount(
    orders: list[npt.NDArray[np.uint32]], sizes: list[int], capacity: int, cached: float, settings: Settings
) -> int:
    """The bytes fetched; the last epoch in `orders` is known but never read."""
    landing = int(capacity * LANDING_SHARE)
    if settings.expected_files is not None:
        landing = min(landing, int(settings.expected_files * np.mean(sizes)))
    engine = Engine(Spider(ratio=1.0), capacity, max(landing, LANDING_FILES * max(sizes)))
    keys: list[Key] = list(range(1, len(sizes) + 1))
    index_of = {key: index for index, key in enumerate(keys)}
    epochs = [PlannedEpoch(number, keys, index_of, order) for number, order in enumerate(orders)]
    window = int(settings.window(cached))
    fetched = 0
    for number, order in enumerate(orders[:-1]):
        engine.plan(READER, LIST, epochs[number], 0.0)
        for later in range(number + 1, min(number + settings.known_epochs, len(epochs))):
            engine.plan(READER, LIST, epochs[later], 0.0, begun=False)
        reader = engine.schedule.readers[READER, LIST]
        for position, sample in enumerate(order.tolist()):
            if window and position % MOUNT_BURST == 0:
                reader.look_ahead = window
                fetched += sum(sizes[ahead] for ahead in brought(engine, window, sizes))
            key, size = keys[sample], sizes[sample]
            fetched += 0 if key in engine.members else size
            engine.progressed(READER, LIST, number, position + 1, position, float(position))
            engine.wanted(READER, key, float(position))
            engine.opened(key, size)
    return fetched


def brought(engine: Engine, window: int, sizes: list[int]) -> Iterator[int]:
    """The samples that the prefetcher fetches now."""
    for _, key in engine.schedule.readers[READER, LIST].coming(window):
        assert isinstance(key, int)
        if key not in engine.members:
            if not engine.would_keep(key, sizes[key - 1]):
                return
            engine.place(key, sizes[key - 1])
            yield key - 1


def fetched_by_min(orders: list[npt.NDArray[np.uint32]]) -> float:
    future = (np.concatenate(orders) + 1).tolist()
    samples = len(orders[0])
    engine = Engine(Belady.foreseeing(future), int(samples * SAMPLE_BYTES * CACHED_SHARE))
    result = replay(engine, Accesses.of(future, [SAMPLE_BYTES] * len(future)), samples)
    return float(result.origin_bytes[1:].sum() / SAMPLE_BYTES / samples / (len(orders) - 1))


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent: Extent = arguments.extent
    rng = np.random.default_rng(SEED)
    weights = rng.lognormal(0, SPREAD, extent.samples)
    chances = weights / weights.sum()
    orders = [rng.choice(extent.samples, extent.samples, p=chances).astype(np.uint32) for _ in range(extent.epochs)]
    best = fetched_by_min(orders)
    rows = []
    for name, known in track(KNOWN.items(), console=console, transient=True):
        share = fetched_share(orders, weights, known)
        rows.append(Row("known", name, share, share / best))
    if not arguments.quick:
        rows += track(mount_rows(), total=len(MOUNT_CAPACITIES) * len(MOUNT_ROWS), console=console, transient=True)
    shown = plain_table("bytes fetched", "table", "", "x MIN", words=("table", ""))
    for row in rows:
        shown.add_row(row.table, row.variant, f"{row.times_min:.3f}")
    console.print(shown)
    return {"extent": asdict(extent), "min": best, "rows": [asdict(row) for row in rows]}


if __name__ == "__main__":
    main(measure, command_line(__doc__, FULL, QUICK))
