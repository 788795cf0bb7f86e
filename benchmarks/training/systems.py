"""The papers' systems side by side, each with its own sampler and cache: what they save, and what it costs.

    .venv-dev/bin/python -m benchmarks.training.systems --data DIR --json FILE --plot PNG    all of it, twenty minutes
    .venv-dev/bin/python -m benchmarks.training.systems --data DIR --quick             under a minute, for a look

The benchmark trains without a mount, as benchmarks/training/in_process.py does, with the policies, scorings and
samplers of the product. It says nothing about time; benchmarks/training/train.py measures that. What a sampler draws
depends on what the model has learned, and with some samplers on what the cache holds, so each system has a training of
its own at each size of the cache. Systems with uniform sampling draw the same samples whatever their cache does, and
share one training.

    lru, lfu, minio   uniform sampling, each sample once in an epoch
    quiver            the same, but each batch takes what is cached of ten times as many candidates (Quiver); its cache
                      is filled once, since what is read in an epoch is of no use until the next
    echo 2            each sample twice while it is cached, and then not again before all others; the engine knows
                      each epoch when it begins (data echoing)
    echo 3            three times
    infobatch         half of the samples below the mean loss are left out of an epoch and the rest weighs more; planned
    infobatch, echo 2 the same, each sample twice while it is cached
    shade             draws by the ranks of losses, three times as often what is cached and above the mean, and what is
                      cached before all else; no floor
    icache            half of the samples, the harder ones likelier; easy ones substitute within their class
    impact            the same after a warm-up, with those re-evaluated whose rank varies most
    spider-paper      SpiderCache as its paper has it: draws by graph score, no floor, hubs substitute for whatever they
                      can, without limits; k is 500. The paper gives no radius: it is calibrated, as the product does.
                      Variants have one radius for the training, within which a share of a class lies, or the radius of
                      the released program among raw embeddings
    spider-released   the same with what its released program has beside: samples that are cached and above the mean are
                      drawn three times as often, as SHADE does it. What cannot be had by a configuration:
                      1 / (x_same + 1) for isolated samples, hubs that are chosen at random and leave when they are
                      least often used
    spider-imp        its part for important samples alone: no hubs
    spider            the same as spider-paper with the product's limits
    spider+plan       what the product does with its hook: a coverage floor of 0.3, losses weighted, the next epoch
                      drawn after a quarter of this one, and given to the engine; no substitute, for through a mount
                      only reads get one that no one has begun to fetch, and with a plan those are next to none
    uniform+plan      MIN: uniform sampling with a cache that knows each epoch as it begins

"Planned" is what a MIN would fetch for a system's draws if it knew each epoch when the epoch begins, and "foreseen" if
it knew the whole training. At one size of the cache there are more trainings, which show why systems differ: the same
systems with fewer or more epochs, since a system that trains on less fetches less, and variants of shade and of
spider-paper. If FILE exists and holds runs of the same extent, only those that `--again` names are measured again.

Tables at the end set the figures beside those that the papers report (benchmarks/training/papers.py). Figure 14 and
table 6 of SpiderCache, of three seeds each, some ten minutes on a quiet core:

    .venv-dev/bin/python -m benchmarks.training.systems --data DIR --json FILE --other-seeds 3 \\
      --shares 0.1,0.25,0.5,0.75 --why-share 0.25 --systems spider-paper,spider-imp,shade,icache
    .venv-dev/bin/python -m benchmarks.training.systems --data DIR --json FILE --epochs 24 --shares 0.2 \\
      --systems 'spider-paper, ratio 90,spider-paper,spider-paper, ratio 90-50'
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.common.command import add_data, add_names, command_line
from benchmarks.common.extent import Extent, add_extent, extent_of
from benchmarks.common.interruption import exit_status
from benchmarks.common.lists import MIN_BY_EPOCH, min_by_epoch, served
from benchmarks.common.results import machine, save, wide_console
from benchmarks.common.side_by_side import add_jobs, side_by_side, time_left
from benchmarks.training.in_process import AHEAD, REDUCIBLE, Configuration, Epoch, Pool, Run, pool_in, train
from benchmarks.training.papers import compare
from benchmarks.training.systems_report import (
    BASELINE,
    WIDTH,
    Measured,
    add_plot_scores,
    grouped,
    plot,
    plot_scores,
    print_measured,
    show,
)
from benchmarks.training.training import BATCH, CACHED_SHARE, IMAGES, LEARNING_RATE
from spiderfs.scorer import SCORINGS
from spiderfs.scorer.scorer import PAPERS_NEIGHBOURS
from spiderfs.scorer.scoring import LEAST_LOSS, LossScores, Scores
from spiderfs.simulation.replay import Replay
from trainer_hook import SpiderSampler

CACHED_SHARES = (0.1, 0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class System:
    configuration: Configuration
    epochs: float = 1.0
    """How many epochs this system trains, as a multiple of the others' number."""


