"""Two trainings with different networks on one list and one cache: what each has of it, together and alone.

    .venv-dev/bin/python -m benchmarks.training.two_jobs --data DIR --json FILE      twenty minutes on a quiet core
    .venv-dev/bin/python -m benchmarks.training.two_jobs --data DIR --quick          under a minute, for a look

The scores of two networks are numbers of different units, for their embeddings share no space. Both trainings are as
`spider` in benchmarks/training/systems.py, without a mount, one with a residual network and the other with a plain one
of other widths. They take turns, a batch each, and each draws by its own scores. With a fifth of the data cached:

    alone            each has a cache of this size for itself
    alone, half      each has a cache of half the size for itself: the two together have the room of one
    together         both have one cache; a sample's worth is the largest of its normalised ranks in the two
                     (spiderfs/core/learning/feed.py), as in a mount
    last writer      the same, but a sample's worth is the score that either has written last, as before trainings had
                     job datasets

A training's random numbers do not depend on whether it is alone, but what it is served does. Fetched bytes count for
the training that had to wait for them. If FILE exists, what it has is not measured again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import nn

from benchmarks.common import intervals
from benchmarks.common.command import add_data, command_line
from benchmarks.common.extent import Extent, add_extent, extent_of
from benchmarks.common.interruption import exit_status
from benchmarks.common.results import machine, plain_table, save, spread, wide_console
from benchmarks.common.side_by_side import add_jobs, side_by_side, time_left
from benchmarks.training.in_process import AHEAD, Configuration, Epoch, Pool, SharedCache, Training, pool_in
from benchmarks.training.training import BATCH, CACHED_SHARE, IMAGES, LEARNING_RATE, SMALL, Recipe
from spiderfs.core.learning.feed import Worth, Worths
from spiderfs.core.policy import Key

TABLE_WIDTH = 140
FULL = Extent(epochs=8, training=3_000, held_out=2_000, seeds=3)
QUICK = Extent(epochs=3, training=300, held_out=200, seeds=1)
CONFIGURATION = Configuration()


def plain_network(classes: int) -> nn.Sequential:
    """Four convolutions without shortcuts."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((3, 24, 32, 48, 96)):
        layers += [nn.Conv2d(before, after, 3, 2 if before in (3, 32) else 1, 1, bias=False), nn.BatchNorm2d(after)]
        layers.append(nn.ReLU())
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, classes))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


RECIPES = {"residual": SMALL, "plain": Recipe(network=plain_network)}


class LastWriter(Worths):
    """The rule before trainings had job datasets: a sample's worth is the score that was written last, whoever wrote
    it."""

    def scored(self, job_dataset_id: str, keys: Sequence[Key], scores: Sequence[float]) -> Iterable[Worth]:
        return zip(keys, scores, strict=True)


class Arrangement(NamedTuple):
    together: bool
    worths: Callable[[], Worths] = Worths
    share: float = 1.0  # of the usual capacity, for each cache


ARRANGEMENTS = {
    "alone": Arrangement(False),
    "alone, half": Arrangement(False, share=0.5),
    "together": Arrangement(True),
    "last writer": Arrangement(True, LastWriter),
}


# -- measuring


class Task(NamedTuple):
    arrangement: str
    seed: int


@dataclass(frozen=True)
class Job:
    """The figures of one of the two trainings."""

    arrangement: str
    network: str
    seed: int
    epochs: list[Epoch]
    top1: float
    mean_bytes: float

    @property
    def fetched(self) -> float:
        """The bytes fetched in the whole training, in times of the data set's bytes."""
        return sum(epoch.origin_bytes_per_sample * epoch.reads_share for epoch in self.epochs) / self.mean_bytes

    def later(self, field: str) -> float:
        """The mean over all epochs but the first, which fills the cache."""
        return statistics.fmean(getattr(epoch, field) for epoch in self.epochs[1:])


def measure_task(pool: Pool, task: Task, epochs: int) -> list[Job]:
    torch.set_num_threads(1)
    arrangement = ARRANGEMENTS[task.arrangement]
    configuration = replace(CONFIGURATION, cached_share=CACHED_SHARE * arrangement.share)

    def shared() -> SharedCache:
        return SharedCache(configuration, pool.sizes, pool.capacity(configuration.cached_share), arrangement.worths())

    one = shared()
    trainings = {
        name: Training(
            pool, configuration, task.seed, epochs, recipe=recipe, shared=one if arrangement.together else shared()
        )
        for name, recipe in RECIPES.items()
    }
    found = in_turns({name: each_epoch(training, epochs) for name, training in trainings.items()}, task.seed)
    mean_bytes = statistics.fmean(pool.sizes)
    return [
        Job(task.arrangement, name, task.seed, found[name], training.top1(pool.held_out), mean_bytes)
        for name, training in trainings.items()
    ]


Running = Generator[None, None, list[Epoch]]


def each_epoch(training: Training, epochs: int) -> Running:
    """Train batch by batch; returns the figures of all epochs."""
    done = []
    for number in range(1, epochs + 1):
        _, figures = yield from training.steps_of(number)
        done.append(figures)
    return done


