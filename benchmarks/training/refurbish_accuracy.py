"""What it costs in accuracy to use partly augmented samples several times (`trainer_hook.refurbish`), seed by seed.

    .venv-dev/bin/python -m benchmarks.training.refurbish_accuracy --data DIR --json FILE --jobs 2
    .venv-dev/bin/python -m benchmarks.training.refurbish_accuracy --data DIR --quick       under a minute, for a look

A small network is trained on few images for many epochs, so that it needs augmentation: two layers of RandAugment, a
random crop, mirroring. With r=2 and r=3 both layers are cached, as in most experiments of Revamper's paper (section 7),
and crop and mirroring are drawn at each use. "echo" uses a sample several times with all that was drawn for it
(Revamper's section 4: data echoing). A run of a seed begins with the same weights in all configurations.

If FILE exists and holds runs of the same extent, these runs are not measured again. The benchmark says nothing about
time; that is benchmarks.serving.refurbish_speed.
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainer_hook
from benchmarks import tables
from benchmarks.common import augmentation
from benchmarks.common.command import Extent, add_data, add_names, command_line, main
from benchmarks.common.side_by_side import Task, add_jobs, measure_seeds
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

PADDING = 4
LAYERS = 2
FULL = Extent(epochs=40, training=1_500, held_out=10_000, seeds=6)
QUICK = Extent(epochs=3, training=400, held_out=500, seeds=1)


@dataclass(frozen=True)
class Configuration:
    split: int = LAYERS
    """So many of the steps (two layers of RandAugment, crop, mirroring, tensor) are cached."""
    reuse: int = 1


CONFIGURATIONS = {
    "standard": Configuration(),
    "r=2": Configuration(reuse=2),
    "r=3": Configuration(reuse=3),
    "echo 2": Configuration(split=LAYERS + 3, reuse=2),
    "echo 3": Configuration(split=LAYERS + 3, reuse=3),
}


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
    layers = [augmentation.Layer() for _ in range(LAYERS)]
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


def measure_task(pool: Pool, task: Task, epochs: int) -> Run:
    torch.set_num_threads(1)
    return train(pool, task.configuration, task.seed, epochs)


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    measure_seeds(
        arguments,
        console,
        CONFIGURATIONS,
        {"batch": BATCH, "learning_rate": LEARNING_RATE, "magnitude": augmentation.MAGNITUDE, "padding": PADDING},
        functools.partial(pool_in, arguments.data, extent),
        functools.partial(measure_task, epochs=extent.epochs),
        lambda result: print(tables.refurbish({}, result)),
    )


def program() -> argparse.ArgumentParser:
    parser = command_line(__doc__, FULL, QUICK)
    add_data(parser, IMAGES, required=True)
    add_names(parser, "--configs", CONFIGURATIONS, "to run (default all)", default=CONFIGURATIONS)
    add_jobs(parser)
    return parser


if __name__ == "__main__":
    main(measure, program())
