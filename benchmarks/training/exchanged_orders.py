"""What three trainings reach that exchange samples, each against its own run alone: top-1, as 95 % intervals.

    .venv-dev/bin/python -m benchmarks.training.exchanged_orders --data DIR --json FILE     a quarter of an hour
    .venv-dev/bin/python -m benchmarks.training.exchanged_orders --data DIR --quick         under a minute, for a look

Exchange changes nothing but the order in which a training reads its samples. The orders of three jobs side by side, a
fifth cached, come from benchmarks/engine/jobs.py (`exchange, ahead`), and a small network is trained on each of them.
Alone, the same network with the same weights at first reads in orders of its own, each a uniform shuffle. A seed gives
three pairs of trainings; since the orders of its three jobs are alike, the last row has one difference for each seed,
the mean of its three.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from rich.console import Console
from torch import nn

from benchmarks.common import intervals
from benchmarks.common.command import add_data, command_line
from benchmarks.common.extent import Extent, add_extent, extent_of
from benchmarks.common.interruption import exit_status
from benchmarks.common.results import machine, plain_table, save, spread, wide_console
from benchmarks.common.side_by_side import add_jobs, side_by_side
from benchmarks.engine.jobs import SYSTEMS, Setting
from benchmarks.engine.jobs import Run as JobsRun
from benchmarks.training.in_process import Pool, pool_in
from benchmarks.training.training import BATCH, IMAGES, SMALL, Steps, evaluate

TABLE_WIDTH = 100
JOBS = 3
FULL = Extent(epochs=6, training=2_000, held_out=2_000, seeds=6)
QUICK = Extent(epochs=2, training=320, held_out=200, seeds=2)

Orders = list[list[int]]
"""The samples of each epoch of one training, in the order in which it reads them."""


class Task(NamedTuple):
    seed: int
    job: int


@dataclass(frozen=True)
class Pair:
    """The top-1 of one training in orders of its own and in orders with exchange."""

    seed: int
    job: int
    alone: float
    together: float

    @property
    def points(self) -> float:
        return 100 * (self.together - self.alone)


@functools.cache
def exchanged_orders(extent: Extent, seed: int) -> dict[int, Orders]:
    """The orders of all jobs of a seed."""
    # Three batches are in hand of each job, as with loaders of two workers; in small lists these are shorter.
    batch = min(BATCH, extent.training // 50)
    setting = Setting(jobs=JOBS, samples=extent.training, batch=batch, epochs=extent.epochs + 1)
    run = JobsRun(SYSTEMS["exchange, ahead"](setting, random.Random(f"system {seed}")), setting, seed)
    run.run("exchange, ahead")
    return {job: orders[: extent.epochs] for job, orders in run.orders.items()}


def own_orders(extent: Extent, task: Task) -> Orders:
    chance = random.Random(f"alone {task.seed} {task.job}")
    return [chance.sample(range(extent.training), extent.training) for _ in range(extent.epochs)]


def train(pool: Pool, orders: Orders, seed: int) -> float:
    """Train a network from the weights of this seed; returns its top-1 on the images that are held out."""
    torch.manual_seed(seed)
    model = SMALL.network(pool.held_out.classes)
    steps = Steps(model, len(orders), len(pool.images))
    model.train()
    for epoch, order in enumerate(orders):
        batches = torch.split(torch.tensor(order), BATCH)
        for number, batch in enumerate(batches, 1):
            loss = nn.functional.cross_entropy(model(SMALL.augmented(pool.images[batch])), pool.labels[batch])
            steps.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            steps.optimizer.step()
            steps.taken(epoch, number, len(batches))
    return evaluate(model, pool.held_out)


def measure_task(pool: Pool, task: Task, extent: Extent) -> Pair:
    torch.set_num_threads(1)
    seed = JOBS * task.seed + task.job
    alone = train(pool, own_orders(extent, task), seed)
    return Pair(task.seed, task.job, alone, train(pool, exchanged_orders(extent, task.seed)[task.job], seed))


def show(pairs: list[Pair], console: Console) -> None:
    table = plain_table(
        "Top-1 of three jobs that exchange, against each alone",
        *("", "seeds", "alone, %", "together, %", "difference, 95 %", " "),
        words=("", " "),
    )
    for job in range(JOBS):
        ran = [pair for pair in pairs if pair.job == job]
        if ran:
            table.add_row(f"job {job + 1}", *cells(ran, [pair.points for pair in ran]))
    table.add_row("all", *cells(pairs, by_seed(pairs)))
    console.print(table)


def cells(pairs: list[Pair], differences: list[float]) -> tuple[str, ...]:
    return (
        str(len(differences)),
        spread([pair.alone for pair in pairs], ".1f", 100),
        spread([pair.together for pair in pairs], ".1f", 100),
        intervals.shown(differences),
        intervals.verdict(differences),
    )


def by_seed(pairs: list[Pair]) -> list[float]:
    """The mean difference of each seed's jobs."""
    found: dict[int, list[float]] = {}
    for pair in pairs:
        found.setdefault(pair.seed, []).append(pair.points)
    return [statistics.fmean(points) for points in found.values()]


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    tasks = [Task(seed, job) for seed in range(extent.seeds) for job in range(JOBS)]
    prepare = functools.partial(pool_in, arguments.data, extent)
    pairs: list[Pair] = []
    try:
        with console.status("Training"):
            for pair in side_by_side(prepare, functools.partial(measure_task, extent=extent), tasks, arguments.jobs):
                pairs.append(pair)
    finally:
        # An interrupted measurement shows what it has measured.
        if pairs:
            show(pairs, console)
    if arguments.json is not None:
        rows = [asdict(pair) for pair in sorted(pairs, key=lambda pair: (pair.seed, pair.job))]
        save(arguments.json, {"machine": machine(), "extent": asdict(extent), "pairs": rows})


def main() -> int:
    parser = command_line(__doc__)
    add_data(parser, IMAGES, required=True)
    add_extent(parser, FULL, QUICK)
    add_jobs(parser)
    arguments = parser.parse_args()
    arguments.extent = extent_of(parser, arguments, FULL, QUICK)
    console = wide_console(TABLE_WIDTH)
    return exit_status("exchanged_orders", lambda: measure(arguments, console), "interrupted", (OSError, RuntimeError))


if __name__ == "__main__":
    sys.exit(main())