def in_turns(running: dict[str, Running], seed: int) -> dict[str, list[Epoch]]:
    """Go on with each training by one batch after another, each with random numbers of its own."""
    done: dict[str, list[Epoch]] = {}
    states = {name: torch.Generator().manual_seed(seed).get_state() for name in running}
    while running:
        for name, steps in list(running.items()):
            torch.set_rng_state(states[name])
            try:
                next(steps)
            except StopIteration as stopped:
                done[name] = stopped.value
                del running[name]
            states[name] = torch.get_rng_state()
    return done


# -- what it shows


def show(jobs: list[Job], console: Console) -> None:
    table = plain_table(
        f"Two trainings, {CACHED_SHARE:.0%} cached; hits and substitutes without the first epoch",
        *("", "network", "seeds", "hits %", "substitutes %", "fetched", "x alone", "top-1 %", "- alone, 95 %"),
        words=("", "network"),
    )
    for arrangement, network in itertools.product(ARRANGEMENTS, RECIPES):
        ran = [job for job in jobs if (job.arrangement, job.network) == (arrangement, network)]
        alone = {job.seed: job for job in jobs if (job.arrangement, job.network) == ("alone", network)}
        beside = [job for job in ran if job.seed in alone]
        if not ran:
            continue
        table.add_row(
            arrangement,
            network,
            str(len(ran)),
            spread([job.later("hit_ratio") for job in ran], ".1f", 100),
            spread([job.later("redirected_share") for job in ran], ".1f", 100),
            spread([job.fetched for job in ran], ".2f"),
            spread([job.fetched / alone[job.seed].fetched for job in beside], ".2f") if beside else "",
            spread([job.top1 for job in ran], ".1f", 100),
            intervals.shown([100 * (job.top1 - alone[job.seed].top1) for job in beside]),
        )
    console.print(table)
    table = plain_table("Both trainings", "", "seeds", "fetched by both", "x alone", "x last writer")
    sums = {arrangement: by_seed(jobs, arrangement) for arrangement in ARRANGEMENTS}
    for arrangement, fetched in sums.items():
        if fetched:
            beside_each = (
                [both / sums[other][seed] for seed, both in fetched.items() if seed in sums[other]]
                for other in ("alone", "last writer")
            )
            cells = (spread(times, ".2f") if times else "" for times in beside_each)
            table.add_row(arrangement, str(len(fetched)), spread(list(fetched.values()), ".2f"), *cells)
    console.print(table)
    console.print("fetched: in the whole training, in times of the data set", highlight=False)


def by_seed(jobs: list[Job], arrangement: str) -> dict[int, float]:
    """What both trainings of an arrangement fetched together, for each seed that has both."""
    found: dict[int, list[float]] = {}
    for job in jobs:
        if job.arrangement == arrangement:
            found.setdefault(job.seed, []).append(job.fetched)
    return {seed: sum(fetched) for seed, fetched in found.items() if len(fetched) == len(RECIPES)}


# -- the program


def identity(extent: Extent) -> dict[str, Any]:
    """The settings that all trainings of a table have in common, in the form in which they come out of a file."""
    common = {"batch": BATCH, "ahead": AHEAD, "learning_rate": LEARNING_RATE, "configuration": asdict(CONFIGURATION)}
    settings: dict[str, Any] = json.loads(json.dumps(asdict(extent) | {"seeds": 0} | common))
    return settings


def result_of(extent: Extent, jobs: list[Job]) -> dict[str, Any]:
    return {"machine": machine(), "extent": identity(extent), "jobs": [asdict(job) for job in jobs]}


def jobs_in(path: Path, extent: Extent) -> list[Job]:
    """The figures of an earlier measurement; raises RuntimeError if it was made with other settings."""
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    if result["extent"] != identity(extent):
        raise RuntimeError(f"{path} is of a measurement with other settings; choose another file with --json")
    return [Job(**job | {"epochs": [Epoch(**epoch) for epoch in job["epochs"]]}) for job in result["jobs"]]


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    jobs = [] if arguments.json is None else jobs_in(arguments.json, extent)
    done = {Task(job.arrangement, job.seed) for job in jobs}
    asked = (Task(name, seed) for seed in range(1, extent.seeds + 1) for name in ARRANGEMENTS)
    tasks = [task for task in asked if task not in done]
    console.print(f"{len(tasks)} pairs of trainings to do", highlight=False)
    prepare = functools.partial(pool_in, arguments.data, extent)
    work = functools.partial(measure_task, epochs=extent.epochs)
    began = time.monotonic()
    try:
        for number, found in enumerate(side_by_side(prepare, work, tasks, arguments.jobs), 1):
            jobs += found
            save(arguments.json, result_of(extent, jobs))
            left = time_left(number, len(tasks), time.monotonic() - began)
            console.print(f"{found[0].arrangement}, seed {found[0].seed}: {left}", highlight=False)
    finally:
        # An interrupted measurement shows what it has measured.
        if jobs:
            show(jobs, console)


def main() -> int:
    parser = command_line(__doc__)
    add_data(parser, IMAGES, required=True)
    add_extent(parser, FULL, QUICK)
    add_jobs(parser)
    arguments = parser.parse_args()
    arguments.extent = extent_of(parser, arguments, FULL, QUICK)
    console = wide_console(TABLE_WIDTH)
    return exit_status("two_jobs", lambda: measure(arguments, console), "interrupted", (OSError, RuntimeError))


if __name__ == "__main__":
    sys.exit(main())
