"""What knowing the future later, or fetching for it earlier, costs in bytes: the engine alone, no mount, no clock.

    .venv/bin/python benchmarks/lookahead.py --json FILE     about a minute
    .venv/bin/python benchmarks/lookahead.py --quick         some seconds

Epochs are drawn with replacement by weights that are spread like a graph's scores (lognormal, sigma 0.5: 59 % of the
samples are different ones, as SpiderSampler draws on CIFAR-10). A fifth of the samples is cached, all of one size. The
default policy has the weights for scores and, but for the first table, no hubs. Each table varies one thing:

    known     how much of the next epoch's plan is known when: from the start of this one, from some share of it on
    window    how far ahead of the reader samples are fetched, as a share of the cache
    reserved  how much of the cache is kept free for what has just been fetched (landing), or is the hubs'

What is printed is bytes fetched against MIN's on the same lists (policy belady, which knows all of them).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from results import plain_table
from rich.console import Console
from rich.progress import track

from spiderfs.core.engine import Engine
from spiderfs.core.policy import Key
from spiderfs.core.replay import Accesses, replay
from spiderfs.core.schedule import PlannedEpoch
from spiderfs.policies.belady import Belady
from spiderfs.policies.spider import Spider

SAMPLE_BYTES = 100
CACHED_SHARE = 0.20
SPREAD = 0.5
SEED = 0
READER, LIST = "reader", "list"
# The prefetcher looks anew some times a second; in between it follows the reader.
LOOK_AGAIN_EVERY = 50


@dataclass(frozen=True)
class Extent:
    samples: int
    epochs: int


FULL = Extent(samples=6_000, epochs=7)
QUICK = Extent(samples=1_000, epochs=4)


@dataclass(frozen=True)
class Variant:
    known_from: float | None = 0.25  # share of an epoch after which the next is known; None: not before it begins
    window: float = 0.0
    reserved: float = 0.0


TABLES: dict[str, dict[str, Variant]] = {
    "known": {
        "nothing but this epoch": Variant(known_from=None),
        **{f"the next from {share:.0%} of this one": Variant(known_from=share) for share in (0.9, 0.5, 0.25, 0.0)},
    },
    "window": {f"{share:.1%} of the cache": Variant(window=share) for share in (0.0, 0.025, 0.05, 0.1, 0.25, 0.5)},
    "reserved": {f"{share:.0%} of the cache": Variant(reserved=share) for share in (0.02, 0.05, 0.1)},
}


@dataclass(frozen=True)
class Row:
    table: str
    variant: str
    fetched_share: float  # of the samples read after the first epoch
    times_min: float


def fetched_share(orders: list[npt.NDArray[np.uint32]], weights: npt.NDArray[np.float64], variant: Variant) -> float:
    samples = len(weights)
    engine = Engine(Spider(ratio=1.0), int(samples * SAMPLE_BYTES * CACHED_SHARE * (1 - variant.reserved)))
    keys: list[Key] = list(range(1, samples + 1))
    place_of = {key: place for place, key in enumerate(keys)}
    for key, weight in zip(keys, weights.tolist(), strict=True):
        engine.scored(key, weight)
    window = int(samples * CACHED_SHARE * variant.window)
    fetched = 0
    epochs = [PlannedEpoch(number, keys, place_of, order) for number, order in enumerate(orders)]
    for number, epoch in enumerate(epochs):
        engine.plan(READER, LIST, epoch, 0.0)
        known_at = None if variant.known_from is None else int(variant.known_from * (samples - 1))
        for position, sample in enumerate(orders[number].tolist()):
            if position == known_at and number + 1 < len(epochs):
                engine.plan(READER, LIST, epochs[number + 1], 0.0, begun=False)
            ahead = fetch_ahead(engine, window, position) if window else 0
            key = keys[sample]
            missed = key not in engine.members
            if number:
                fetched += ahead + missed
            engine.wanted(READER, key, float(position))
            engine.opened(key, SAMPLE_BYTES)
    return fetched / samples / (len(epochs) - 1)


def fetch_ahead(engine: Engine, window: int, position: int) -> int:
    """As the prefetcher does, with a source that answers at once; returns how many."""
    reader = engine.schedule.readers[READER, LIST]
    start = position + window - 2 if position % LOOK_AGAIN_EVERY else 0
    fetched = 0
    for _, key in reader.coming(window, start):
        if key not in engine.members:
            if not engine.would_keep(key, SAMPLE_BYTES):
                break
            engine.place(key, SAMPLE_BYTES)
            fetched += 1
    return fetched


def fetched_by_min(orders: list[npt.NDArray[np.uint32]]) -> float:
    future = (np.concatenate(orders) + 1).tolist()
    samples = len(orders[0])
    engine = Engine(Belady.foreseeing(future), int(samples * SAMPLE_BYTES * CACHED_SHARE))
    result = replay(engine, Accesses.of(future, [SAMPLE_BYTES] * len(future)), samples)
    return float(result.origin_bytes[1:].sum() / SAMPLE_BYTES / samples / (len(orders) - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer samples and epochs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    arguments = parser.parse_args()
    extent = QUICK if arguments.quick else FULL
    rng = np.random.default_rng(SEED)
    weights = rng.lognormal(0, SPREAD, extent.samples)
    chances = weights / weights.sum()
    orders = [rng.choice(extent.samples, extent.samples, p=chances).astype(np.uint32) for _ in range(extent.epochs)]
    best = fetched_by_min(orders)
    console = Console()
    variants = [(table, name, variant) for table, rows in TABLES.items() for name, variant in rows.items()]
    rows = []
    for table, name, variant in track(variants, console=console, transient=True):
        share = fetched_share(orders, weights, variant)
        rows.append(Row(table, name, share, share / best))
    different = np.mean([len(np.unique(order)) for order in orders]) / extent.samples
    console.print(
        f"{extent.samples:,} samples, {extent.epochs} epochs, {different:.0%} of them different in one; MIN fetches"
        f" {best:.3f} of what is read",
        highlight=False,
    )
    for table in TABLES:
        shown = plain_table(table)
        for heading in ("", "fetched", "x MIN"):
            shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for row in rows:
            if row.table == table:
                shown.add_row(row.variant, f"{row.fetched_share:.3f}", f"{row.times_min:.3f}")
        console.print(shown)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"extent": asdict(extent), "min": best, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
