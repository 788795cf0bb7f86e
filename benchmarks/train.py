"""Real training through a cache of a fifth of the data, over a slow source: what each way of caching costs and teaches.

    .venv/bin/python benchmarks/train.py --data DIR             the whole measurement, about half an hour
    .venv/bin/python benchmarks/train.py --data DIR --quick     about a minute, for a look

DIR holds train/CLASS/NAME and test/CLASS/NAME. Every run trains the same small residual network on the same images
through a mount of its own with an empty cache; the configurations take turns seed by seed, so that what else goes on
on the machine falls on all of them alike:

    lru            evicts what was used longest ago; uniform sampling, each sample once an epoch
    lfu, minio     what was used least often; keeps what came first: the same samples in the same order as lru, so the
                   same accuracy
    uniform+plan   the same samples in the same order, published beforehand: evicted by next use, fetched ahead
    shade          draws by the ranks of losses, and three times as often what is cached and above the mean (SHADE)
    icache         half of the samples in an epoch, the harder ones likelier; the cache lends easy ones within their
                   class (iCACHE)
    impact         the same after a warm-up of 3 epochs at most, with those evaluated anew before each epoch whose rank
                   varies most (ImPACT)
    importance     the hook scores samples, the sampler draws by score, the cache keeps the highest; none is replaced
    paper          the same with hubs that stand in for samples of the same class that are not cached (SpiderCache)
    spider         spiderfs as it is: published beforehand, hubs stand in only for what nobody fetches; and as it is
                   recommended: three tenths of the draws uniform, losses weighted by 1/(N q)

Those of other papers, and `paper`, run without plans, as their papers have them. What scores from the loss cost and
save in place of the graph's is in accuracy.py; how all of them do at other sizes of the cache is in systems.py.

Held-out images are read past the mount. The network has one thread: two loader workers and the daemon need the rest.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from extent import Extent, add_extent, check_names, extent_of
from interruption import exit_status
from mounts import counts, leave_signals_to_the_parent, mounted, scratch_directory
from results import machine, plain_table, save, spread
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader
from training import BATCH, CACHED_SHARE, SAMPLERS, Data, Images, Steps, evaluate, find_data, network

from trainer_hook import Hook, attach, plan

LOADER_WORKERS = 2
TABLE_WIDTH = 110
MOST_WEIGHT = 4.0
LEAST_ORIGIN_SAVING, LEAST_SPEEDUP, MOST_TOP1_LOSS = 0.5, 2.2, 0.005


@dataclass(frozen=True)
class Configuration:
    options: str
    planned: bool = False  # by the loader alone
    sampler: str | None = None  # a name in SAMPLERS, with the hook; without, each sample once an epoch
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
}
BASELINE = "lru"

FULL = Extent(epochs=8, training=3_000, held_out=2_000, seeds=3)
QUICK = Extent(epochs=3, training=1_000, held_out=500, seeds=1)


@dataclass(frozen=True)
class Epoch:
    """One epoch of training, without the evaluation after it."""

    hit_ratio: float  # of all opens, those of an evaluation between epochs among them
    origin_bytes_per_sample: float  # that was trained on
    origin_share: float  # bytes fetched, of the training set's
    reads_share: float  # samples trained on, of their number in the set
    drawn_share: float  # of the training set: distinct samples that the sampler drew
    served_share: float  # distinct samples whose bytes came; less than drawn where others stood in
    redirected_share: float  # of the draws
    seconds: float
    waiting_share: float  # of these seconds, for the data loader
    top1: float


@dataclass(frozen=True)
class Run:
    configuration: str
    seed: int
    epochs: list[Epoch]
    batches_sent: int
    batches_dropped: int
    graph: str  # what the daemon said of its scores at the end

    def later(self, field: str) -> float:
        """The mean without the first epoch: it fills the cache, and nothing is scored in it."""
        return statistics.fmean(getattr(epoch, field) for epoch in self.epochs[1:])

    def figure(self, field: str) -> float:
        return self.epochs[-1].top1 if field == "top1" else self.later(field)


@dataclass(frozen=True)
class Verdict:
    what: str
    target: str
    measured: list[float]  # by seed
    reached: bool


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
    for entry in os.scandir(mountpoint):  # as image-folder data sets do: the mount learns the names at once
        if entry.is_dir() and entry.name != ".spiderfs":
            os.listdir(entry)
    if configuration.ratio is not None:
        (mountpoint / ".spiderfs" / "ratio").write_text(f"{configuration.ratio}\n")
    hook = attach(mountpoint, model, loader) if sampler is not None else None
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
    """Of one epoch, as the trainer sees it."""

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
        # A sampler that draws a part says how many it has drawn, once it has.
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


# -- what it shows


def by_configuration(runs: list[Run]) -> dict[str, list[Run]]:
    """In the order of seeds; only what has run."""
    return {name: ran for name in CONFIGURATIONS if (ran := [run for run in runs if run.configuration == name])}


def against_baseline(runs: list[Run], name: str, field: str) -> list[tuple[float, float]]:
    """(this configuration's figure, the baseline's of the same seed) for each seed that has both."""
    both = by_configuration(runs)
    baseline = {run.seed: run for run in both.get(BASELINE, [])}
    return [(run.figure(field), baseline[run.seed].figure(field)) for run in both.get(name, []) if run.seed in baseline]


def judge(runs: list[Run], name: str) -> Iterator[Verdict]:
    saved = [ours / theirs for ours, theirs in against_baseline(runs, name, "origin_bytes_per_sample")]
    faster = [theirs / ours for ours, theirs in against_baseline(runs, name, "seconds")]
    gained = [ours - theirs for ours, theirs in against_baseline(runs, name, "top1")]
    if not saved:
        return
    mean = statistics.fmean
    yield Verdict(
        "origin bytes per sample, x lru", f"<= {LEAST_ORIGIN_SAVING}", saved, mean(saved) <= LEAST_ORIGIN_SAVING
    )
    yield Verdict("epochs, times as fast as lru", f">= {LEAST_SPEEDUP}", faster, mean(faster) >= LEAST_SPEEDUP)
    points = [100 * gain for gain in gained]
    yield Verdict(
        "top-1 less uniform's, points", f">= {-100 * MOST_TOP1_LOSS}", points, mean(gained) >= -MOST_TOP1_LOSS
    )


Column = tuple[str, str, str, float]
TRAFFIC: tuple[Column, ...] = (
    ("hits %", "hit_ratio", ".1f", 100),
    ("origin B", "origin_bytes_per_sample", ".0f", 1),
    ("origin x data", "origin_share", ".2f", 1),
    ("reads %", "reads_share", ".0f", 100),
    ("drawn %", "drawn_share", ".1f", 100),
    ("served %", "served_share", ".1f", 100),
    ("redirected %", "redirected_share", ".1f", 100),
)
TRAINING: tuple[Column, ...] = (
    ("s per epoch", "seconds", ".1f", 1),
    ("of it waiting %", "waiting_share", ".0f", 100),
    ("top-1 %", "top1", ".1f", 100),
)


def summary_table(title: str, runs: list[Run], columns: tuple[Column, ...]) -> Table:
    table = plain_table(title)
    table.add_column("", no_wrap=True)
    for heading, *_ in columns:
        table.add_column(heading, justify="right")
    for name, ran in by_configuration(runs).items():
        table.add_row(
            name, *(spread([run.figure(field) for run in ran], form, factor) for _, field, form, factor in columns)
        )
    return table


def ratio_table(runs: list[Run]) -> Table:
    table = plain_table("Against lru of the same seed")
    for heading in ("", "origin bytes a sample x", "an epoch x", "times as fast", "top-1 points"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name in by_configuration(runs):
        verdicts = list(judge(runs, name))
        if verdicts and name != BASELINE:
            a_sample, *others = (spread(verdict.measured, form) for verdict, form in zip(verdicts, FORMS, strict=True))
            an_epoch = [ours / theirs for ours, theirs in against_baseline(runs, name, "origin_share")]
            table.add_row(name, a_sample, spread(an_epoch, ".2f"), *others)
    return table


FORMS = (".2f", ".2f", "+.1f")


def verdict_table(verdicts: list[Verdict]) -> Table:
    table = plain_table("spider against its targets")
    for heading in ("", "target", "measured", " "):
        table.add_column(heading, justify="left" if not heading.strip() else "right", no_wrap=True)
    for verdict, form in zip(verdicts, FORMS, strict=True):
        word = "reached" if verdict.reached else "missed"
        style = "green" if verdict.reached else "red"
        table.add_row(verdict.what, verdict.target, spread(verdict.measured, form), word, style=style)
    return table


def print_run(run: Run, console: Console) -> None:
    console.print(f"{run.configuration}, seed {run.seed}", style="bold", highlight=False)
    for number, epoch in enumerate(run.epochs, 1):
        console.print(
            f"  epoch {number:2}: {epoch.seconds:5.1f} s ({epoch.waiting_share:3.0%} waiting)  "
            f"hits {epoch.hit_ratio:5.1%}  origin {epoch.origin_bytes_per_sample:5.0f} B/sample  "
            f"drawn {epoch.drawn_share:4.0%}  served {epoch.served_share:4.0%}  "
            f"redirected {epoch.redirected_share:5.1%}  top-1 {epoch.top1:5.1%}",
            highlight=False,
            soft_wrap=True,
        )


def plot(runs: list[Run], directory: Path) -> Path:
    """Hit ratio, time and accuracy by epoch: the mean over seeds, and from the lowest to the highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("hit_ratio", 100, "hits, % of opens"),
        ("seconds", 1, "seconds per epoch"),
        ("top1", 100, "top-1 on held-out images, %"),
    )
    colours = {
        "lru": "#7f7f7f",
        "lfu": "#17becf",
        "minio": "#1f77b4",
        "uniform+plan": "#9467bd",
        "shade": "#8c564b",
        "icache": "#e377c2",
        "impact": "#bcbd22",
        "importance": "#ff7f0e",
        "paper": "#d62728",
        "spider": "#2ca02c",
    }
    # These train as lru does, so that their accuracies lie upon each other.
    dashes = {"lfu": ":", "minio": "--", "uniform+plan": "--"}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(13, 4), layout="constrained")
    for axis, (field, factor, title) in zip(axes, panels, strict=True):
        for name, ran in by_configuration(runs).items():
            values = factor * np.array([[getattr(epoch, field) for epoch in run.epochs] for run in ran])
            numbers = np.arange(1, values.shape[1] + 1)
            axis.plot(numbers, values.mean(0), dashes.get(name, "-"), color=colours[name], label=name, marker="o", ms=3)
            axis.fill_between(numbers, values.min(0), values.max(0), color=colours[name], alpha=0.15, linewidth=0)
        axis.set(title=title, xlabel="epoch")
        axis.set_ylim(bottom=0 if field != "top1" else None)
        axis.grid(alpha=0.3)
    axes[1].legend(frameon=False, loc="lower left", ncols=2)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "train.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


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
        with scratch_directory() as scratch, Progress(console=console, transient=True) as progress:
            for seed, name in itertools.product(range(1, extent.seeds + 1), arguments.configs):
                options = CONFIGURATIONS[name].options
                if arguments.bandwidth is not None:
                    options += f",source.bandwidth={arguments.bandwidth}"
                place = scratch / f"{name}-{seed}"
                with mounted(data.root, place, capacity, arguments.latency_ms, options) as mountpoint:
                    runs.append(train(data, mountpoint, name, seed, extent.epochs, progress))
                print_run(runs[-1], console)
    finally:
        # A measurement that is broken off shows what it has.
        if runs:
            show(arguments, extent, data, runs, console)


