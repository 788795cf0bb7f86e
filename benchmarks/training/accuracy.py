"""How many bytes the choices of the cache and of the sampler save, and how much accuracy they cost.

    .venv-dev/bin/python -m benchmarks.training.accuracy --data DIR --json FILE      all of it, more than an hour
    .venv-dev/bin/python -m benchmarks.training.accuracy --data DIR --quick    under a minute, for a look

DIR holds train/CLASS/NAME and test/CLASS/NAME. Each configuration trains without a mount, as described in
benchmarks/training/in_process.py, so that a run takes about a minute and many runs can be compared. The benchmark says
nothing about time.

For each run the table shows what its own cache fetched, and what other caches would have fetched for the same draws:
LRU, MinIO, a MIN that knows the whole training, and a MIN that knows each epoch when it begins. The last is all that a
sampler can publish whose draws depend on what is learned until then.

If FILE exists and holds runs of the same extent, these runs are not measured again. What may be claimed of an accuracy
follows from its 95 % interval. Where that is open, the table says how many seeds it takes; for the recommended
configuration, on two cores:

    .venv-dev/bin/python -m benchmarks.training.accuracy --data DIR --json FILE --train-samples 3000 --epochs 8 \\
      --jobs 2 --seeds 12 --configs 'uniform,echo 2,weights + coverage 0.3 + settled 0.25'

The list is sorted by class, as that of torchvision's ImageFolder is and the archive of it. So neighbours are of one
class, but for shards that were packed at random.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from benchmarks.common import intervals
from benchmarks.common.command import add_data, add_names, command_line
from benchmarks.common.extent import Extent, add_extent, extent_of
from benchmarks.common.interruption import exit_status
from benchmarks.common.lists import LIST_CACHES, MIN_BY_EPOCH
from benchmarks.common.results import machine, plain_table, save, spread, wide_console
from benchmarks.common.side_by_side import add_jobs, side_by_side, time_left
from benchmarks.training.in_process import AHEAD, Configuration, Epoch, Pool, Run, pool_in, train
from benchmarks.training.training import BATCH, CACHED_SHARE, IMAGES, LEARNING_RATE

TABLE_WIDTH = 170
MOST_ORIGIN = 0.5
IMPORTANCE_ONLY = (1.0, 1.0)

CONFIGURATIONS = {
    "uniform": Configuration(scores=None),
    # The next configurations are uniform too, but read a sample several times shortly after each other.
    "echo 2": Configuration(scores=None, sampler="echo 2"),
    "echo 3": Configuration(scores=None, sampler="echo 3"),
    "echo 4": Configuration(scores=None, sampler="echo 4"),
    # The next configurations draw each sample once, and neighbours of the list near each other.
    "pool 4": Configuration(scores=None, sampler="pool 4"),
    "pool 16": Configuration(scores=None, sampler="pool 16"),
    "pool 64": Configuration(scores=None, sampler="pool 64"),
    "buffer of mixed shards": Configuration(scores=None, sampler="buffer of mixed shards"),
    "buffer of sorted shards": Configuration(scores=None, sampler="buffer of sorted shards"),
    # The next configurations draw by importance, and no sample has a substitute.
    "importance": Configuration(ratio=IMPORTANCE_ONLY),
    "coverage 0.3": Configuration(ratio=IMPORTANCE_ONLY, coverage=0.3),
    "coverage 1": Configuration(ratio=IMPORTANCE_ONLY, coverage=1.0),
    "sharpness 0.5": Configuration(ratio=IMPORTANCE_ONLY, sharpness=0.5),
    "warm-up 3": Configuration(ratio=IMPORTANCE_ONLY, uniform_epochs=3),
    "radius 0.3": Configuration(ratio=IMPORTANCE_ONLY, radius_quantile=0.3),
    "radius 0.7": Configuration(ratio=IMPORTANCE_ONLY, radius_quantile=0.7),
    "weights": Configuration(ratio=IMPORTANCE_ONLY, weight_clip=4.0),
    "weights + coverage 0.3": Configuration(ratio=IMPORTANCE_ONLY, weight_clip=4.0, coverage=0.3),
    "weights + coverage 0.3 + settled 0.25": Configuration(
        ratio=IMPORTANCE_ONLY, weight_clip=4.0, coverage=0.3, settled=0.25
    ),
    "weights + sharpness 0.5": Configuration(ratio=IMPORTANCE_ONLY, weight_clip=4.0, sharpness=0.5),
    "loss": Configuration(scores="loss", ratio=IMPORTANCE_ONLY),
    "loss rank": Configuration(scores="rank", ratio=IMPORTANCE_ONLY),
    "loss + weights": Configuration(scores="loss", ratio=IMPORTANCE_ONLY, weight_clip=4.0),
    "loss + weights + coverage 0.3": Configuration(scores="loss", ratio=IMPORTANCE_ONLY, weight_clip=4.0, coverage=0.3),
    # The next configurations have substitutes.
    "spider": Configuration(),
    "ratio 90": Configuration(ratio=(0.9, 0.9)),
    "ratio 90-50": Configuration(ratio=(0.9, 0.5)),
    "stand-ins 2": Configuration(max_stand_ins=2),
    "stand-ins 4": Configuration(max_stand_ins=4),
    "stand-ins 16": Configuration(max_stand_ins=16),
    "late 0.1": Configuration(stand_in_share=0.1),
    "spider + weights": Configuration(weight_clip=4.0),
    "late 0.1 + weights": Configuration(stand_in_share=0.1, weight_clip=4.0),
}
BASELINE = "uniform"

FULL = Extent(epochs=12, training=10_000, held_out=10_000, seeds=3)
QUICK = Extent(epochs=3, training=1_500, held_out=1_000, seeds=1)
QUICK_CONFIGURATIONS = ("uniform", "importance", "spider", "loss")


# -- what it shows


@dataclass(frozen=True)
class Row:
    """One configuration against uniform sampling over an LRU, seed by seed."""

    name: str
    runs: list[Run]
    origin: list[float]
    """The origin bytes of its own cache, as multiples of those of LRU with uniform sampling."""
    lists: dict[str, list[float]]
    """The origin bytes of each of LIST_CACHES, as the same multiples."""
    gained: list[float]
    """The difference of its top-1 from that of uniform sampling, in points."""


def rows_of(runs: list[Run]) -> list[Row]:
    baseline = {run.seed: run for run in runs if run.configuration == BASELINE}
    rows = []
    for name in CONFIGURATIONS:
        ran = [run for run in runs if run.configuration == name and run.seed in baseline]
        if not ran:
            continue
        against = [baseline[run.seed] for run in ran]
        bases = [base.list_later("LRU") for base in against]
        rows.append(
            Row(
                name,
                ran,
                [run.later("origin_bytes_per_sample") / base for run, base in zip(ran, bases, strict=True)],
                {
                    cache: [run.list_later(cache) / base for run, base in zip(ran, bases, strict=True)]
                    for cache in LIST_CACHES
                },
                [100 * (run.top1 - base.top1) for run, base in zip(ran, against, strict=True)],
            )
        )
    return rows


def show(rows: list[Row], console: Console) -> None:
    headings = (
        "",
        "seeds",
        "hits %",
        "redirected %",
        "drawn %",
        "trained on %",
        "top-1 %",
        "- uniform, 95 %",
        "may be claimed",
    )
    table = plain_table("What was read and trained on", *headings)
    for row in rows:
        table.add_row(
            row.name,
            str(len(row.runs)),
            *(
                spread([run.later(field) for run in row.runs], ".1f", 100)
                for field in ("hit_ratio", "redirected_share", "drawn_share", "served_share")
            ),
            spread([run.top1 for run in row.runs], ".1f", 100),
            intervals.shown(row.gained),
            intervals.verdict(row.gained),
        )
    console.print(table)
    title = "Origin bytes per sample, in times of LRU's with uniform sampling; others on the same list"
    table = plain_table(title, "", "its cache", *LIST_CACHES, "reached by")
    for row in rows:
        table.add_row(
            row.name,
            spread(row.origin, ".2f"),
            *(spread(row.lists[cache], ".2f") for cache in LIST_CACHES),
            reached(row),
        )
    console.print(table)
    console.print(
        f"reached: at most {MOST_ORIGIN} x the bytes, and the whole interval of top-1 lies above "
        f"{-intervals.MARGIN_POINTS:g} points",
        highlight=False,
    )


def reached(row: Row) -> str:
    """The caches with which the configuration reaches both targets."""
    if not intervals.is_equivalent(intervals.interval_of(row.gained)):
        return ""
    caches = {"its cache": row.origin, MIN_BY_EPOCH: row.lists[MIN_BY_EPOCH]}
    return ", ".join(name for name, times in caches.items() if statistics.fmean(times) <= MOST_ORIGIN)


def print_run(run: Run, console: Console) -> None:
    last = run.epochs[-1]
    console.print(
        f"seed {run.seed}  {run.configuration:13} top-1 {run.top1:5.1%}  last epoch: hits {last.hit_ratio:5.1%}  "
        f"origin {last.origin_bytes_per_sample:4.0f} B  MIN by epoch {run.list_origin[MIN_BY_EPOCH][-1]:4.0f} B  "
        f"drawn {last.drawn_share:4.0%}  trained on {last.served_share:4.0%}  redirected {last.redirected_share:5.1%}  "
        f"ratio {last.ratio:.2f}  ({run.seconds:.0f} s)",
        highlight=False,
        soft_wrap=True,
    )


def plot(rows: list[Row], path: Path) -> None:
    """Draw what each configuration costs and saves: lower is cheaper, further right is better."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(11, 7), layout="constrained")
    for number, row in enumerate(rows):
        across = intervals.interval_of(row.gained)
        half_width = across.half_width if across.seeds > 1 else None
        own, planned = statistics.fmean(row.origin), statistics.fmean(row.lists[MIN_BY_EPOCH])
        # Of the 20 colours, those with even numbers are strong and the others pale.
        colour = pyplot.cm.tab20(2 * number % 20)
        axis.plot([across.mean] * 2, [own, planned], color=colour, linewidth=0.6)
        for up, marker in ((own, "o"), (planned, "x")):
            axis.errorbar(across.mean, up, xerr=half_width, marker=marker, color=colour, elinewidth=0.6)
        axis.annotate(row.name, (across.mean, own), (4, 4), textcoords="offset points", fontsize=8, rotation=30)
    axis.axvline(-intervals.MARGIN_POINTS, color="grey", linewidth=0.8, linestyle="--")
    axis.axhline(MOST_ORIGIN, color="grey", linewidth=0.8, linestyle="--")
    axis.set(
        xlabel="top-1 less that of uniform sampling, points (bars: 95 % intervals)",
        ylabel="origin bytes per sample, in times of LRU's with uniform sampling",
        title=f"o: its own cache   x: {MIN_BY_EPOCH} on the same list   dashed: the targets",
    )
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# -- the program


