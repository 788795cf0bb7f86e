"""Real trainings on a slow source with a fifth of the data cached: what each way of caching costs, and what it reaches.

    .venv/bin/python -m benchmarks.training.train --data DIR             the whole measurement, thirty-five minutes
    .venv/bin/python -m benchmarks.training.train --data DIR --quick     about a minute, for a look

DIR holds train/CLASS/NAME and test/CLASS/NAME. Every run trains the same small residual network on the same images
through a mount of its own with an empty cache. The configurations take turns seed by seed, so that other load on the
machine falls on all of them alike:

    lru            evicts what was used longest ago; uniform sampling, each sample once an epoch
    lfu            evicts what was used least often; the same samples in the same order, so the same accuracy
    minio          keeps what came first; the same samples again
    uniform+plan   the same samples in the same order, published beforehand: evicted by next use, fetched ahead
    shade          draws by the ranks of losses, and three times as often what is cached and above the mean (SHADE)
    icache         half of the samples in an epoch, harder ones more often; easy samples stand in for others of their
                   class (iCACHE)
    impact         the same after a warm-up of at most 3 epochs; before each epoch it evaluates again the samples whose
                   rank varies most (ImPACT)
    importance     the hook scores samples, the sampler draws by score, the cache keeps the highest; no stand-ins
    paper          the same with hubs that stand in for samples of the same class that are not cached (SpiderCache)
    spider         spiderfs as we recommend it: plans are published, hubs stand in only for what nobody has begun to
                   fetch, three tenths of the draws are uniform, losses are weighted by 1/(N q)
    echo 2, echo 3 each sample twice, or three times, while it is cached, and then not again before all others; plans
                   are published, and there is no hook

The systems of other papers, and `paper`, run without plans, as their papers describe them. accuracy.py measures scores
from losses in place of those from the graph; systems.py measures other sizes of the cache.

Held-out images are read from the disk, not through the mount. The network has one thread, because two loader workers
and the daemon need the rest.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.common.command import add_data, add_names, command_line
from benchmarks.common.extent import Extent, add_extent, extent_of
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.mounts import counts, leave_signals_to_the_parent, mounted
from benchmarks.common.results import machine, save, verdict_table, wide_console
from benchmarks.training.train_report import (
    FORMS,
    TRAFFIC,
    TRAINING,
    Epoch,
    Run,
    judge,
    plot,
    print_run,
    ratio_table,
    summary_table,
)
from benchmarks.training.training import (
    BATCH,
    CACHED_SHARE,
    IMAGES,
    SAMPLERS,
    Data,
    Images,
    Steps,
    evaluate,
    find_data,
    network,
)
from trainer_hook import Hook, attach, plan

LOADER_WORKERS = 2
TABLE_WIDTH = 110
MOST_WEIGHT = 4.0


@dataclass(frozen=True)
class Configuration:
    options: str
    planned: bool = False  # by the loader alone, without the hook
    sampler: str | None = None  # a name in SAMPLERS; without, each sample once an epoch
    coverage: float | None = None  # share of the sampler's draws that are uniform, if not its own default
    weighted: bool = False  # losses, by hook.weights()
    ratio: float | None = None  # share of the importance section, if pinned


AS_IN_PAPERS = "plan=off,substitute_when=miss"
CONFIGURATIONS = {
    "lru": Configuration("policy=lru"),
    "lfu": Configuration("policy=lfu"),
    "minio": Configuration("policy=minio"),
    "uniform+plan": Configuration("policy=minio", planned=True),
    "shade": Configuration(f"policy=shade,{AS_IN_PAPERS}", sampler="shade"),
    "icache": Configuration(f"policy=icache,{AS_IN_PAPERS}", sampler="icache"),
    "impact": Configuration(f"policy=impact,{AS_IN_PAPERS}", sampler="impact"),
    "importance": Configuration("plan=off,substitute=off", sampler="spider", coverage=0.0, ratio=1.0),
    "paper": Configuration(AS_IN_PAPERS, sampler="spider", coverage=0.0),
    "spider": Configuration("policy=spider", sampler="spider", coverage=0.3, weighted=True),
    "echo 2": Configuration("policy=minio", planned=True, sampler="echo 2"),
    "echo 3": Configuration("policy=minio", planned=True, sampler="echo 3"),
}

FULL = Extent(epochs=8, training=3_000, held_out=2_000, seeds=3)
QUICK = Extent(epochs=5, training=1_000, held_out=500, seeds=1)
QUICK_CONFIGURATIONS = ("lru", "uniform+plan", "impact", "spider")


# -- one run


def train(data: Data, mountpoint: Path, name: str, seed: int, epochs: int, progress: Progress) -> Run:
    """Train through the mount, and evaluate after each epoch."""
    configuration = CONFIGURATIONS[name]
    torch.manual_seed(seed)
    model = network(data.classes)
    samples = Images(mountpoint, data.training)
    sampler = None
    if configuration.sampler is not None:
        coverage = {} if configuration.coverage is None else {"coverage": configuration.coverage}
        sampler = SAMPLERS[configuration.sampler](len(samples), seed=seed, **coverage)
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_size=BATCH,
        sampler=sampler,
        shuffle=None if sampler is not None else True,
        num_workers=LOADER_WORKERS,
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=leave_signals_to_the_parent,
    )
    steps = Steps(model, epochs, len(samples))
    for entry in os.scandir(
        mountpoint
    ):  # image-folder data sets list every directory too, so the mount learns all names at once
        if entry.is_dir() and entry.name != ".spiderfs":
            os.listdir(entry)
    if configuration.ratio is not None:
        (mountpoint / ".spiderfs" / "ratio").write_text(f"{configuration.ratio}\n")
    hook = attach(mountpoint, model, loader) if sampler is not None and not configuration.planned else None
    planning = plan(mountpoint, loader) if configuration.planned else None
    task = progress.add_task(f"{name}, seed {seed}", total=epochs)
    done = []
    try:
        for number in range(epochs):
            before = counts(mountpoint)
            weighting = hook if configuration.weighted else None
            figures = train_epoch(model, loader, steps, number, weighting)
            progress.advance(task)
            after = counts(mountpoint)
            top1 = evaluate(model, data)
            if hook is not None:
                hook.epoch_end(top1)
            done.append(epoch_of(figures, before, after, data, top1))
        sent, dropped = sent_and_dropped(hook)
        graph = (mountpoint / ".spiderfs" / "graph").read_text()
    finally:
        for told in (hook, planning):
            if told is not None:
                told.close()
        progress.remove_task(task)
    return Run(name, seed, done, sent, dropped, graph)


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
        flipped = torch.rand(len(images)) < 0.5
        images = torch.where(flipped[:, None, None, None], images.flip(3), images)
        steps.optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
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


def epoch_of(figures: Figures, before: dict[str, int], after: dict[str, int], data: Data, top1: float) -> Epoch:
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


def sent_and_dropped(hook: Hook | None) -> tuple[int, int]:
    return (0, 0) if hook is None else (hook.counts["sent"], hook.counts["dropped"])


# -- the program


def result_of(arguments: argparse.Namespace, extent: Extent, data: Data, runs: list[Run]) -> dict[str, Any]:
    return {
        "machine": machine(),
        "extent": asdict(extent),
        "latency_ms": arguments.latency_ms,
        "bandwidth": arguments.bandwidth,
        "batch": BATCH,
        "loader_workers": LOADER_WORKERS,
        "cached_share": CACHED_SHARE,
        "training_bytes": data.training_bytes,
        "options": {name: asdict(CONFIGURATIONS[name]) for name in arguments.configs},
        "runs": [asdict(run) for run in runs],
        "verdicts": [asdict(verdict) for verdict in judge(runs, "spider")],
    }


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    torch.set_num_threads(1)
    data = find_data(arguments.data, extent)
    capacity = int(data.training_bytes * CACHED_SHARE)
    console.print(
        f"{extent.training:,} training images ({data.training_bytes / 1e6:.1f} MB), {extent.held_out:,} held out; "
        f"cache {CACHED_SHARE:.0%}; source {arguments.latency_ms:g} ms away"
        + ("" if arguments.bandwidth is None else f" with {arguments.bandwidth:,} bytes/s")
        + f"; {LOADER_WORKERS} loader workers",
        highlight=False,
    )
    runs: list[Run] = []
    try:
        with scratch_directory("train") as scratch, Progress(console=console, transient=True) as progress:
            for seed, name in itertools.product(range(1, extent.seeds + 1), arguments.configs):
                options = CONFIGURATIONS[name].options
                if arguments.bandwidth is not None:
                    options += f",source.bandwidth={arguments.bandwidth}"
                place = scratch / f"{name}-{seed}"
                with mounted(data.root, place, capacity, arguments.latency_ms, options) as mountpoint:
                    runs.append(train(data, mountpoint, name, seed, extent.epochs, progress))
                print_run(runs[-1], console)
    finally:
        # An interrupted measurement shows what it has measured.
        if runs:
            show(arguments, extent, data, runs, console)


def show(arguments: argparse.Namespace, extent: Extent, data: Data, runs: list[Run], console: Console) -> None:
    console.print("\nmean ± deviation over seeds; of later epochs, without the first; top-1 after the last")
    console.print(summary_table("What was read", runs, TRAFFIC))
    console.print(summary_table("How training went", runs, TRAINING))
    if verdicts := list(judge(runs, "spider")):
        console.print(ratio_table(runs))
        console.print(verdict_table("spider against its targets", verdicts, FORMS))
    if arguments.json is not None:
        save(arguments.json, result_of(arguments, extent, data, runs))
    if arguments.plot is not None:
        console.print(f"plotted: {plot(runs, arguments.plot)}", soft_wrap=True)


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add_data(parser, IMAGES, required=True)
    add_extent(parser, FULL, QUICK)
    add_names(parser, "--configs", CONFIGURATIONS, f"to run (default all, quick {','.join(QUICK_CONFIGURATIONS)})")
    parser.add_argument(
        "--latency-ms", type=float, default=6.0, metavar="MS", help="latency of the slow source (default %(default)s)"
    )
    parser.add_argument(
        "--bandwidth", type=int, metavar="BYTES", help="bytes that the source delivers in a second (default: no limit)"
    )
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write train.png into DIR")
    arguments = parser.parse_args()
    arguments.configs = arguments.configs or list(QUICK_CONFIGURATIONS if arguments.quick else CONFIGURATIONS)
    arguments.extent = extent_of(parser, arguments, FULL, QUICK)
    for part in ("train", "test"):
        if not (arguments.data / part).is_dir():
            parser.error(f"{arguments.data / part} is not a directory")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    console = wide_console(TABLE_WIDTH)
    return exit_status("train", lambda: measure(arguments, console), "interrupted; everything is unmounted and deleted")


if __name__ == "__main__":
    sys.exit(main())
