"""How fast a loader is that uses partly augmented samples several times (`trainer_hook.refurbish`), beside standard.

    .venv-dev/bin/python -m benchmarks.serving.refurbish_speed                 some four minutes
    .venv-dev/bin/python -m benchmarks.serving.refurbish_speed --data DIR      the same, of the images in DIR
    .venv-dev/bin/python -m benchmarks.serving.refurbish_speed --quick         under a minute, for a look
    .venv-dev/bin/python -m benchmarks.serving.refurbish_speed --table-1       Revamper's table 1, some four minutes

A PyTorch DataLoader with two workers decodes JPEGs of ImageNet's size from an immutable mount, resizes the shorter side
to 256, applies two layers of RandAugment, crops 224 x 224 pixels and mirrors. Nothing is trained. "both" caches what
both layers have made, as in most experiments of Revamper's paper (section 7), "one" what the first has made: in the
mount's cache, or "in memory", where loaders without a mount keep it. The images are those of
benchmarks.serving.image_loader. Loaders take turns epoch by epoch; each has had one epoch before, in which everything
is fetched and made. A ratio is the median of the ratios within a round.

With --table-1 each batch is followed by a pause, in place of the steps of an accelerator that takes DEVICE times as
many images a second as the standard loader gives. The rows show what Revamper's two features are worth: "naive" makes
all samples again in the same epochs, "balanced" a third of them in each, in a random order, and "balanced, shuffled"
with the same share of them in each batch. A rate is that of three epochs in a row, in which each sample is made once.
In the paper (VGG-16, CIFAR-10) naive is 1.15 times as fast as standard, and both features together are 1.42.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from PIL import Image
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import trainer_hook
from benchmarks.common import augmentation
from benchmarks.common.command import add_data, add_numbers, command_line
from benchmarks.common.images import HELP, make_images
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.mounts import end_loader_workers, leave_signals_to_the_parent, mounted
from benchmarks.common.results import machine, plain_table, save, wide_console
from benchmarks.common.schedules import NaiveGenerations, UnspreadGenerations
from benchmarks.serving.image_loader import BATCH, CROP, LOADER_WORKERS
from trainer_hook.refurbishing import loader as loaders
from trainer_hook.refurbishing.generations import Generations

TABLE_WIDTH = 90
SHORTER_SIDE = 256
STANDARD = "standard"


@dataclass(frozen=True)
class Reuse:
    split: int
    """So many of the steps (resize, layer, layer, crop, mirror, tensor) are cached."""
    reuse: int
    target: float
    """How many times as fast as standard it has to be."""
    in_memory: bool = False
    schedule: type[Generations] = Generations


REUSES = {
    "both r=2": Reuse(3, 2, 1.4),
    "both r=3": Reuse(3, 3, 1.9),
    "one r=2": Reuse(2, 2, 1.25),
    "one r=3": Reuse(2, 3, 1.45),
    "both r=2, in memory": Reuse(3, 2, 1.4, in_memory=True),
    "both r=3, in memory": Reuse(3, 3, 1.9, in_memory=True),
}


# The accelerator's images a second, as a multiple of the standard loader's.
DEVICE = 1.5
CYCLE = 3
# What the paper's table 1 has is the target; of balanced eviction alone it has no row.
TABLE_1 = {
    "naive": Reuse(3, CYCLE, 4746.91 / 4125.07, in_memory=True, schedule=NaiveGenerations),
    "balanced": Reuse(3, CYCLE, 0.0, in_memory=True, schedule=UnspreadGenerations),
    "balanced, shuffled": Reuse(3, CYCLE, 5839.08 / 4125.07, in_memory=True),
}


@dataclass(frozen=True)
class Extent:
    images: int
    rounds: int


# Epochs of r=3 differ only by chance, since each of them makes a third of the samples; so do those of r=2.
FULL, QUICK = Extent(600, rounds=9), Extent(64, rounds=3)
# A partial sample of 341 x 256 pixels has 262 kB; the cache holds those of all loaders in its half, and all images.
CACHED_BYTES_PER_IMAGE, LEAST_CACHED = 3_000_000, 100
# Where files lie in memory.
MEMORY = "/dev/shm"


class Pictures(Dataset[Tensor]):
    """Images of files, and a pipeline for them."""

    def __init__(self, paths: list[str], transform: Any) -> None:
        self.paths = paths
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.paths[index]) as file:
            return self.transform(file.convert("RGB"))


def loader_of(paths: list[str], name: str, reuse: Reuse | None, scratch: Path) -> DataLoader[Any]:
    steps: list[Any] = [
        augmentation.Resize(SHORTER_SIDE),
        augmentation.Layer(),
        augmentation.Layer(),
        augmentation.Crop(CROP),
        augmentation.mirrored,
        augmentation.as_bytes,
    ]
    loader: DataLoader[Any] = DataLoader(
        Pictures(paths, augmentation.Compose(steps)),
        batch_size=BATCH,
        shuffle=True,
        num_workers=LOADER_WORKERS,
        persistent_workers=True,
        worker_init_fn=leave_signals_to_the_parent,
    )
    if reuse is None:
        return loader
    place = scratch / name if reuse.in_memory else None
    with patch.object(loaders, "Generations", reuse.schedule):
        return trainer_hook.refurbish(loader, split=reuse.split, reuse=reuse.reuse, store=place)


def images_per_s(loader: Iterable[Sized], epochs: int = 1, step_s: float = 0.0) -> float:
    """Images a second over these epochs; each batch is followed by a step of `step_s` seconds."""
    began, images = time.perf_counter(), 0
    for _ in range(epochs):
        for batch in loader:
            images += len(batch)
            time.sleep(step_s)
    return images / (time.perf_counter() - began)


def ratio(rates: dict[str, list[float]], name: str) -> float:
    """How many times the standard loader's rate a loader's is: the median of the ratios within the rounds."""
    return statistics.median(ours / base for ours, base in zip(rates[name], rates[STANDARD], strict=True))


def show(rates: dict[str, list[float]], title: str, console: Console) -> None:
    table = plain_table(title, "", "images/s", "least", "most", "x standard", "target")
    for name, found in rates.items():
        word = f"paper: {TABLE_1[name].target:.2f}" if name in TABLE_1 and TABLE_1[name].target else ""
        if name in REUSES:
            target = REUSES[name].target
            word = f">= {target}: {'reached' if ratio(rates, name) >= target else 'missed'}"
        cells = [f"{figure:,.0f}" for figure in (statistics.median(found), min(found), max(found))]
        table.add_row(name, *cells, f"{ratio(rates, name):.2f}", word)
    console.print(table)


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent = QUICK if arguments.quick else FULL
    count, rounds = arguments.images or extent.images, arguments.rounds or extent.rounds
    reuses, epochs, step_s = (TABLE_1, CYCLE, 0.0) if arguments.table_1 else (REUSES, 1, 0.0)
    if arguments.table_1:
        rounds = max(1, rounds // CYCLE)
    rates: dict[str, list[float]] = {}
    with scratch_directory("refurbish_speed") as scratch, ExitStack() as stack:
        names = make_images(scratch / "source", arguments.data, count)
        total_bytes = sum((scratch / "source" / name).stat().st_size for name in names)
        os.sync()
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spiderfs-", dir=MEMORY)))
        capacity = CACHED_BYTES_PER_IMAGE * max(count, LEAST_CACHED)
        mount = stack.enter_context(mounted(scratch / "source", scratch / "m", capacity, 0, "immutable=on"))
        paths = [str(mount / name) for name in names]
        stack.callback(end_loader_workers)
        made = {name: loader_of(paths, name, reuse, memory) for name, reuse in ({STANDARD: None} | reuses).items()}
        for loader in made.values():
            images_per_s(loader)  # begins its workers, and makes every partly augmented sample
        if arguments.table_1:
            step_s = BATCH / (DEVICE * images_per_s(made[STANDARD]))
        turns = list(made)
        for number in range(rounds):
            first = number % len(turns)
            for name in turns[first:] + turns[:first]:
                rates.setdefault(name, []).append(images_per_s(made[name], epochs, step_s))
        rates = {name: rates[name] for name in turns}
        show(rates, f"{count:,} images of {total_bytes / count / 1000:.0f} kB, {rounds} rounds", console)
        del made, loader
    of_standard = {name: ratio(rates, name) for name in rates}
    return {
        "machine": machine(),
        "images": count,
        "bytes": total_bytes,
        "step_s": step_s,
        "images_per_s": rates,
        "of_standard": of_standard,
    }


def main() -> int:
    parser = command_line(__doc__)
    add_data(parser, HELP)
    add_numbers(parser, FULL, QUICK, images="images", rounds="rounds")
    parser.add_argument("--table-1", action="store_true", help="measure the rows of Revamper's table 1")
    arguments = parser.parse_args()

    def measure_all() -> None:
        save(arguments.json, run(arguments, wide_console(TABLE_WIDTH)))

    return exit_status("refurbish_speed", measure_all, "interrupted; everything is deleted")


if __name__ == "__main__":
    sys.exit(main())