def result_of(extent: Extent, runs: list[Run]) -> dict[str, Any]:
    return {
        "machine": machine(),
        "extent": identity(extent),
        "configurations": {run.configuration: asdict(CONFIGURATIONS[run.configuration]) for run in runs},
        "runs": [asdict(run) for run in runs],
    }


def identity(extent: Extent) -> dict[str, Any]:
    """The settings that all runs of a table must have in common."""
    common = {"batch": BATCH, "ahead": AHEAD, "cached_share": CACHED_SHARE, "learning_rate": LEARNING_RATE}
    return asdict(extent) | {"seeds": 0} | common


def runs_in(path: Path, extent: Extent) -> list[Run]:
    """The runs of an earlier measurement; raises RuntimeError if they were made with other settings."""
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    if result["extent"] != identity(extent):
        raise RuntimeError(f"{path} holds runs of another extent: {result['extent']}; choose another file with --json")
    runs = [Run(**run | {"epochs": [Epoch(**epoch) for epoch in run["epochs"]]}) for run in result["runs"]]
    for name, saved in result["configurations"].items():
        if CONFIGURATIONS.get(name) != Configuration(**saved | {"ratio": tuple(saved["ratio"])}):
            raise RuntimeError(
                f"{path} holds runs of another configuration named {name}; choose another file with --json"
            )
    return runs