UNIFORM = System(Configuration(scores=None))
UNIFORM_NAME = "uniform"
# Caches that serve the draws of a uniform training: the policy, and whether the engine gets the plan.
UNIFORM_CACHES = {
    "lru": ("lru", False),
    "lfu": ("lfu", False),
    "minio": ("minio", False),
    "uniform+plan": ("minio", True),
}
SHADE = Configuration(scores="rank", policy="shade", sampler="shade")
IMPACT = Configuration(scores="loss", policy="impact", sampler="impact")
SPIDER_PAPER = Configuration(max_stand_ins=None, max_neighbours=None, neighbours=PAPERS_NEIGHBOURS)
COARSE = {"lru": "lru", "lfu": "lfu", "app": "shade"}
SPIDER_PLANNED = Configuration(coverage=0.3, weight_clip=4.0, settled=0.25, planned=True, stand_in_share=0.0)
# Each sample once in an epoch, or several times and then not again for a while; MIN knows the plan.
PLANNED = Configuration(scores=None, unscored_policy="minio", planned=True)
# The weights are at most 2.
WEIGHTED = replace(PLANNED, weight_clip=2.0)
SYSTEMS = {
    "quiver": System(Configuration(scores=None, unscored_policy="minio", oversampling=10)),
    "echo 2": System(replace(PLANNED, sampler="echo 2")),
    "echo 3": System(replace(PLANNED, sampler="echo 3")),
    "infobatch": System(replace(WEIGHTED, sampler="infobatch")),
    "infobatch, echo 2": System(replace(WEIGHTED, sampler="infobatch, echo 2")),
    "shade": System(SHADE),
    "icache": System(Configuration(scores="loss", policy="icache", sampler="icache")),
    "impact": System(IMPACT),
    "spider-paper": System(SPIDER_PAPER),
    "spider-released": System(replace(SPIDER_PAPER, sampler="spider released")),
    "spider-imp": System(replace(SPIDER_PAPER, ratio=(1.0, 1.0))),
    "spider": System(Configuration()),
    "spider+plan": System(SPIDER_PLANNED),
}
ROWS = (*(name for name in UNIFORM_CACHES if name != "uniform+plan"), *SYSTEMS, "uniform+plan")


class BatchLoss(LossScores):
    """The coarse importance of SHADE's "sh_" variants (section 6.2): each sample has the mean loss of its batch."""

    FILE = "batch-losses.npz"

    def _scores_of(self, losses: Scores) -> Scores:
        return np.full_like(losses, max(losses.mean(), LEAST_LOSS))


