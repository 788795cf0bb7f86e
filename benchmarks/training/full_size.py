"""All of CIFAR-10 with a ResNet-18: the papers' systems at the size that their papers train.

    .venv-dev/bin/python -m benchmarks.training.full_size --data DIR --state STATE --json FILE --minutes 8
    .venv-dev/bin/python -m benchmarks.training.full_size --quick      under a minute, on a CPU

DIR holds train/CLASS/NAME and test/CLASS/NAME; without --data the images are noise around a colour for each class,
which shows that the program runs and nothing else. Images, random crops, flips and the network are on the device: a GPU
if there is one. Cache, engine, policy, scorer and sampler are those of a mount, and benchmarks/training/in_process.py
calls them; there is no mount, and so no time of the source in the seconds. Embeddings get 64 numbers, as the hook sends
them. There are two recipes:

    tuned     a first layer for small images (3 x 3, no max-pool); SGD with Nesterov's momentum, weight decay and a
              one-cycle schedule; batches of 128: some 90 % with uniform sampling
    papers    the first layers of torchvision, SGD with the rate 0.1 alone and for all epochs, batches of 256: some 78 %
              in SpiderCache's paper. Its claims are about `--recipe papers --epochs 100 --seeds 3
              --systems 'uniform,spider-imp,spider-paper, released radius,shade,impact'`

After each epoch the unfinished training is written to the directory STATE. After --minutes the program stops, with
exit status 3 if something is left to do. The same command goes on, and on a CPU it ends with the very figures that one
long run would have had. FILE keeps what has been finished; further commands add further systems and seeds. A slice
trains at least one epoch: on a CPU with two cores that takes about an hour, so all of it wants a GPU. One GPU has room
for several trainings, since scoring is the CPU's work: --jobs 6 on 16 cores.

The rows are those of benchmarks/training/systems.py; "lru" and "uniform+plan" are one training with uniform sampling.
It needs torch, numpy, pillow, scipy, rich and msgpack, and this repository: no installation of spiderfs, no network.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.common.command import Extent, add_data, add_minutes, add_names, command_line, main
from benchmarks.common.interruption import Slice, TimeIsOver
from benchmarks.common.lists import MIN_BY_EPOCH, min_by_epoch
from benchmarks.common.results import save
from benchmarks.common.side_by_side import add_jobs, side_by_side
from benchmarks.training.in_process import Pool, Run, Training
from benchmarks.training.resnet import LEARNING_RATE, QUICK_WIDTH, RECIPES, USUAL_WIDTH, recipe_of
from benchmarks.training.saved_training import Done, load_training, save_training
from benchmarks.training.systems import (
    BY_RADIUS,
    SYSTEMS,
    UNIFORM,
    UNIFORM_NAME,
    WHY,
    System,
    Task,
    add_plot_scores,
    epochs_of,
    epochs_through,
    identity,
    measured_in,
    measured_of,
    result_of,
    show,
)
from benchmarks.training.systems_report import Measured
from benchmarks.training.training import CACHED_SHARE, IMAGES, PIXELS, Data, Recipe, find_data, pixels

FULL = Extent(epochs=30, training=50_000, held_out=10_000, seeds=1)
QUICK = Extent(epochs=3, training=512, held_out=200, seeds=1)
# The caches that serve the draws of the training with uniform sampling.
UNIFORM_ROWS = ("lru", "uniform+plan")
FEWER_EPOCHS = [name for name in WHY if name.startswith("uniform+plan")]
NAMES = (UNIFORM_NAME, *FEWER_EPOCHS, *SYSTEMS, *BY_RADIUS)
# The longest come first, so that all end at about the same time.
DEFAULT = ("spider-paper", "spider+plan", "spider-released", "shade", "impact", UNIFORM_NAME, "echo 2", *FEWER_EPOCHS)


# -- images


def pool_of(data: Data, device: str) -> Pool:
    """All images as bytes on the device."""
    images = []
    for path, _ in data.training:
        with open(data.root / path, "rb") as file:
            images.append(pixels(file))
    return Pool(
        images=torch.stack(images).to(device),
        labels=torch.tensor([label for _, label in data.training], device=device),
        sizes=[(data.root / path).stat().st_size for path, _ in data.training],
        held_out=replace(data, images=as_bytes(data.images).to(device), labels=data.labels.to(device)),
    )


def as_bytes(images: Tensor) -> Tensor:
    """Images with numbers from -0.5 to 0.5, as bytes."""
    return ((images + 0.5) * 255).round().clamp(0, 255).to(torch.uint8)


def generated(extent: Extent, device: str) -> Pool:
    """Noise around a colour for each of ten classes; half of the images have a colour between two classes."""
    generator = torch.Generator().manual_seed(0)
    count = extent.training + extent.held_out
    labels = torch.randint(0, 10, (count,), generator=generator)
    colours = torch.rand(10, 3, 1, 1, generator=generator) - 0.5
    half = (torch.arange(count) % 2 == 0)[:, None, None, None]
    mixed = torch.where(half, colours[labels - 1], colours[labels])
    noise = 0.3 * torch.randn(count, 3, PIXELS, PIXELS, generator=generator)
    images, labels = as_bytes((colours[labels] + mixed) / 2 + noise).to(device), labels.to(device)
    train, test = slice(0, extent.training), slice(extent.training, count)
    return Pool(
        images=images[train],
        labels=labels[train],
        sizes=[700 + 7 * (number % 64) for number in range(extent.training)],
        held_out=Data(Path(), [], 0, images[test], labels[test], 10),
    )


# -- one training, in slices


def file_of(directory: Path | None, task: Task) -> Path | None:
    """Where the state of an unfinished training is kept."""
    name = f"{task.system.replace(' ', '-')}.{task.cached_share:g}.{task.seed}"
    return None if directory is None else directory / name


class Prepared(NamedTuple):
    """What a process has: the images, and its time."""

    pool: Pool
    part: Slice


def prepared_with(data: Path | None, extent: Extent, device: str, part: Slice) -> Prepared:
    torch.set_num_threads(1)
    pool = generated(extent, device) if data is None else pool_of(find_data(data, extent), device)
    return Prepared(pool, part)


class Outcome(NamedTuple):
    task: Task
    measured: list[Measured] | None
    """None if the slice was over before the last epoch."""


def trained(
    ready: Prepared, task: Task, epochs: int, recipe: Recipe, settings: dict[str, Any], directory: Path | None
) -> Outcome:
    """Train, from where the last slice has ended."""
    system = system_of(task.system)
    configuration, epochs = replace(system.configuration, cached_share=task.cached_share), epochs_of(system, epochs)
    training = Training(ready.pool, configuration, task.seed, epochs, recipe=recipe)
    done = Done({"settings": settings, "task": asdict(task), "configuration": asdict(configuration)})
    file = file_of(directory, task)
    if file is not None and file.exists():
        found = load_training(file, training)
        if found.what != done.what:
            raise RuntimeError(f"{file} is of a training with other settings: delete it, or choose another --state")
        done = found
    for number in range(len(done.epochs) + 1, epochs + 1):
        if ready.part.over:
            return Outcome(task, None)
        began = time.monotonic()
        read, figures = training.epoch(number)
        done.epochs.append(figures)
        done.reads.append(np.array(read, np.uint32))
        done.seconds.append(time.monotonic() - began)
        ready.part.took(done.seconds[-1])
        print(
            f"{task.system}, seed {task.seed}, epoch {number} of {epochs}: {done.seconds[-1]:.1f} s  "
            f"hits {figures.hit_ratio:5.1%}  seen {figures.served_share:4.0%}  top-1 {figures.top1:5.1%}",
            flush=True,
        )
        if file is not None:
            save_training(file, training, done)
    return Outcome(task, measured(task, training, done))


def measured(task: Task, training: Training, done: Done) -> list[Measured]:
    """The figures of a training that is done: two rows for uniform sampling, one for each other system."""
    pool = training.pool
    lists = [read.tolist() for read in done.reads]
    planned = min_by_epoch(lists, pool.sizes, training.capacity)
    run = Run(
        configuration=task.system,
        seed=task.seed,
        epochs=done.epochs,
        top1=training.top1(pool.held_out),
        list_origin={MIN_BY_EPOCH: [replayed.origin_bytes_per_sample for replayed in planned]},
        graph=training.cache.graph(),
        seconds=sum(done.seconds),
    )
    if system_of(task.system).configuration != UNIFORM.configuration:
        return [measured_of(task, run, pool)]
    caches = {cache: cache for cache in UNIFORM_ROWS} if task.system == UNIFORM_NAME else {task.system: "uniform+plan"}
    return [
        measured_of(
            replace(task, system=name),
            replace(run, epochs=epochs_through(cache, run, lists, pool.sizes, training.capacity)),
            pool,
        )
        for name, cache in caches.items()
    ]


def system_of(name: str) -> System:
    return UNIFORM if name == UNIFORM_NAME else (SYSTEMS | WHY)[name]


# -- the program


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent, device = arguments.extent, arguments.device
    width = arguments.width or (QUICK_WIDTH if arguments.quick else USUAL_WIDTH)
    if width < QUICK_WIDTH:
        raise RuntimeError(f"choose --width {QUICK_WIDTH} or more")
    if arguments.minutes != float("inf") and arguments.state is None:
        raise RuntimeError("--minutes needs --state DIR, where the unfinished training is kept")
    recipe = recipe_of(arguments.recipe, width, device)
    settings = {
        "batch": recipe.batch,
        "learning_rate": LEARNING_RATE,
        # Kept results of the tuned recipe have no word for it.
        "network": f"ResNet-18 of {width} channels" + ("" if arguments.recipe == "tuned" else ", the papers' recipe"),
        "device": device,
        "images": "generated" if arguments.data is None else "read",
    }
    found = [] if arguments.json is None else measured_in(arguments.json, extent, [], **settings)
    finished = {(UNIFORM_NAME if of.system in UNIFORM_ROWS else of.system, of.seed) for of in found}
    left = [
        Task(name, CACHED_SHARE, seed)
        for seed, name in itertools.product(range(1, extent.seeds + 1), arguments.systems)
        if (name, seed) not in finished
    ]
    prepare = functools.partial(prepared_with, arguments.data, extent, device, Slice(arguments.minutes))
    work = functools.partial(
        trained,
        epochs=extent.epochs,
        recipe=recipe,
        settings=identity(extent, **settings),
        directory=arguments.state,
    )
    console.print(
        f"{extent.training:,} training images, {extent.held_out:,} held out, {extent.epochs} epochs, on {device}; "
        f"{len(finished)} trainings are finished, {len(left)} are left",
        highlight=False,
    )
    unfinished = 0
    try:
        for outcome in side_by_side(prepare, work, left, arguments.jobs):
            if outcome.measured is None:
                unfinished += 1
                continue
            found += outcome.measured
            save(arguments.json, result_of(extent, found, **settings))
            if (file := file_of(arguments.state, outcome.task)) is not None:
                file.unlink()
    finally:
        # An interrupted measurement shows what it has measured.
        if found:
            show(result_of(extent, found, **settings), arguments.plot_scores)
    if unfinished:
        raise TimeIsOver(f"{unfinished} trainings are left: the same command goes on")


def program() -> argparse.ArgumentParser:
    parser = command_line(__doc__, FULL, QUICK)
    add_data(parser, IMAGES)
    add_names(parser, "--systems", NAMES, "which to train", DEFAULT)
    add_minutes(parser, "epoch")
    add_jobs(parser)
    parser.add_argument("--state", type=Path, metavar="STATE", help="directory of unfinished trainings, to go on with")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    help_text = "where images and network are (default here: %(default)s)"
    parser.add_argument("--device", default=device, metavar="NAME", help=help_text)
    add_plot_scores(parser)
    parser.add_argument("--recipe", choices=RECIPES, default="tuned", help="how to train (default %(default)s)")
    help_text = f"channels of the first stage (default {USUAL_WIDTH}, quick {QUICK_WIDTH})"
    parser.add_argument("--width", type=int, metavar="N", help=help_text)
    return parser


if __name__ == "__main__":
    main(measure, program())
