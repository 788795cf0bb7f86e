"""Hit ratio and origin bytes over the size of the cache, for the reads of a real training (SpiderCache, figure 14).

    .venv-dev/bin/python -m benchmarks.engine.hit_ratio --data DIR --json FILE     about three minutes
    .venv-dev/bin/python -m benchmarks.engine.hit_ratio --data DIR --quick         some seconds, for a look

The benchmark first records a training as in benchmarks/training/in_process.py. Its sampler draws by graph score, and no
sample has a substitute, so the trace does not depend on the cache of that training. Then every policy serves the same
trace at every size, through `spiderfs.simulation`, with the scores, hubs and ratios that the scorer had found at
that time:

    spider      important samples, and hubs that substitute for what is not cached
    importance  the same without room for hubs, so without substitutes
    minio       keeps what came first
    lru, lfu    evict what was used longest ago, least often
    MIN         knows the whole training, and keeps what is used next soonest
    MIN by epoch  knows each epoch once it begins: what a sampler can publish that draws by what was learned
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.common.command import Extent, add_data, command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.lists import min_by_epoch
from benchmarks.common.results import plain_table
from benchmarks.training.in_process import Configuration, pool_in, train
from benchmarks.training.training import BATCH, IMAGES
from spiderfs.core.engine import Engine
from spiderfs.core.events import Ratio
from spiderfs.policies import POLICIES
from spiderfs.simulation import Replay, policy_for, replay
from spiderfs.trace import Accesses, Trace, TraceWriter, read_trace

CAPACITIES = (0.10, 0.25, 0.50, 0.75)
# The scorer finds hubs, which the section of hubs needs, but no sample gets a substitute.
RECORDED = Configuration(stand_in_share=0.0)
SEED = 1
FULL = Extent(epochs=12, training=5_000, held_out=1_000, seeds=1)
QUICK = Extent(epochs=3, training=1_500, held_out=500, seeds=1)


@dataclass(frozen=True)
class Point:
    """The figures of one policy at one size, without the first epoch, which fills the cache."""

    policy: str
    capacity: float  # of the bytes of all samples
    hit_ratio: float
    redirected_share: float
    origin_bytes_per_sample: float


def points_of(trace: Trace) -> Iterator[Point]:
    """Replay a trace of at least two epochs with every policy at every size."""
    accesses, hints = trace.accesses(), trace.hints()
    length = accesses.distinct
    unguided = [(number, hint) for number, hint in hints if not isinstance(hint, Ratio)]
    for capacity in CAPACITIES:
        budget = int(accesses.distinct_bytes * capacity)
        for name, policy, ratio, given in (
            ("spider", "spider", None, hints),
            ("importance", "spider", 1.0, unguided),
            ("minio", "minio", None, []),
            ("lru", "lru", None, []),
            ("lfu", "lfu", None, []),
            ("MIN", "belady", None, []),
        ):
            engine = Engine(policy_for(POLICIES[policy], accesses), budget)
            yield warm_point(name, capacity, replay(engine, accesses, length, given, ratio=ratio))
        yield by_epoch_point(accesses, length, capacity, budget)


POLICIES_SHOWN = ("spider", "importance", "minio", "lru", "lfu", "MIN", "MIN by epoch")


def warm_point(name: str, capacity: float, result: Replay) -> Point:
    opens = int(result.opens[1:].sum())
    return Point(
        name,
        capacity,
        result.warm_hit_ratio,
        int(result.redirects[1:].sum()) / opens,
        int(result.origin_bytes[1:].sum()) / opens,
    )


def by_epoch_point(accesses: Accesses, length: int, capacity: float, budget: int) -> Point:
    keys = np.asarray(accesses.ids)
    sizes = np.zeros(accesses.distinct, np.int64)
    sizes[keys] = accesses.sizes
    lists = [keys[first : first + length].tolist() for first in range(0, len(keys), length)]
    results = list(min_by_epoch(lists, sizes.tolist(), budget))[1:]
    opens = sum(int(result.opens.sum()) for result in results)
    hits = sum(int(result.hits.sum()) for result in results)
    origin = sum(int(result.origin_bytes.sum()) for result in results)
    return Point("MIN by epoch", capacity, hits / opens, 0.0, origin / opens)


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent: Extent = arguments.extent
    torch.set_num_threads(1)
    pool = pool_in(arguments.data, extent)
    with scratch_directory("hits") as scratch:
        with closing(TraceWriter(scratch / "trace")) as writer, Progress(console=console, transient=True) as progress:
            task = progress.add_task("training", total=extent.epochs * -(-extent.training // BATCH))
            train(pool, RECORDED, "recorded", SEED, extent.epochs, lambda: progress.advance(task), writer)
        trace = read_trace(scratch / "trace")
        points, accesses = list(points_of(trace)), trace.accesses()
    for title, field, form in (
        ("Hits, share of reads", "hit_ratio", ".1%"),
        ("Origin bytes per sample served", "origin_bytes_per_sample", ".0f"),
        ("Reads given a substitute", "redirected_share", ".1%"),
    ):
        table = plain_table(title, "cache", *POLICIES_SHOWN, words=("cache",))
        for capacity in CAPACITIES:
            of_size = [point for point in points if point.capacity == capacity]
            found = {point.policy: format(getattr(point, field), form) for point in of_size}
            table.add_row(f"{capacity:.0%}", *(found[name] for name in POLICIES_SHOWN))
        console.print(table)
    return {
        "recorded": asdict(extent) | {"configuration": asdict(RECORDED)},
        "accesses": len(accesses),
        "distinct": accesses.distinct,
        "distinct_bytes": accesses.distinct_bytes,
        "points": [asdict(point) for point in points],
    }


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_data(program, IMAGES, required=True)
    main(measure, program)
