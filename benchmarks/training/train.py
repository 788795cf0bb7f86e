"""Real trainings on a slow source with a fifth of the data cached: what each way of caching costs, and what it reaches.

    .venv-dev/bin/python -m benchmarks.training.train --data DIR --json FILE                all of it, forty minutes
    .venv-dev/bin/python -m benchmarks.training.train --data DIR --json FILE --minutes 8    a slice of it
    .venv-dev/bin/python -m benchmarks.training.train --data DIR --quick                    about a minute, for a look

What FILE has is not measured again: the same command goes on where one has stopped, however that came about.

Every run trains the same small residual network on the same images through a mount of its own with an empty cache. The
configurations take turns seed by seed, so that other load on the machine falls on all of them alike:

    lru, lfu       evict what was used longest ago, or least often; uniform sampling, each sample once an epoch
    minio          keeps what came first; the same samples in the same order
    uniform+plan   the same samples in the same order, published beforehand: evicted by next use, fetched ahead
    shade, icache, impact, importance, spider-paper
                   the papers' systems (benchmarks/training/systems.py), without plans, as their papers describe them
    spider         spiderfs as we recommend it: plans are published, hubs substitute only for what no one has begun to
                   fetch, three tenths of the draws are uniform, losses are weighted by 1/(N q)
    echo 2         each sample twice while it is cached, and then not again before all others; plans are published,
                   and there is no hook
    all local      uniform sampling from the local disk, without a mount: what no cache can exceed

With --workers 2,4,8,16 every configuration is trained with each of these numbers of loader workers, for concurrency is
part of what is gained. Held-out images are read from the disk. The network has one thread: the others need the rest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.utils.data import DataLoader

from benchmarks import tables
from benchmarks.common.command import Extent, add_data, add_minutes, add_names, command_line, main, numbers_of
from benchmarks.common.interruption import Slice, TimeIsOver, scratch_directory
from benchmarks.common.mounts import counts, leave_signals_to_the_parent, mounted
from benchmarks.common.results import machine, save
from benchmarks.training.train_report import Epoch, Run
from benchmarks.training.training import (
    BATCH,
    CACHED_SHARE,
    IMAGES,
    Data,
    Images,
    Steps,
    evaluate,
    find_data,
    flipped,
    network,
    sampler_named,
)
from trainer_hook import Hook, HookOptions, attach, plan

LOADER_WORKERS = 2
MOST_WEIGHT = 4.0
LATENCY_MS = 6.0
# What all runs of a table have in common, besides the extent.
SETTINGS = {"latency_ms": LATENCY_MS, "batch": BATCH, "cached_share": CACHED_SHARE}


@dataclass(frozen=True)
class Configuration:
    options: str
    planned: bool = False  # by the loader alone, without the hook
    sampler: str | None = None  # a name for `sampler_named`; without, each sample once an epoch
    coverage: float | None = None  # share of the sampler's draws that are uniform, if not its own default
    weighted: bool = False  # losses, by hook.weights()
    ratio: float | None = None  # share of the importance section, if pinned
    local: bool = False  # without a mount; the options do nothing


AS_IN_PAPERS = "plan=off,substitute_when=miss"
AS_IN_SPIDERCACHE = f"{AS_IN_PAPERS},neighbours=500,hub_substitutions=unlimited,hub_neighbours=unlimited"
CONFIGURATIONS = {
    "lru": Configuration("policy=lru"),
    "lfu": Configuration("policy=lfu"),
    "minio": Configuration("policy=minio"),
    "uniform+plan": Configuration("policy=minio", planned=True),
    "shade": Configuration(f"policy=shade,{AS_IN_PAPERS}", sampler="shade", coverage=0.0),
    "icache": Configuration(f"policy=icache,{AS_IN_PAPERS}", sampler="icache"),
    "impact": Configuration(f"policy=impact,{AS_IN_PAPERS}", sampler="impact"),
    "importance": Configuration("plan=off,substitute=off", sampler="spider", coverage=0.0, ratio=1.0),
    "spider-paper": Configuration(AS_IN_SPIDERCACHE, sampler="spider", coverage=0.0),
    "spider": Configuration("policy=spider", sampler="spider", coverage=0.3, weighted=True),
    "echo 2": Configuration("policy=minio", planned=True, sampler="echo 2"),
    "all local": Configuration("", local=True),
}

FULL = Extent(epochs=8, training=3_000, held_out=2_000, seeds=3)
QUICK = Extent(epochs=5, training=1_000, held_out=500, seeds=1)
QUICK_CONFIGURATIONS = ("lru", "uniform+plan", "impact", "spider")


# -- one run


class Task(NamedTuple):
    seed: int
    workers: int
    configuration: str


def train(data: Data, root: Path, task: Task, epochs: int, progress: Progress) -> Run:
    """Train on the images below `root`, a mount or not, and evaluate after each epoch."""
    configuration = CONFIGURATIONS[task.configuration]
    torch.manual_seed(task.seed)
    model = network(data.classes)
    samples = Images(root, data.training)
    sampler = None
    if configuration.sampler is not None:
        coverage = {} if configuration.coverage is None else {"coverage": configuration.coverage}
        sampler = sampler_named(configuration.sampler, len(samples), task.seed, epochs, **coverage)
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_size=BATCH,
        sampler=sampler,
        shuffle=None if sampler is not None else True,
        num_workers=task.workers,
        generator=torch.Generator().manual_seed(task.seed),
        worker_init_fn=leave_signals_to_the_parent,
    )
    steps = Steps(model, epochs, len(samples))
    # Image-folder data sets list every directory too, so the mount learns all names at once.
    for entry in os.scandir(root):
        if entry.is_dir() and entry.name != ".spiderfs":
            os.listdir(entry)
    if configuration.ratio is not None:
        (root / ".spiderfs" / "ratio").write_text(f"{configuration.ratio}\n")
    hook = None
    if sampler is not None and not configuration.planned:
        hook = attach(root, model, loader, options=HookOptions(epochs=epochs))
    planning = plan(root, loader) if configuration.planned else None
    shown = progress.add_task(", ".join(map(str, task)), total=epochs)
    done = []
    try:
        for number in range(epochs):
            before = None if configuration.local else counts(root)
            weighting = hook if configuration.weighted else None
            figures = train_epoch(model, loader, steps, number, weighting)
            progress.advance(shown)
            after = None if configuration.local else counts(root)
            top1 = evaluate(model, data)
            if hook is not None:
                hook.epoch_end(top1)
            done.append(epoch_of(figures, before, after, data, top1))
        sent, dropped = (0, 0) if hook is None else (hook.counts["sent"], hook.counts["dropped"])
        graph = "" if configuration.local else (root / ".spiderfs" / "graph").read_text()
    finally:
        for attached in (hook, planning):
            if attached is not None:
                attached.close()
        progress.remove_task(shown)
    return Run(task.configuration, task.seed, done, sent, dropped, graph, task.workers)


@dataclass
class Figures:
    """The figures of one epoch, as the trainer sees it."""

    seconds: float
    waiting_s: float
    reads: int
    drawn: set[int]
    served: set[int]


def train_epoch(
    model: nn.Module, loader: DataLoader[Any], steps: Steps, number: int, weighting: Hook | None
) -> Figures:
    model.train()
    figures = Figures(0.0, 0.0, 0, set(), set())
    begin = asked = time.monotonic()
    for batch, (images, labels, indices, inodes) in enumerate(loader, 1):
        figures.waiting_s += time.monotonic() - asked
        steps.optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(flipped(images)), labels, reduction="none")
        if weighting is not None:
            losses = losses * weighting.weights(clip=MOST_WEIGHT)
        losses.mean().backward()  # type: ignore[no-untyped-call]
        steps.optimizer.step()
        # A sampler that draws a part of the samples knows their number only after it has drawn them.
        steps.taken(number, batch, len(loader))
        figures.reads += len(indices)
        figures.drawn.update(indices.tolist())
        figures.served.update(inodes.tolist())
        asked = time.monotonic()
    figures.seconds = time.monotonic() - begin
    return figures


def epoch_of(
    figures: Figures, before: dict[str, int] | None, after: dict[str, int] | None, data: Data, top1: float
) -> Epoch:
    """The figures of an epoch, with the mount's counters before and after it; None where there is no mount."""
    opens, hits, redirects, origin_bytes = figures.reads, figures.reads, 0, 0
    if before is not None and after is not None:
        opens, hits, redirects, origin_bytes = (
            after[name] - before[name] for name in ("opens", "opens_hit", "redirects", "origin_bytes")
        )
    samples = len(data.training)
    return Epoch(
        hit_ratio=hits / opens,
        origin_bytes_per_sample=origin_bytes / figures.reads,
        origin_share=origin_bytes / data.training_bytes,
        reads_share=figures.reads / samples,
        drawn_share=len(figures.drawn) / samples,
        served_share=len(figures.served) / samples,
        redirected_share=redirects / opens,
        seconds=figures.seconds,
        waiting_share=figures.waiting_s / figures.seconds,
        top1=top1,
    )