SCORINGS["batch loss"] = BatchLoss
# One radius for a whole training: within which a share of a class lies, or that of SpiderCache's released program.
RELEASED_RADIUS = 1.42
RADII: dict[str, dict[str, Any]] = {
    "radius of 5 % of a class": {"radius": "class", "radius_share": 0.05},
    "radius of 1 % of a class": {"radius": "class", "radius_share": 0.01},
    "released radius": {"radius": RELEASED_RADIUS, "embeddings": "raw"},
}
BY_RADIUS = {
    f"{name}, {radius}": System(replace(configuration, **settings))
    for name, configuration in (("spider-paper", SPIDER_PAPER), ("spider+plan", SPIDER_PLANNED))
    for radius, settings in RADII.items()
}
# At one size only: fewer epochs for systems that cost little accuracy, more for those that train on half of the
# samples, and shade with some of its parts.
SHORTER = {"3/4": 0.75, "1/2": 0.5, "1/3": 1 / 3}
WHY = {
    **{f"uniform+plan, {name} of the epochs": replace(UNIFORM, epochs=share) for name, share in SHORTER.items()},
    **{f"spider+plan, {name} of the epochs": System(SPIDER_PLANNED, share) for name, share in SHORTER.items()},
    "spider+plan, 5/4 of the epochs": System(SPIDER_PLANNED, 1.25),
    "spider-paper, ratio 90": System(replace(SPIDER_PAPER, ratio=(0.9, 0.9))),
    "spider-paper, ratio 90-50": System(replace(SPIDER_PAPER, ratio=(0.9, 0.5))),
    **BY_RADIUS,
    "impact, twice the epochs": System(IMPACT, 2.0),
    "impact, reducible loss": System(replace(IMPACT, sampler=REDUCIBLE)),
    "shade, weights and plan": System(replace(SHADE, coverage=0.3, weight_clip=4.0, settled=0.25, planned=True)),
    "shade, while improving": System(replace(SHADE, sampler="shade while improving")),
    "shade, in any order": System(replace(SHADE, sampler="shade in any order")),
    "shade, no repeats": System(replace(SHADE, sampler="shade without repeats")),
    "shade, 4 repeats": System(replace(SHADE, sampler="shade with 4 repeats")),
    "shade, floor of 0.1": System(replace(SHADE, coverage=0.1)),
    # The variants of SHADE's figure 7 for which there is a policy.
    **{f"sh_{name}": System(Configuration(scores="batch loss", policy=policy)) for name, policy in COARSE.items()},
}

# The extent of train.py, but for the number of held-out images: that benchmark trains the same through mounts.
FULL = Extent(epochs=8, training=3_000, held_out=10_000, seeds=3)
QUICK = Extent(epochs=4, training=600, held_out=500, seeds=1)


# -- measuring


@dataclass(frozen=True)
class Task:
    system: str
    cached_share: float
    seed: int


def epochs_of(system: System, usual: int) -> int:
    """How many epochs this system trains, where others train `usual`."""
    return max(2, round(usual * system.epochs))


# For each seed the sizes of the cache, in order.
Shares = dict[int, dict[float, None]]


def measure_task(pool: Pool, task: Task, usual_epochs: int, missing: Shares) -> list[Measured]:
    torch.set_num_threads(1)
    if task.system == UNIFORM_NAME:
        return list(measure_uniform(pool, list(missing[task.seed]), task.seed, usual_epochs))
    return [measure_system(pool, task, usual_epochs)]


def measure_system(pool: Pool, task: Task, usual_epochs: int) -> Measured:
    system = (SYSTEMS | WHY)[task.system]
    configuration = replace(system.configuration, cached_share=task.cached_share)
    run = train(pool, configuration, task.system, task.seed, epochs_of(system, usual_epochs))
    if system.configuration == UNIFORM.configuration:
        return through("uniform+plan", task, run, pool)
    return measured_of(task, run, pool)


def measured_of(task: Task, run: Run, pool: Pool) -> Measured:
    """The figures of a training with its own cache."""
    return Measured(
        **asdict(task),
        epochs=run.epochs,
        top1=run.top1,
        mean_bytes=mean_bytes_of(pool),
        planned=origin_shares(run, MIN_BY_EPOCH, pool),
        foreseen=origin_shares(run, "MIN", pool) if "MIN" in run.list_origin else [],
        seconds=run.seconds,
    )