class Task(NamedTuple):
    seed: int
    configuration: str


def measure_task(pool: Pool, task: Task, epochs: int) -> Run:
    torch.set_num_threads(1)
    return train(pool, CONFIGURATIONS[task.configuration], task.configuration, task.seed, epochs)


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    runs = [] if arguments.json is None else runs_in(arguments.json, extent)
    done = {(run.seed, run.configuration) for run in runs}
    asked = itertools.product(range(1, extent.seeds + 1), arguments.configs)
    tasks = [Task(seed, name) for seed, name in asked if (seed, name) not in done]
    console.print(
        f"{extent.training:,} training images, {extent.held_out:,} held out, {extent.epochs} epochs; "
        f"cache {CACHED_SHARE:.0%}; {len(runs)} runs are there already, {len(tasks)} to do",
        highlight=False,
    )
    prepare = functools.partial(pool_in, arguments.data, extent)
    work = functools.partial(measure_task, epochs=extent.epochs)
    began = time.monotonic()
    try:
        for number, run in enumerate(side_by_side(prepare, work, tasks, arguments.jobs), 1):
            runs.append(run)
            print_run(run, console)
            save(arguments.json, result_of(extent, runs))
            left = time_left(number, len(tasks), time.monotonic() - began)
            console.print(left, style="dim", highlight=False)
    finally:
        # An interrupted measurement shows what it has measured.
        rows = rows_of(runs)
        if rows:
            console.print(
                "\nmean ± deviation over seeds, differences with their 95 % interval; of later epochs, without the "
                "first; top-1 after the last"
            )
            show(rows, console)
            if arguments.plot is not None:
                plot(rows, arguments.plot)


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add_data(parser, IMAGES, required=True)
    add_extent(parser, FULL, QUICK)
    add_names(parser, "--configs", CONFIGURATIONS, f"to run (default all, quick {','.join(QUICK_CONFIGURATIONS)})")
    add_jobs(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture to FILE")
    arguments = parser.parse_args()
    arguments.configs = arguments.configs or list(QUICK_CONFIGURATIONS if arguments.quick else CONFIGURATIONS)
    arguments.extent = extent_of(parser, arguments, FULL, QUICK)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    console = wide_console(TABLE_WIDTH)
    return exit_status("accuracy", lambda: measure(arguments, console), "interrupted", (OSError, RuntimeError))


if __name__ == "__main__":
    sys.exit(main())