# -- the program


def result_of(arguments: argparse.Namespace, data: Data, runs: list[Run]) -> dict[str, Any]:
    return {
        "machine": machine(),
        "extent": asdict(arguments.extent) | {"seeds": max((run.seed for run in runs), default=0)},
        **SETTINGS,
        "loader_workers": arguments.workers[0],
        "training_bytes": data.training_bytes,
        "options": {run.configuration: asdict(CONFIGURATIONS[run.configuration]) for run in runs},
        "runs": [asdict(run) for run in runs],
    }


def runs_in(path: Path, arguments: argparse.Namespace) -> list[Run]:
    """The runs of an earlier measurement; raises RuntimeError if they were made with other settings."""
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    same = asdict(arguments.extent) | {"seeds": result["extent"]["seeds"]} | SETTINGS
    if any((result | result["extent"])[name] != wanted for name, wanted in same.items()):
        raise RuntimeError(f"{path} holds runs of another extent or source; choose another file with --json")
    for name, saved in result["options"].items():
        if name not in CONFIGURATIONS or asdict(CONFIGURATIONS[name]) != saved:
            raise RuntimeError(f"{path} holds runs of another configuration named {name}; choose another file")
    return tables.runs_of(result)


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    arguments.configs = arguments.configs or list(QUICK_CONFIGURATIONS if arguments.quick else CONFIGURATIONS)
    torch.set_num_threads(1)
    data = find_data(arguments.data, extent)
    runs = [] if arguments.json is None else runs_in(arguments.json, arguments)
    done = {Task(run.seed, run.workers, run.configuration) for run in runs}
    asked = itertools.product(range(1, extent.seeds + 1), arguments.workers, arguments.configs)
    tasks = [task for task in itertools.starmap(Task, asked) if task not in done]
    console.print(
        f"{extent.training:,} training images ({data.training_bytes / 1e6:.1f} MB), {extent.held_out:,} held out; "
        f"cache {CACHED_SHARE:.0%}; source {LATENCY_MS:g} ms away"
        f"; {len(runs)} runs are there already, {len(tasks)} to do",
        highlight=False,
    )
    part = Slice(arguments.minutes)
    try:
        with scratch_directory("train") as scratch, Progress(console=console, transient=True) as progress:
            for number, task in enumerate(tasks):
                if part.over:
                    raise TimeIsOver(f"{len(tasks) - number} runs are left: the same command goes on")
                began = time.monotonic()
                runs.append(run_of(arguments, data, task, scratch, progress))
                part.took(time.monotonic() - began)
                console.print(f"{task}, {len(tasks) - number - 1} to do", *map(str, runs[-1].epochs), sep="\n  ")
                save(arguments.json, result_of(arguments, data, runs))
    finally:
        # An interrupted measurement shows what it has measured.
        if runs:
            result = {"runs": [asdict(run) for run in runs]}
            for workers in arguments.workers:
                of_workers = [run for run in result["runs"] if run["workers"] == workers]
                print(f"{workers} loader workers\n{tables.train({'runs': of_workers})}")
            print(f"seconds per epoch\n{tables.loader_workers(result, arguments.configs)}")


def run_of(arguments: argparse.Namespace, data: Data, task: Task, scratch: Path, progress: Progress) -> Run:
    """Train through a mount of its own, or without one."""
    configuration, epochs = CONFIGURATIONS[task.configuration], arguments.extent.epochs
    if configuration.local:
        return train(data, data.root, task, epochs, progress)
    capacity = int(data.training_bytes * CACHED_SHARE)
    place = scratch / f"{task.configuration}-{task.workers}-{task.seed}".replace(" ", "-")
    with mounted(data.root, place, capacity, LATENCY_MS, configuration.options) as mountpoint:
        return train(data, mountpoint, task, epochs, progress)


def program() -> argparse.ArgumentParser:
    parser = command_line(__doc__, FULL, QUICK)
    add_data(parser, IMAGES, required=True)
    add_names(parser, "--configs", CONFIGURATIONS, f"to run (default all, quick {','.join(QUICK_CONFIGURATIONS)})")
    help_text = f"numbers of loader workers to train with (default {LOADER_WORKERS})"
    parser.add_argument("--workers", type=numbers_of(int), default=[LOADER_WORKERS], metavar="A,B", help=help_text)
    add_minutes(parser, "run")
    return parser


if __name__ == "__main__":
    main(measure, program())
