"""How many bytes the choices of the cache and of the sampler save, and how much accuracy they cost.

    .venv-dev/bin/python -m benchmarks.training.accuracy --data DIR --json FILE      all of it, more than an hour
    .venv-dev/bin/python -m benchmarks.training.accuracy --data DIR --quick    under a minute, for a look

Each configuration trains without a mount, as described in benchmarks/training/in_process.py, so that a run takes about
a minute and many runs can be compared. The benchmark says nothing about time.

The table shows what other caches would have fetched for the same draws, as multiples of what LRU fetches for uniform
sampling: a MIN that knows the whole training, and a MIN that knows each epoch when it begins. The last is all that a
sampler can publish whose draws depend on what is learned until then. What may be claimed of an accuracy follows from
its 95 % interval.

If FILE exists and holds runs of the same extent, these runs are not measured again. The list is sorted by class, as
that of torchvision's ImageFolder is and the archive of it, so neighbours are of one class.
"""

from __future__ import annotations

import argparse
import functools

import torch
from rich.console import Console

from benchmarks import tables
from benchmarks.common.command import Extent, add_data, add_names, command_line, main
from benchmarks.common.side_by_side import Task, add_jobs, measure_seeds
from benchmarks.training.in_process import AHEAD, Configuration, Pool, Run, pool_in, train
from benchmarks.training.training import BATCH, CACHED_SHARE, IMAGES, LEARNING_RATE

IMPORTANCE_ONLY = (1.0, 1.0)
CONFIGURATIONS = {
    "uniform": Configuration(scores=None),
    # Uniform too, but a sample is read twice shortly after each other.
    "echo 2": Configuration(scores=None, sampler="echo 2"),
    # The next configurations draw each sample once, and neighbours of the list near each other.
    "pool 4": Configuration(scores=None, sampler="pool 4"),
    "pool 16": Configuration(scores=None, sampler="pool 16"),
    "pool 64": Configuration(scores=None, sampler="pool 64"),
    "buffer of sorted shards": Configuration(scores=None, sampler="buffer of sorted shards"),
    # The next configurations draw by importance, and no sample has a substitute.
    "importance": Configuration(ratio=IMPORTANCE_ONLY),
    "weights": Configuration(ratio=IMPORTANCE_ONLY, weight_clip=4.0),
    "weights + coverage 0.3": Configuration(ratio=IMPORTANCE_ONLY, weight_clip=4.0, coverage=0.3),
    "weights + coverage 0.3 + settled 0.25": Configuration(
        ratio=IMPORTANCE_ONLY, weight_clip=4.0, coverage=0.3, settled=0.25
    ),
    "loss": Configuration(scores="loss", ratio=IMPORTANCE_ONLY),
    "loss + weights + coverage 0.3": Configuration(scores="loss", ratio=IMPORTANCE_ONLY, weight_clip=4.0, coverage=0.3),
    # The next configurations have substitutes.
    "spider": Configuration(),
    "stand-ins 2": Configuration(max_stand_ins=2),
    "stand-ins 16": Configuration(max_stand_ins=16),
}
FULL = Extent(epochs=12, training=10_000, held_out=10_000, seeds=3)
QUICK = Extent(epochs=3, training=1_500, held_out=1_000, seeds=1)
QUICK_CONFIGURATIONS = ("uniform", "importance", "spider", "loss")


def measure_task(pool: Pool, task: Task, epochs: int) -> Run:
    torch.set_num_threads(1)
    return train(pool, CONFIGURATIONS[task.configuration], task.configuration, task.seed, epochs)


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    arguments.configs = arguments.configs or list(QUICK_CONFIGURATIONS if arguments.quick else CONFIGURATIONS)
    measure_seeds(
        arguments,
        console,
        CONFIGURATIONS,
        {"batch": BATCH, "ahead": AHEAD, "cached_share": CACHED_SHARE, "learning_rate": LEARNING_RATE},
        functools.partial(pool_in, arguments.data, extent),
        functools.partial(measure_task, epochs=extent.epochs),
        lambda result: print(tables.equivalence(result)),
    )


def program() -> argparse.ArgumentParser:
    parser = command_line(__doc__, FULL, QUICK)
    add_data(parser, IMAGES, required=True)
    add_names(parser, "--configs", CONFIGURATIONS, f"to run (default all, quick {','.join(QUICK_CONFIGURATIONS)})")
    add_jobs(parser)
    return parser


if __name__ == "__main__":
    main(measure, program())
