"""The papers' systems side by side, each with its own sampler and cache: what they save, and what it costs.

    .venv-dev/bin/python -m benchmarks.training.systems --data DIR --json FILE     all of it, twenty minutes
    .venv-dev/bin/python -m benchmarks.training.systems --data DIR --quick         under a minute, for a look

The benchmark trains without a mount, as benchmarks/training/in_process.py does, with the policies, scorings and
samplers of the product. It says nothing about time; benchmarks/training/train.py measures that. Each system has a
training of its own at each size of the cache, but those with uniform sampling draw the same samples whatever their
cache does, and share one.

    lru, lfu, minio   uniform sampling, each sample once in an epoch
    uniform+plan      MIN: the same with a cache that knows each epoch as it begins
    quiver            uniform too, but each batch takes what is cached of ten times as many candidates (Quiver); its
                      cache is filled once, since what is read in an epoch is of no use until the next
    echo 2, echo 3    each sample twice, or three times, while it is cached, and then not again before all others; the
                      engine knows each epoch when it begins (data echoing)
    infobatch         half of the samples below the mean loss are left out of an epoch and the rest weighs more; planned
    shade             draws by the ranks of losses, three times as often what is cached and above the mean, and what is
                      cached before all else; no floor
    icache, impact    half of the samples, the harder ones likelier; easy ones substitute within their class. impact
                      warms up, and evaluates again the samples whose rank varies most
    spider-paper      SpiderCache as its paper has it: draws by graph score, no floor, hubs substitute without limits; k
                      is 500. The paper gives no radius: it is calibrated, as the product does. Variants have one radius
                      for the training, or that of the released program among raw embeddings
    spider-released   the same, and samples that are cached and above the mean are drawn three times as often, as the
                      released program does it
    spider-imp        its part for important samples alone: no hubs
    spider            the same as spider-paper with the product's limits
    spider+plan       what the product does with its hook: a coverage floor of 0.3, losses weighted, the next epoch
                      drawn after a quarter of this one, and given to the engine; no substitutes, for with a plan next
                      to no read waits

"Planned" is what a MIN would fetch for a system's draws if it knew each epoch when the epoch begins, and "foreseen" if
it knew the whole training. At one size of the cache there are more trainings: with fewer epochs, since a system that
trains on less fetches less, and with other radii. If FILE exists and holds runs of the same extent, only those that
`--again` names are measured again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import tables
from benchmarks.common.command import Extent, add_data, add_names, command_line, main, numbers_of
from benchmarks.common.lists import MIN_BY_EPOCH, min_by_epoch, served
from benchmarks.common.results import machine, save
from benchmarks.common.side_by_side import add_jobs, counted, side_by_side
from benchmarks.training.in_process import AHEAD, Configuration, Pool, Run, pool_in, train
from benchmarks.training.systems_report import BASELINE, Epoch, Measured, plot_scores
from benchmarks.training.training import BATCH, CACHED_SHARE, IMAGES, LEARNING_RATE
from spiderfs.scorer.scorer import PAPERS_NEIGHBOURS
from spiderfs.simulation import Replay
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
# At one size only.
SHORTER = {"3/4": 0.75, "1/2": 0.5, "1/3": 1 / 3}
WHY = {f"uniform+plan, {name} of the epochs": replace(UNIFORM, epochs=share) for name, share in SHORTER.items()}
WHY |= BY_RADIUS

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
        # Settings that are newer than the file have their defaults in it, and those that are gone say nothing.
        now = json.loads(json.dumps(asdict(Configuration())))
        saved["configuration"] = now | {of: value for of, value in saved["configuration"].items() if of in now}
        # JSON has no tuples, so the settings are compared in the form in which they come out of a file.
        known = json.loads(json.dumps(asdict((SYSTEMS | WHY)[name]))) if name in SYSTEMS | WHY else None
        if known != saved and name not in again:
            raise RuntimeError(f"{path} is of another system by the name of {name}: --again {name} measures it again")
    return [Measured.of(of) for of in result["measured"] if of["system"] not in again]


# -- the program


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    arguments.shares = arguments.shares or list((CACHED_SHARE,) if arguments.quick else CACHED_SHARES)
    measured = [] if arguments.json is None else measured_in(arguments.json, extent, arguments.again)
    done = {Task(of.system, of.cached_share, of.seed) for of in measured}
    tasks, missing = tasks_of(arguments, extent, done)
    work = functools.partial(measure_task, usual_epochs=extent.epochs, missing=missing)
    prepare = functools.partial(pool_in, arguments.data, extent)
    console.print(f"{len(tasks)} trainings to do", highlight=False)
    try:
        for found in counted(side_by_side(prepare, work, tasks, arguments.jobs), tasks, console):
            measured += found
            console.print(*map(str, found), sep="\n", highlight=False, soft_wrap=True)
            save(arguments.json, result_of(extent, measured))
    finally:
        # An interrupted measurement shows what it has measured.
        if measured:
            show(result_of(extent, measured), arguments.plot_scores)


def show(result: dict[str, Any], picture: Path | None) -> None:
    names = dict.fromkeys(of["system"] for of in result["measured"])
    print(f"{CACHED_SHARE:.0%} cached\n{tables.systems(result, names)}\nhits, %\n{tables.cache_sizes(result, names)}")
    if picture is not None:
        plot_scores(result, picture)


def rounds(arguments: argparse.Namespace, extent: Extent) -> Iterator[tuple[int, list[float], Iterable[str]]]:
    """The seeds, the sizes of the cache and the systems to measure; what matters most comes first."""
    systems, why = ([name for name in table if name in arguments.systems] for table in (SYSTEMS, WHY))
    for seed in range(1, extent.seeds + 1):
        yield seed, [CACHED_SHARE], systems
    others = [share for share in arguments.shares if share != CACHED_SHARE]
    for seed in range(1, min(extent.seeds, arguments.other_seeds) + 1):
        yield seed, others, systems
    for seed in range(1, extent.seeds + 1):
        yield seed, [CACHED_SHARE], why


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


def add_plot_scores(parser: argparse.ArgumentParser) -> None:
    help_text = "write a picture of sigma, x_same and the radius over the epochs to FILE (SpiderCache, figure 6(c))"
    parser.add_argument("--plot-scores", type=Path, metavar="FILE", help=help_text)


def program() -> argparse.ArgumentParser:
    parser = command_line(__doc__, FULL, QUICK)
    add_data(parser, IMAGES, required=True)
    shares = ",".join(map(str, CACHED_SHARES))
    help_text = f"of the data set's bytes that are cached (default {shares}; quick {CACHED_SHARE})"
    parser.add_argument("--shares", type=numbers_of(float), metavar="A,B", help=help_text)
    help_text = f"seeds with sizes other than {CACHED_SHARE} (default %(default)s)"
    parser.add_argument("--other-seeds", type=int, default=1, metavar="N", help=help_text)
    add_names(parser, "--systems", SYSTEMS | WHY, "which to train besides uniform sampling", SYSTEMS | WHY)
    add_names(parser, "--again", SYSTEMS | WHY, "systems to measure again")
    add_jobs(parser)
    add_plot_scores(parser)
    return parser


if __name__ == "__main__":
    main(measure, program())