def measure_uniform(pool: Pool, shares: list[float], seed: int, usual_epochs: int) -> Iterator[Measured]:
    """One training, whose draws are replayed through every cache at every size."""
    run = train(pool, UNIFORM.configuration, UNIFORM_NAME, seed, usual_epochs)
    for share, cache in itertools.product(shares, UNIFORM_CACHES):
        yield through(cache, Task(cache, share, seed), run, pool)


def through(cache: str, task: Task, run: Run, pool: Pool) -> Measured:
    """The figures of this cache if it had served a uniform training, whose draws do not depend on its cache."""
    sampler = SpiderSampler(len(pool.sizes), seed=task.seed)
    lists = [list(sampler) for _ in run.epochs]
    capacity = pool.capacity(task.cached_share)
    all_bytes = sum(pool.sizes)

    def shares(replays: Iterator[Replay]) -> list[float]:
        return [int(replayed.origin_bytes.sum()) / all_bytes for replayed in replays]

    return Measured(
        **asdict(task),
        epochs=epochs_through(cache, run, lists, pool.sizes, capacity),
        top1=run.top1,
        mean_bytes=mean_bytes_of(pool),
        planned=shares(min_by_epoch(lists, pool.sizes, capacity)),
        foreseen=shares(served("belady", lists, pool.sizes, capacity)),
        seconds=run.seconds,
    )


def epochs_through(cache: str, run: Run, lists: list[list[int]], sizes: list[int], capacity: int) -> list[Epoch]:
    """The epochs of a uniform training, with hits and bytes as this cache has them for what was read."""
    policy, planned = UNIFORM_CACHES[cache]
    return [
        replace(epoch, hit_ratio=replayed.hit_ratio, origin_bytes_per_sample=replayed.origin_bytes_per_sample)
        for epoch, replayed in zip(run.epochs, served(policy, lists, sizes, capacity, planned), strict=True)
    ]


def origin_shares(run: Run, cache: str, pool: Pool) -> list[float]:
    """The bytes that this cache would have fetched in each epoch for the same draws: shares of the data set's bytes."""
    by_epoch = zip(run.list_origin[cache], run.epochs, strict=True)
    return [origin * epoch.reads_share / mean_bytes_of(pool) for origin, epoch in by_epoch]


def mean_bytes_of(pool: Pool) -> float:
    return sum(pool.sizes) / len(pool.sizes)


# -- what is kept


def result_of(extent: Extent, measured: list[Measured], **others: Any) -> dict[str, Any]:
    names = {of.system for of in measured}
    return {
        "machine": machine(),
        "extent": identity(extent, **others),
        "systems": {name: asdict(system) for name, system in (SYSTEMS | WHY).items() if name in names},
        "measured": [asdict(of) for of in measured],
    }


def identity(extent: Extent, **others: Any) -> dict[str, Any]:
    """The settings that all trainings of a table must have in common; `others` are those that differ from ours."""
    common = {"batch": BATCH, "ahead": AHEAD, "learning_rate": LEARNING_RATE} | others
    return asdict(extent) | {"seeds": 0} | common


def measured_in(path: Path, extent: Extent, again: Container[str], **others: Any) -> list[Measured]:
    """The results of an earlier measurement; raises RuntimeError if they were made with other settings."""
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    if result["extent"] != identity(extent, **others):
        raise RuntimeError(f"{path} is of a measurement of another extent: {result['extent']}")
    for name, saved in result["systems"].items():
        # Settings that are newer than the file have their defaults in it.
        saved["configuration"] = json.loads(json.dumps(asdict(Configuration()))) | saved["configuration"]
        # JSON has no tuples, so the settings are compared in the form in which they come out of a file.
        known = json.loads(json.dumps(asdict((SYSTEMS | WHY)[name]))) if name in SYSTEMS | WHY else None
        if known != saved and name not in again:
            raise RuntimeError(f"{path} is of another system by the name of {name}: --again {name} measures it again")
    return [
        Measured(**of | {"epochs": [Epoch(**epoch) for epoch in of["epochs"]]})
        for of in result["measured"]
        if of["system"] not in again
    ]


