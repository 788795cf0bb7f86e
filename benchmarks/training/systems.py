"""The papers' systems side by side, each with its own sampler and cache: what they save, and what it costs.

    .venv/bin/python -m benchmarks.training.systems --data DIR --json FILE --plot PNG    all of it, twenty minutes
    .venv/bin/python -m benchmarks.training.systems --data DIR --quick             under a minute, for a look

The benchmark trains without a mount, as benchmarks/training/in_process.py does, with the policies, scorings and
samplers of the product. It says nothing about time; benchmarks/training/train.py measures that. What a sampler draws
depends on what the model has learned, and with some samplers on what the cache holds, so each system has a training of
its own at each size of the cache. Systems with uniform sampling draw the same samples whatever their cache does, and
share one training.

    lru, lfu, minio   uniform sampling, each sample once in an epoch
    quiver            the same, but each batch takes what is cached of ten times as many candidates (Quiver); its cache
                      is filled once, since what is read in an epoch is of no use until the next
    echo 2            each sample twice while it is cached, and then not again before all others; the engine is told of
                      each epoch when it begins (data echoing)
    shade             draws by the ranks of losses, three times as often what is cached and above the mean
    icache            half of the samples, the harder ones likelier; easy ones stand in within their class
    impact            the same after a warm-up, with those re-evaluated whose rank varies most
    spider-paper      SpiderCache as its paper has it: draws by graph score, hubs stand in for whatever they can
    spider            the same with the product's limits
    spider+plan       what the product does with its hook: a coverage floor of 0.3, losses weighted, the next epoch
                      drawn after a quarter of this one, and the engine told of it; no stand-in, for through a mount
                      only reads get one that nobody has begun to fetch, and with a plan those are next to none
    uniform+plan      MIN: uniform sampling with a cache that knows each epoch as it begins

"planned" is what a MIN would fetch for a system's draws if it knew each epoch when the epoch begins, and "MIN" if it
knew the whole training. At one size of the cache there are more trainings, which show why systems differ: the same
systems with fewer or more epochs, since a system that trains on less fetches less, and variants of shade. If FILE
exists and holds runs of the same extent, only those that `--again` names are measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Container, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.common.command import add_data, add_names, command_line
from benchmarks.common.extent import Extent, add_extent, extent_of
from benchmarks.common.interruption import exit_status
from benchmarks.common.lists import MIN_BY_EPOCH, min_by_epoch, served
from benchmarks.common.results import machine, save, wide_console
from benchmarks.training.in_process import AHEAD, Configuration, Epoch, Pool, Run, decode, train
from benchmarks.training.systems_report import WIDTH, Measured, plot, print_measured, show
from benchmarks.training.training import BATCH, CACHED_SHARE, IMAGES, LEARNING_RATE, find_data
from spiderfs.simulation.replay import Replay
from trainer_hook import SpiderSampler

CACHED_SHARES = (0.1, 0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class System:
    configuration: Configuration
    epochs: float = 1.0
    """How many epochs this system trains, as a multiple of the others' number."""


