"""Hit ratio and origin bytes over the size of the cache, for the reads of a real training (SpiderCache, figure 14).

    .venv-dev/bin/python -m benchmarks.engine.hit_ratio --data DIR --json FILE --plot PNG  about three minutes
    .venv-dev/bin/python -m benchmarks.engine.hit_ratio --data DIR --quick                 some seconds, for a look
    .venv-dev/bin/python -m benchmarks.engine.hit_ratio --trace FILE                       what `-o trace=FILE` recorded

With --data, the benchmark first records a training as in benchmarks/training/in_process.py. Its sampler draws by graph
score, and no sample has a substitute, so the trace does not depend on the cache of that training. Then every policy
serves the same trace at every size, through `spiderfs.simulation.replay`, with the scores, hubs and ratios that the
scorer had found at that time:

    spider      important samples, and hubs that substitute for what is not cached
    importance  the same without room for hubs, so without substitutes
    minio       keeps what came first
    lru, lfu    evict what was used longest ago, least often
    MIN         knows the whole training, and keeps what is used next soonest
    MIN by epoch  knows each epoch once it begins: what a sampler can publish that draws by what was learned

The rows of uniform sampling need no trace: they are c + (1 - c) ln(1 - c) for LRU, and c for MinIO and MIN.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.common.command import add_data, command_line
from benchmarks.common.extent import Extent
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.lists import lru_hits, min_by_epoch
from benchmarks.common.results import machine, plain_table, save, wide_console
from benchmarks.training.in_process import Configuration, pool_in, train
from benchmarks.training.training import BATCH, IMAGES
from spiderfs.core.engine import Engine
from spiderfs.core.hints import Ratio
from spiderfs.errors import UsageError
from spiderfs.policies import POLICIES
from spiderfs.simulation.replay import Replay, policy_for, replay
from spiderfs.trace.format import Accesses, Trace, TraceWriter, read_trace

CAPACITIES = (0.10, 0.25, 0.50, 0.75)
# The scorer finds hubs, which the section of hubs needs, but no sample gets a substitute.
RECORDED = Configuration(stand_in_share=0.0)
SEED = 1
TABLE_WIDTH = 110
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


def points_of(trace: Trace, epoch_length: int | None, advance: Any = lambda: None) -> Iterator[Point]:
    """Replay a trace with every policy at every size; raises UsageError if it is shorter than two epochs."""
    accesses, hints = trace.accesses(), trace.hints()
    length = epoch_length or accesses.distinct
    if len(accesses) < 2 * length:
        raise UsageError(f"{len(accesses)} accesses are not two epochs of {length}")
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
            advance()
        yield by_epoch_point(accesses, length, capacity, budget)
        advance()


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


# -- the trace


@contextmanager
def recorded(data: Path, extent: Extent, console: Console) -> Iterator[Path]:
    """The trace of a training, deleted when the context ends."""
    with scratch_directory("hits") as scratch:
        path = scratch / "trace"
        torch.set_num_threads(1)
        pool = pool_in(data, extent)
        with closing(TraceWriter(path)) as writer, Progress(console=console, transient=True) as progress:
            task = progress.add_task("training", total=extent.epochs * -(-extent.training // BATCH))
            train(pool, RECORDED, "recorded", SEED, extent.epochs, lambda: progress.advance(task), writer)
        yield path


# -- what it shows


def show(points: list[Point], console: Console) -> None:
    for title, field, form, factor in (
        ("Hits, % of reads", "hit_ratio", ".1f", 100),
        ("Origin bytes per sample served", "origin_bytes_per_sample", ".0f", 1),
    ):
        more = ("lru, uniform",) if field == "hit_ratio" else ()
        table = plain_table(title, "cache", *POLICIES_SHOWN, *more, words=("cache",))
        for capacity in CAPACITIES:
            found = {point.policy: getattr(point, field) * factor for point in points if point.capacity == capacity}
            cells = [format(found[name], form) for name in POLICIES_SHOWN if name in found]
            if field == "hit_ratio":
                cells.append(format(100 * lru_hits(capacity), form))
            table.add_row(f"{capacity:.0%}", *cells)
        console.print(table)
    shares = {point.capacity: point.redirected_share for point in points if point.policy == "spider"}
    console.print(
        "redirected by spider, % of reads: "
        + ", ".join(f"{100 * share:.1f} with {capacity:.0%}" for capacity, share in shares.items())
    )


def plot(points: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {
        "spider": "#2ca02c",
        "importance": "#ff7f0e",
        "minio": "#1f77b4",
        "lru": "#7f7f7f",
        "lfu": "#8c564b",
        "MIN": "#000000",
        "MIN by epoch": "#d62728",
    }
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axis, field, factor, title in (
        (axes[0], "hit_ratio", 100, "hits, % of reads"),
        (axes[1], "origin_bytes_per_sample", 1, "origin bytes per sample served"),
    ):
        for name in POLICIES_SHOWN:
            along = [(100 * point.capacity, factor * getattr(point, field)) for point in points if point.policy == name]
            style = ":" if name == "MIN" else "-"
            axis.plot(*zip(*along, strict=True), style, marker="o", ms=4, color=colours[name], label=name)
        axis.set(xlabel="cache, % of the bytes of all samples", title=title, xticks=[100 * c for c in CAPACITIES])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    smooth = np.linspace(0.05, 0.8, 40)
    axes[0].plot(
        100 * smooth, [100 * lru_hits(c) for c in smooth], "--", color="#bbbbbb", label="lru, uniform sampling"
    )
    # The legend stands in the right panel, which has room and all lines but one.
    axes[1].legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# -- the program


def measure(trace: Path, arguments: argparse.Namespace, console: Console) -> None:
    read = read_trace(trace)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replaying", total=len(CAPACITIES) * len(POLICIES_SHOWN))
        points = list(points_of(read, arguments.epoch, lambda: progress.advance(task)))
    accesses = read.accesses()
    console.print(
        f"{len(accesses):,} reads of {accesses.distinct:,} samples, {accesses.distinct_bytes:,} bytes; "
        "without the first epoch",
        highlight=False,
    )
    show(points, console)
    result = {
        "machine": machine(),
        "recorded": None if arguments.trace else asdict(arguments.extent) | {"configuration": asdict(RECORDED)},
        "accesses": len(accesses),
        "distinct": accesses.distinct,
        "distinct_bytes": accesses.distinct_bytes,
        "points": [asdict(point) for point in points],
    }
    save(arguments.json, result)
    if arguments.plot is not None:
        plot(points, arguments.plot)


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    add_data(source, f"record a training on these images: {IMAGES}")
    source.add_argument("--trace", type=Path, metavar="FILE", help="replay what `-o trace=FILE` has recorded")
    parser.add_argument("--epoch", type=int, metavar="N", help="reads per epoch (default: one per sample)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture to FILE")
    arguments = parser.parse_args()
    arguments.extent = QUICK if arguments.quick else FULL
    return arguments


def main() -> int:
    arguments = parse_arguments()
    console = wide_console(TABLE_WIDTH)

    def measure_either() -> None:
        if arguments.trace is not None:
            measure(arguments.trace, arguments, console)
        else:
            with recorded(arguments.data, arguments.extent, console) as trace:
                measure(trace, arguments, console)

    expected = (OSError, RuntimeError, UsageError)
    return exit_status("hit_ratio", measure_either, "interrupted; the trace is deleted", expected)


if __name__ == "__main__":
    sys.exit(main())
