"""How fast a loader is that uses partly augmented samples several times (`trainer_hook.refurbish`), beside standard.

    .venv-dev/bin/python -m benchmarks.serving.refurbish_speed                 some four minutes
    .venv-dev/bin/python -m benchmarks.serving.refurbish_speed --schedules     Revamper's table 1, some three minutes
    .venv-dev/bin/python -m benchmarks.serving.refurbish_speed --quick         under a minute, for a look

A PyTorch DataLoader with two workers decodes JPEGs of ImageNet's size from an immutable mount, resizes the shorter side
to 256, applies two layers of RandAugment, crops 224 x 224 pixels and mirrors. Nothing is trained. What both layers have
made is in the mount's cache, as in most experiments of Revamper's paper (section 7). Loaders take turns epoch by epoch;
each has had one epoch before, in which everything is fetched and made. A ratio is the median of the ratios within a
round.

--schedules compares Revamper's two features, with three uses (table 1). "naive" makes all samples again in the same
epochs, "balanced" a third of them in each epoch, in a random order, and "balanced, cache-aware shuffle" the same share
of them in each batch. Each batch is followed by a pause, in place of the steps of a device that is DEVICE times as fast
as the standard loader: without one, the order in which a loader works would not matter. A rate is that of three epochs
in a row, in which each sample is made once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import trainer_hook
from benchmarks import tables
from benchmarks.common import augmentation
from benchmarks.common.command import add_data, command_line, main
from benchmarks.common.images import HELP, make_images
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import end_loader_workers, leave_signals_to_the_parent, mounted
from benchmarks.common.results import turns
from benchmarks.serving.image_loader import BATCH, CROP, LOADER_WORKERS
from trainer_hook.refurbishing.generations import Generations, Indices
from trainer_hook.refurbishing.sampler import RefurbishSampler

SHORTER_SIDE = 256
# The steps are resize, layer, layer, crop, mirror, tensor; of these so many are cached.
SPLIT = 3
REUSES = {"standard": 1, "both r=2": 2, "both r=3": 3}


class Unspread(Generations):
    """Balanced eviction without the cache-aware shuffle: an order that is random in all respects."""

    def order(self, epoch: int, rank: int = 0, world_size: int = 1) -> Indices:
        return np.random.default_rng([*self._order_seed, epoch]).permutation(self.samples)


class Naive(Unspread):
    """Without balanced eviction too: counts of references reach 0 in the same epoch for all samples."""

    def __init__(self, samples: int, reuse: int, kept: int, seed: int, order: int = 0) -> None:
        super().__init__(samples, reuse, kept, seed, order)
        self._shift = np.zeros(samples, np.int64)


SCHEDULES = {"naive": Naive, "balanced": Unspread, "balanced, cache-aware shuffle": Generations}
CYCLE = 3
# The device's images a second, as a multiple of the standard loader's.
DEVICE = 1.5


@dataclass(frozen=True)
class Extent:
    images: int
    rounds: int


# Epochs of r=3 differ only by chance, since each of them makes a third of the samples; so do those of r=2.
FULL, QUICK = Extent(600, rounds=9), Extent(64, rounds=3)
# A partial sample of 341 x 256 pixels has 262 kB; the cache holds those of all loaders in its half, and all images.
CACHED_BYTES_PER_IMAGE, LEAST_CACHED = 3_000_000, 100


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


def loader_of(
    paths: list[str], reuse: int, schedule: type[Generations] = Generations, seed: int = 0
) -> DataLoader[Any]:
    """Loaders of other seeds share no partly augmented samples."""
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
    if reuse == 1:
        return loader
    loader = trainer_hook.refurbish(loader, split=SPLIT, reuse=reuse, seed=seed)
    assert isinstance(loader.sampler, RefurbishSampler)
    loader.sampler._generations = schedule(len(paths), reuse, len(paths), seed)
    return loader


def images_per_s(loader: DataLoader[Any], epochs: int = 1, step_s: float = 0.0) -> float:
    """Images a second over these epochs; after each batch a step takes `step_s` seconds."""
    began, images = time.perf_counter(), 0
    for _ in range(epochs):
        for batch in loader:
            images += len(batch)
            time.sleep(step_s)
    return images / (time.perf_counter() - began)


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent: Extent = arguments.extent
    epochs, step_s = (CYCLE, 0.0) if arguments.schedules else (1, 0.0)
    with scratch_directory("refurbish_speed") as scratch, ExitStack() as stack:
        names = make_images(scratch / "source", arguments.data, extent.images)
        total_bytes = sum((scratch / "source" / name).stat().st_size for name in names)
        os.sync()
        capacity = CACHED_BYTES_PER_IMAGE * max(extent.images, LEAST_CACHED)
        mount = stack.enter_context(mounted(scratch / "source", scratch / "m", capacity, 0, "immutable=on"))
        paths = [str(mount / name) for name in names]
        stack.callback(end_loader_workers)
        if arguments.schedules:
            made = {"standard": loader_of(paths, 1)}
            for seed, (name, schedule) in enumerate(SCHEDULES.items()):
                made[name] = loader_of(paths, CYCLE, schedule, seed)
        else:
            made = {name: loader_of(paths, reuse) for name, reuse in REUSES.items()}
        rates: dict[str, list[float]] = {name: [] for name in made}
        for loader in made.values():
            images_per_s(loader)  # begins its workers, and makes every partly augmented sample
        if arguments.schedules:
            step_s = BATCH / (DEVICE * images_per_s(made["standard"]))
        for _, name in turns(made, max(1, extent.rounds // epochs)):
            rates[name].append(images_per_s(made[name], epochs, step_s))
        del made, loader
    of_standard = {name: tables.rounds(rates[name], rates["standard"]) for name in rates}
    for name, of in rates.items():
        console.print(f"{name}: {statistics.median(of):,.0f} images/s", highlight=False)
    found = {"images": extent.images, "bytes": total_bytes, "images_per_s": rates, "of_standard": of_standard}
    if arguments.schedules:
        found["step_s"] = step_s
    print(tables.schedules(found) if arguments.schedules else tables.refurbish(found, {}))
    return found


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_data(program, HELP)
    program.add_argument("--schedules", action="store_true", help="compare Revamper's two features (table 1)")
    main(measure, program)
