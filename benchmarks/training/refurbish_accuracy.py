"""What it costs in accuracy to use partly augmented samples several times (`trainer_hook.refurbish`), seed by seed.

    .venv-dev/bin/python -m benchmarks.training.refurbish_accuracy --data DIR --json FILE --jobs 2
    .venv-dev/bin/python -m benchmarks.training.refurbish_accuracy --data DIR --quick       under a minute, for a look

DIR holds train/CLASS/NAME and test/CLASS/NAME. A small network is trained on few images for many epochs, so that it
needs augmentation: two layers of RandAugment, a random crop, mirroring. With r=2 and r=3 both layers are cached, as in
most experiments of Revamper's paper (section 7), and crop and mirroring are drawn at each use. "crop and mirror" leaves
the two layers out: it shows whether they help at all. "echo" uses a sample several times with all that was drawn for it
(Revamper's section 4: data echoing). "naive" renews all samples in the same epochs, without balanced eviction and
cache-aware shuffle. A run of a seed begins with the same weights in all configurations.

If FILE exists and holds runs of the same extent, these runs are not measured again. The benchmark says nothing about
time; that is benchmarks.serving.refurbish_speed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainer_hook
from benchmarks.common import augmentation, intervals
from benchmarks.common.command import add_data, add_names, command_line
from benchmarks.common.extent import Extent, add_extent, extent_of
from benchmarks.common.interruption import exit_status
from benchmarks.common.results import machine, plain_table, save, spread, wide_console
from benchmarks.common.schedules import NaiveGenerations
from benchmarks.common.side_by_side import add_jobs, side_by_side, time_left
from benchmarks.training.training import (
    BATCH,
    IMAGES,
    LEARNING_RATE,
    PIXELS,
    Data,
    Steps,
    evaluate,
    find_data,
    pixels,
    small_network,
)
from trainer_hook.refurbishing import loader as loaders
from trainer_hook.refurbishing.generations import Generations

TABLE_WIDTH = 100
PADDING = 4
LAYERS = 2
BASELINE = "standard"
FULL = Extent(epochs=40, training=1_500, held_out=10_000, seeds=6)
QUICK = Extent(epochs=3, training=400, held_out=500, seeds=1)


@dataclass(frozen=True)
class Configuration:
    layers: int = LAYERS
    """Layers of RandAugment, before crop and mirroring."""
    split: int = LAYERS
    """So many of the steps are cached."""
    reuse: int = 1


CONFIGURATIONS = {
    BASELINE: Configuration(),
    "r=2": Configuration(reuse=2),
    "r=3": Configuration(reuse=3),
    "crop and mirror": Configuration(layers=0),
    "naive, r=2": Configuration(reuse=2),
    "naive, r=3": Configuration(reuse=3),
    "one layer, r=2": Configuration(split=1, reuse=2),
    "one layer, r=3": Configuration(split=1, reuse=3),
    "echo 2": Configuration(split=LAYERS + 3, reuse=2),
    "echo 3": Configuration(split=LAYERS + 3, reuse=3),
}
NAIVE = ("naive, r=2", "naive, r=3")
DEFAULT = (BASELINE, "r=2", "r=3", "crop and mirror")


@dataclass(frozen=True)
class Run:
    configuration: str
    seed: int
    top1: float
    seconds: float


class Pictures(Dataset[tuple[Any, int]]):
    """Decoded images with their labels, and a pipeline for them."""

    def __init__(self, images: list[Image.Image], labels: list[int], transform: Callable[[Any], Any]) -> None:
        self.images = images
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), self.labels[index]


class Pool(NamedTuple):
    images: list[Image.Image]
    data: Data


def pool_in(directory: Path, extent: Extent) -> Pool:
    """The images of a directory, each training image decoded once."""
    data = find_data(directory, extent)
    images = []
    for path, _ in data.training:
        with open(data.root / path, "rb") as file:
            images.append(Image.fromarray(pixels(file).permute(1, 2, 0).contiguous().numpy()))
    return Pool(images, data)


def loader_of(pool: Pool, configuration: Configuration, seed: int) -> DataLoader[Any]:
    layers = [augmentation.Layer() for _ in range(configuration.layers)]
    steps: list[Any] = [*layers, augmentation.Crop(PIXELS, PADDING), augmentation.mirrored, augmentation.as_numbers]
    labels = [label for _, label in pool.data.training]
    dataset = Pictures(pool.images, labels, augmentation.Compose(steps))
    loader: DataLoader[Any] = DataLoader(dataset, BATCH, shuffle=True)
    return trainer_hook.refurbish(loader, split=configuration.split, reuse=configuration.reuse, seed=seed)


def train(pool: Pool, name: str, seed: int, epochs: int) -> Run:
    began = time.monotonic()
    for begin in (torch.manual_seed, np.random.seed, random.seed):
        begin(seed)
    model: nn.Sequential = small_network(pool.data.classes)
    with patch.object(loaders, "Generations", NaiveGenerations if name in NAIVE else Generations):
        loader = loader_of(pool, CONFIGURATIONS[name], seed)
    steps = Steps(model, epochs, len(pool.images))
    for epoch in range(epochs):
        model.train()
        for number, (images, labels) in enumerate(loader, 1):
            loss: Tensor = nn.functional.cross_entropy(model(images), labels)
            steps.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            steps.optimizer.step()
            steps.taken(epoch, number, len(loader))
    return Run(name, seed, evaluate(model, pool.data), time.monotonic() - began)


class Task(NamedTuple):
    seed: int
    configuration: str


def measure_task(pool: Pool, task: Task, epochs: int) -> Run:
    torch.set_num_threads(1)
    return train(pool, task.configuration, task.seed, epochs)


def gained(runs: list[Run], name: str) -> list[float]:
    """The differences of a configuration's top-1 from the baseline's, in points, seed by seed."""
    baseline = {run.seed: run.top1 for run in runs if run.configuration == BASELINE}
    ran = (run for run in runs if run.configuration == name)
    return [100 * (run.top1 - baseline[run.seed]) for run in ran if run.seed in baseline]


def show(runs: list[Run], console: Console) -> None:
    table = plain_table("Top-1", "", "seeds", "top-1 %", f"- {BASELINE}, 95 %", "may be claimed")
    for name in CONFIGURATIONS:
        found = [run.top1 for run in runs if run.configuration == name]
        if found:
            differences = [] if name == BASELINE else gained(runs, name)
            claim = intervals.verdict(differences)
            table.add_row(name, str(len(found)), spread(found, ".1f", 100), intervals.shown(differences, "+.2f"), claim)
    console.print(table)


def identity(extent: Extent) -> dict[str, Any]:
    """The settings that all runs of a table must have in common."""
    common = {"batch": BATCH, "learning_rate": LEARNING_RATE, "magnitude": augmentation.MAGNITUDE, "padding": PADDING}
    return asdict(extent) | {"seeds": 0} | common


def result_of(extent: Extent, runs: list[Run]) -> dict[str, Any]:
    return {
        "machine": machine(),
        "extent": identity(extent),
        "configurations": {run.configuration: asdict(CONFIGURATIONS[run.configuration]) for run in runs},
        "runs": [asdict(run) for run in runs],
    }


def runs_in(path: Path | None, extent: Extent) -> list[Run]:
    """The runs of an earlier measurement; raises RuntimeError if they were made with other settings."""
    if path is None or not path.exists():
        return []
    result = json.loads(path.read_text())
    named = {name: asdict(CONFIGURATIONS[name]) for name in result["configurations"] if name in CONFIGURATIONS}
    if result["extent"] != identity(extent) or result["configurations"] != named:
        raise RuntimeError(f"{path} holds runs of another extent or configuration; choose another file with --json")
    return [Run(**run) for run in result["runs"]]


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    runs = runs_in(arguments.json, extent)
    done = {(run.seed, run.configuration) for run in runs}
    asked = itertools.product(range(1, extent.seeds + 1), arguments.configs)
    tasks = [Task(seed, name) for seed, name in asked if (seed, name) not in done]
    console.print(
        f"{extent.training:,} training images, {extent.held_out:,} held out, {extent.epochs} epochs; "
        f"{len(runs)} runs are there already, {len(tasks)} to do",
        highlight=False,
    )
    prepare = functools.partial(pool_in, arguments.data, extent)
    work = functools.partial(measure_task, epochs=extent.epochs)
    began = time.monotonic()
    try:
        for number, run in enumerate(side_by_side(prepare, work, tasks, arguments.jobs), 1):
            runs.append(run)
            save(arguments.json, result_of(extent, runs))
            left = time_left(number, len(tasks), time.monotonic() - began)
            text = f"seed {run.seed}  {run.configuration:15} top-1 {run.top1:5.1%}  ({run.seconds:.0f} s; {left})"
            console.print(text, highlight=False)
    finally:
        # An interrupted measurement shows what it has measured.
        if runs:
            show(runs, console)


def main() -> int:
    parser = command_line(__doc__)
    add_data(parser, IMAGES, required=True)
    add_extent(parser, FULL, QUICK)
    add_names(parser, "--configs", CONFIGURATIONS, f"to run (default {','.join(DEFAULT)})", default=DEFAULT)
    add_jobs(parser)
    arguments = parser.parse_args()
    arguments.extent = extent_of(parser, arguments, FULL, QUICK)
    console = wide_console(TABLE_WIDTH)
    return exit_status(
        "refurbish_accuracy", lambda: measure(arguments, console), "interrupted", (OSError, RuntimeError)
    )


if __name__ == "__main__":
    sys.exit(main())