def show(arguments: argparse.Namespace, extent: Extent, data: Data, runs: list[Run], console: Console) -> None:
    console.print("\nmean ± deviation over seeds; of later epochs, without the first; top-1 after the last")
    console.print(summary_table("What was read", runs, TRAFFIC))
    console.print(summary_table("How training went", runs, TRAINING))
    if verdicts := list(judge(runs, "spider")):
        console.print(ratio_table(runs))
        console.print(verdict_table(verdicts))
    if arguments.json is not None:
        save(arguments.json, result_of(arguments, extent, data, runs))
    if arguments.plot is not None:
        console.print(f"plotted: {plot(runs, arguments.plot)}", soft_wrap=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="DIR/train/CLASS/NAME, DIR/test/...")
    add_extent(parser, FULL, QUICK)
    parser.add_argument(
        "--configs", default=",".join(CONFIGURATIONS), metavar="A,B", help="which to run (default %(default)s)"
    )
    parser.add_argument(
        "--latency-ms", type=float, default=6.0, metavar="MS", help="of the slow source (default %(default)s)"
    )
    parser.add_argument(
        "--bandwidth", type=int, metavar="BYTES", help="that the source delivers in a second (default: no limit)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write train.png there")
    arguments = parser.parse_args()
    arguments.configs = arguments.configs.split(",")
    check_names(parser, arguments.configs, CONFIGURATIONS)
    arguments.extent = extent_of(parser, arguments, QUICK if arguments.quick else FULL)
    for part in ("train", "test"):
        if not (arguments.data / part).is_dir():
            parser.error(f"{arguments.data / part} is not a directory")
    arguments.data = arguments.data.resolve()
    return arguments


def main() -> int:
    arguments = parse_arguments()
    # Its tables are wider than some terminals.
    console = Console(width=max(TABLE_WIDTH, shutil.get_terminal_size().columns))
    return exit_status("train", lambda: measure(arguments, console), "interrupted; everything is unmounted and deleted")


if __name__ == "__main__":
    sys.exit(main())