UNIFORM = System(Configuration(scores=None))
# Caches that serve the draws of a uniform training: the policy, and whether the engine gets the plan.
UNIFORM_CACHES = {
    "lru": ("lru", False),
    "lfu": ("lfu", False),
    "minio": ("minio", False),
    "uniform+plan": ("minio", True),
}
SHADE = Configuration(scores="rank", policy="shade", sampler="shade", coverage=0.1)
IMPACT = Configuration(scores="loss", policy="impact", sampler="impact")
SPIDER_PAPER = Configuration()
SPIDER_PLANNED = Configuration(coverage=0.3, weight_clip=4.0, settled=0.25, planned=True, stand_in_share=0.0)
SYSTEMS = {
    "quiver": System(Configuration(scores=None, unscored_policy="minio", oversampling=10)),
    "echo 2": System(Configuration(scores=None, unscored_policy="minio", sampler="echo 2", planned=True)),
    "shade": System(SHADE),
    "icache": System(Configuration(scores="loss", policy="icache", sampler="icache")),
    "impact": System(IMPACT),
    "spider-paper": System(SPIDER_PAPER),
    "spider": System(Configuration()),
    "spider+plan": System(SPIDER_PLANNED),
}
ROWS = (*(name for name in UNIFORM_CACHES if name != "uniform+plan"), *SYSTEMS, "uniform+plan")
# At one size only: fewer epochs for systems that cost little accuracy, more for those that train on half of the
# samples, and shade with some of its parts.
SHORTER = {"3/4": 0.75, "1/2": 0.5, "1/3": 1 / 3}
WHY = {
    **{f"uniform+plan, {name} of the epochs": replace(UNIFORM, epochs=share) for name, share in SHORTER.items()},
    **{f"spider+plan, {name} of the epochs": System(SPIDER_PLANNED, share) for name, share in SHORTER.items()},
    "spider+plan, 5/4 of the epochs": System(SPIDER_PLANNED, 1.25),
    "impact, twice the epochs": System(IMPACT, 2.0),
    "shade, weights and plan": System(replace(SHADE, coverage=0.3, weight_clip=4.0, settled=0.25, planned=True)),
    "shade, no repeats": System(replace(SHADE, sampler="shade without repeats")),
    "shade, 4 repeats, no floor": System(replace(SHADE, coverage=0.0, sampler="shade with 4 repeats")),
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


def measure_system(pool: Pool, task: Task, usual_epochs: int, progress: Progress) -> Measured:
    system = (SYSTEMS | WHY)[task.system]
    configuration = replace(system.configuration, cached_share=task.cached_share)
    run = trained(pool, configuration, task, max(2, round(usual_epochs * system.epochs)), progress)
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


def measure_uniform(
    pool: Pool, shares: list[float], seed: int, usual_epochs: int, progress: Progress
) -> Iterator[Measured]:
    """One training, whose draws are replayed through every cache at every size."""
    run = trained(pool, UNIFORM.configuration, Task("uniform", CACHED_SHARE, seed), usual_epochs, progress)
    for share, cache in itertools.product(shares, UNIFORM_CACHES):
        yield through(cache, Task(cache, share, seed), run, pool)


def trained(pool: Pool, configuration: Configuration, task: Task, epochs: int, progress: Progress) -> Run:
    batches = -(-len(pool.sizes) // BATCH)
    shown = progress.add_task(f"seed {task.seed}, {task.system}, {task.cached_share:.0%}", total=epochs * batches)
    run = train(pool, configuration, task.system, task.seed, epochs, lambda: progress.advance(shown))
    progress.remove_task(shown)
    return run


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
        # JSON has no tuples, so the settings are compared in the form in which they come out of a file.
        known = json.loads(json.dumps(asdict((SYSTEMS | WHY)[name]))) if name in SYSTEMS | WHY else None
        if known != saved and name not in again:
            raise RuntimeError(f"{path} is of another system by the name of {name}: --again {name} measures it anew")
    return [
        Measured(**of | {"epochs": [Epoch(**epoch) for epoch in of["epochs"]]})
        for of in result["measured"]
        if of["system"] not in again
    ]


# -- the program


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    torch.set_num_threads(1)
    measured = [] if arguments.json is None else measured_in(arguments.json, extent, arguments.again)
    done = {(of.system, of.cached_share, of.seed) for of in measured}
    pool = decode(find_data(arguments.data, extent))

    def keep(*found: Measured) -> None:
        measured.extend(found)
        for of in found:
            print_measured(of, console)
        if arguments.json is not None:
            save(arguments.json, result_of(extent, measured))

    try:
        with Progress(console=console, transient=True) as progress:
            for seed, shares, names in rounds(arguments, extent):
                missing = [share for share in shares if ("lru", share, seed) not in done]
                if missing:
                    keep(*measure_uniform(pool, missing, seed, extent.epochs, progress))
                    done.update(("lru", share, seed) for share in missing)
                for share, name in itertools.product(shares, names):
                    if (name, share, seed) not in done:
                        keep(measure_system(pool, Task(name, share, seed), extent.epochs, progress))
    finally:
        # An interrupted measurement shows what it has measured.
        if measured:
            show(measured, ROWS, console)
            if arguments.plot is not None:
                plot(measured, ROWS, arguments.plot)


def rounds(arguments: argparse.Namespace, extent: Extent) -> Iterator[tuple[int, list[float], Iterable[str]]]:
    """The seeds, the sizes of the cache and the systems to measure; what matters most comes first."""
    for seed in range(1, extent.seeds + 1):
        yield seed, [arguments.why_share], SYSTEMS
    others = [share for share in arguments.shares if share != arguments.why_share]
    for seed in range(1, min(extent.seeds, arguments.seeds_elsewhere) + 1):
        yield seed, others, SYSTEMS
    for seed in range(1, extent.seeds + 1):
        yield seed, [arguments.why_share], WHY


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
        "--seeds-elsewhere", type=int, default=1, metavar="N", help="with all other sizes (default %(default)s)"
    )
    add_names(parser, "--again", SYSTEMS | WHY, "systems to measure anew")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture to FILE")
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