# -- the program


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    measured = [] if arguments.json is None else measured_in(arguments.json, extent, arguments.again)
    done = {Task(of.system, of.cached_share, of.seed) for of in measured}
    tasks, missing = tasks_of(arguments, extent, done)
    work = functools.partial(measure_task, usual_epochs=extent.epochs, missing=missing)
    prepare = functools.partial(pool_in, arguments.data, extent)
    console.print(f"{len(tasks)} trainings to do", highlight=False)
    began = time.monotonic()
    try:
        for number, found in enumerate(side_by_side(prepare, work, tasks, arguments.jobs), 1):
            measured += found
            for of in found:
                print_measured(of, console)
            save(arguments.json, result_of(extent, measured))
            left = time_left(number, len(tasks), time.monotonic() - began)
            console.print(left, style="dim", highlight=False)
    finally:
        # An interrupted measurement shows what it has measured.
        if measured:
            show(measured, ROWS, console)
            compare(grouped(measured), console)
            if arguments.plot is not None:
                plot(measured, ROWS, arguments.plot)
            if arguments.plot_scores is not None:
                plot_scores(measured, arguments.plot_scores)


def rounds(arguments: argparse.Namespace, extent: Extent) -> Iterator[tuple[int, list[float], Iterable[str]]]:
    """The seeds, the sizes of the cache and the systems to measure; what matters most comes first."""
    systems, why = ([name for name in table if name in arguments.systems] for table in (SYSTEMS, WHY))
    for seed in range(1, extent.seeds + 1):
        yield seed, [arguments.why_share], systems
    others = [share for share in arguments.shares if share != arguments.why_share]
    for seed in range(1, min(extent.seeds, arguments.other_seeds) + 1):
        yield seed, others, systems
    for seed in range(1, extent.seeds + 1):
        yield seed, [arguments.why_share], why


def tasks_of(arguments: argparse.Namespace, extent: Extent, done: Container[Task]) -> tuple[list[Task], Shares]:
    """What is left to measure, in order, and the sizes at which each seed's uniform training is still to be served."""
    tasks: dict[Task, None] = {}
    missing: Shares = {}
    for seed, shares, names in rounds(arguments, extent):
        for share in shares:
            if Task(BASELINE, share, seed) not in done:
                missing.setdefault(seed, {})[share] = None
                tasks[Task(UNIFORM_NAME, CACHED_SHARE, seed)] = None
        tasks |= dict.fromkeys(Task(name, share, seed) for share, name in itertools.product(shares, names))
    return [task for task in tasks if task not in done], missing


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add_data(parser, IMAGES, required=True)
    add_extent(parser, FULL, QUICK)
    parser.add_argument(
        "--shares",
        metavar="A,B",
        help="of the data set's bytes that are cached (default 0.1,0.2,0.4,0.6,0.8, quick 0.2)",
    )
    parser.add_argument(
        "--why-share",
        type=float,
        default=CACHED_SHARE,
        metavar="A",
        help="of these the one with all seeds, and more trainings (default %(default)s)",
    )
    parser.add_argument(
        "--other-seeds", type=int, default=1, metavar="N", help="with all other sizes (default %(default)s)"
    )
    add_names(parser, "--systems", SYSTEMS | WHY, "which to train besides uniform sampling", SYSTEMS | WHY)
    add_names(parser, "--again", SYSTEMS | WHY, "systems to measure again")
    add_jobs(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture to FILE")
    add_plot_scores(parser)
    arguments = parser.parse_args()
    arguments.extent = extent_of(parser, arguments, FULL, QUICK)
    default = (CACHED_SHARE,) if arguments.quick else CACHED_SHARES
    arguments.shares = [float(share) for share in arguments.shares.split(",")] if arguments.shares else list(default)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    console = wide_console(WIDTH)
    return exit_status("systems", lambda: measure(arguments, console), "interrupted", (OSError, RuntimeError))


if __name__ == "__main__":
    sys.exit(main())
