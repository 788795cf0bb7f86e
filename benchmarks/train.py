"""Real training through a cache of a fifth of the data, over a slow source: what each way of caching costs and teaches.

    .venv/bin/python benchmarks/train.py --data DIR             the whole measurement, about twenty-five minutes
    .venv/bin/python benchmarks/train.py --data DIR --quick     about a minute, for a look

DIR holds train/CLASS/NAME and test/CLASS/NAME. Every run trains the same small residual network on the same images
through a mount of its own with an empty cache; the configurations take turns seed by seed, so that what else goes on
on the machine falls on all of them alike:

    lru            evicts what was used longest ago; uniform sampling, each sample once an epoch
    minio          keeps what came first; the same samples in the same order, so the same accuracy
    uniform+plan   the same samples in the same order, published beforehand: evicted by next use, fetched ahead
    importance     the hook scores samples, the sampler draws by score, the cache keeps the highest; none is replaced
    paper          the same with hubs that stand in for samples of the same class that are not cached (SpiderCache)
    spider         spiderfs as it is: published beforehand, hubs stand in only for what nobody fetches; and as it is
                   recommended: three tenths of the draws uniform, losses weighted by 1/(N q)

What scores from the loss cost and save in place of the graph's is in accuracy.py.

Held-out images are read past the mount. The network has one thread: two loader workers and the daemon need the rest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interruption import exit_status
from PIL import Image
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainer_hook import Hook, SpiderSampler, attach, plan

SPIDERFS = Path(sys.executable).parent / "spiderfs"
COMMAND_PATIENCE_S = 60.0
WORKER_PATIENCE_S = 5.0
CACHED_SHARE = 0.20
BATCH = 64
EVALUATED = 500  # images at a time
PIXELS = 32
LOADER_WORKERS = 2
LEARNING_RATE = 4e-3
MOST_WEIGHT = 4.0
# Of the images, not of the training: all seeds train on the same ones.
DRAW_SEED = 0
LEAST_ORIGIN_SAVING, LEAST_SPEEDUP, MOST_TOP1_LOSS = 0.5, 2.2, 0.005


@dataclass(frozen=True)
class Configuration:
    options: str
    planned: bool = False  # by the loader alone
    guided: bool = False  # by the hook and its sampler
    coverage: float = 0.0  # share of the sampler's draws that are uniform
    weighted: bool = False  # losses, by hook.weights()
    ratio: float | None = None  # share of the importance section, if pinned


CONFIGURATIONS = {
    "lru": Configuration("policy=lru"),
    "minio": Configuration("policy=minio"),
    "uniform+plan": Configuration("policy=minio", planned=True),
    "importance": Configuration("plan=off,substitute=off", guided=True, ratio=1.0),
    "paper": Configuration("plan=off,substitute_when=miss", guided=True),
    "spider": Configuration("policy=spider", guided=True, coverage=0.3, weighted=True),
}
BASELINE = "lru"


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    epochs: int
    training: int
    held_out: int
    seeds: int


FULL = Extent(epochs=8, training=3_000, held_out=2_000, seeds=3)
QUICK = Extent(epochs=3, training=1_000, held_out=500, seeds=1)


@dataclass(frozen=True)
class Epoch:
    """One epoch of training, without the evaluation after it."""

    hit_ratio: float
    origin_bytes_per_sample: float
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


@dataclass(frozen=True)
class Data:
    root: Path  # of the training images
    training: list[tuple[str, int]]  # CLASS/NAME and label
    training_bytes: int
    images: Tensor  # held out
    labels: Tensor
    classes: int


class Images(Dataset[tuple[Tensor, int, int, int]]):
    """Image, label, index, and the inode that the mount served for it: another than its own where one stood in."""

    def __init__(self, root: Path, samples: list[tuple[str, int]]) -> None:
        self.samples = [(str(root / path), label) for path, label in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int, int]:
        path, label = self.samples[index]
        with open(path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            return decoded(file), label, index, inode


def decoded(file: Any) -> Tensor:
    image = Image.open(file).convert("RGB")
    if image.size != (PIXELS, PIXELS):
        image = image.resize((PIXELS, PIXELS))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 - 0.5


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def network(classes: int) -> nn.Module:
    """A residual network of three stages; it halves the image at once, so that a CPU is faster than the source."""
    widths = (16, 16, 32, 64)
    stages = [Block(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)]
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def find_data(root: Path, extent: Extent) -> Data:
    """A draw of the images below root/train and root/test; raises RuntimeError if there are too few."""
    drawn: dict[str, list[tuple[str, int]]] = {}
    for part, wanted in (("train", extent.training), ("test", extent.held_out)):
        classes = sorted(entry.name for entry in os.scandir(root / part) if entry.is_dir())
        found = sorted(
            (f"{name}/{entry.name}", label)
            for label, name in enumerate(classes)
            for entry in os.scandir(root / part / name)
            if entry.is_file()
        )
        if len(found) < wanted:
            raise RuntimeError(f"{root / part} holds {len(found)} images, not {wanted}")
        drawn[part] = sorted(random.Random(DRAW_SEED).sample(found, wanted))
    held_out = []
    for path, _ in drawn["test"]:
        with open(root / "test" / path, "rb") as file:
            held_out.append(decoded(file))
    return Data(
        root=root / "train",
        training=drawn["train"],
        training_bytes=sum((root / "train" / path).stat().st_size for path, _ in drawn["train"]),
        images=torch.stack(held_out),
        labels=torch.tensor([label for _, label in drawn["test"]]),
        classes=len({path.partition("/")[0] for path, _ in drawn["train"]}),
    )


# -- one run


def counts(mountpoint: Path) -> dict[str, int]:
    metrics: dict[str, int] = json.loads((mountpoint / ".spiderfs" / "stats.json").read_text())["metrics"]
    return metrics


def train(data: Data, mountpoint: Path, name: str, seed: int, epochs: int, progress: Progress) -> Run:
    """Train through the mount, and evaluate after each epoch."""
    configuration = CONFIGURATIONS[name]
    torch.manual_seed(seed)
    model = network(data.classes)
    samples = Images(mountpoint, data.training)
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_size=BATCH,
        sampler=SpiderSampler(len(samples), seed=seed, coverage=configuration.coverage)
        if configuration.guided
        else None,
        shuffle=None if configuration.guided else True,
        num_workers=LOADER_WORKERS,
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=leave_signals_to_the_parent,
    )
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, epochs * len(loader))
    for entry in os.scandir(mountpoint):  # as image-folder data sets do: the mount learns the names at once
        if entry.is_dir() and entry.name != ".spiderfs":
            os.listdir(entry)
    if configuration.ratio is not None:
        (mountpoint / ".spiderfs" / "ratio").write_text(f"{configuration.ratio}\n")
    hook = attach(mountpoint, model, loader) if configuration.guided else None
    planning = plan(mountpoint, loader) if configuration.planned else None
    task = progress.add_task(f"{name}, seed {seed}", total=epochs * len(loader))
    done = []
    try:
        for _ in range(epochs):
            before = counts(mountpoint)
            weighting = hook if configuration.weighted else None
            figures = train_epoch(model, loader, optimizer, schedule, progress, task, weighting)
            after = counts(mountpoint)
            top1 = evaluate(model, data)
            if hook is not None:
                hook.epoch_end(top1)
            done.append(epoch_of(figures, before, after, len(samples), top1))
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
    drawn: set[int]
    served: set[int]


def train_epoch(
    model: nn.Module,
    loader: DataLoader[Any],
    optimizer: Any,
    schedule: Any,
    progress: Progress,
    task: Any,
    weighting: Hook | None,
) -> Figures:
    model.train()
    figures = Figures(0.0, 0.0, set(), set())
    begin = asked = time.monotonic()
    for images, labels, indices, inodes in loader:
        figures.waiting_s += time.monotonic() - asked
        flipped = torch.rand(len(images)) < 0.5
        images = torch.where(flipped[:, None, None, None], images.flip(3), images)
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
        if weighting is not None:
            losses = losses * weighting.weights(clip=MOST_WEIGHT)
        losses.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        figures.drawn.update(indices.tolist())
        figures.served.update(inodes.tolist())
        progress.advance(task)
        asked = time.monotonic()
    figures.seconds = time.monotonic() - begin
    return figures


def epoch_of(figures: Figures, before: dict[str, int], after: dict[str, int], samples: int, top1: float) -> Epoch:
    opens, hits, redirects, origin_bytes = (
        after[name] - before[name] for name in ("opens", "opens_hit", "redirects", "origin_bytes")
    )
    return Epoch(
        hit_ratio=hits / opens,
        origin_bytes_per_sample=origin_bytes / opens,
        drawn_share=len(figures.drawn) / samples,
        served_share=len(figures.served) / samples,
        redirected_share=redirects / opens,
        seconds=figures.seconds,
        waiting_share=figures.waiting_s / figures.seconds,
        top1=top1,
    )


def evaluate(model: nn.Module, data: Data) -> float:
    model.eval()
    with torch.no_grad():
        parts = [data.images[first : first + EVALUATED] for first in range(0, len(data.images), EVALUATED)]
        guesses = torch.cat([model(part).argmax(1) for part in parts])
    return float((guesses == data.labels).float().mean())


def sent_and_dropped(hook: Hook | None) -> tuple[int, int]:
    return (0, 0) if hook is None else (hook.counts["sent"], hook.counts["dropped"])


def leave_signals_to_the_parent(_worker: int) -> None:
    # Ctrl-C reaches every process of the terminal; the parent unwinds and ends its workers, without their tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def end_loader_workers() -> None:
    """After an interrupt: its traceback keeps the loader alive, and so its workers, who would go on reading."""
    for process in multiprocessing.active_children():
        process.terminate()
        process.join(WORKER_PATIENCE_S)


# -- the mount


@contextmanager
def mounted(source: Path, scratch: Path, capacity: int, latency_ms: float, options: str) -> Iterator[Path]:
    """A mount with an empty cache; it and everything in `scratch` are gone when the context ends."""
    mountpoint = scratch / "mnt"
    mountpoint.mkdir(parents=True)
    given = f"capacity={capacity},cache_dir={scratch / 'cache'},log_file={scratch / 'log'}"
    given += f",source.latency_ms={latency_ms:g},{options}"
    try:
        spiderfs("mount", source, mountpoint, "-o", given)
        yield mountpoint
    finally:
        end_loader_workers()  # else the mount is busy
        try:
            if is_mounted(mountpoint):
                spiderfs("umount", mountpoint)
        finally:
            if is_mounted(mountpoint):
                subprocess.run(["fusermount3", "-u", "-z", mountpoint], check=False)
            shutil.rmtree(scratch, ignore_errors=True)


def spiderfs(*words: str | Path) -> None:
    """Raises RuntimeError, with what the command said, if it fails or hangs."""
    try:
        done = subprocess.run(
            [SPIDERFS, *words], stderr=subprocess.PIPE, text=True, check=False, timeout=COMMAND_PATIENCE_S
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"spiderfs {words[0]} did not end in {COMMAND_PATIENCE_S:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"spiderfs {words[0]} failed: {done.stderr.strip()}")


def is_mounted(mountpoint: Path) -> bool:
    """From the kernel's table: a stat of the mount point could hang with the mount."""
    return any(line.split()[1] == str(mountpoint) for line in Path("/proc/self/mounts").read_text().splitlines())


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


def spread(values: Sequence[float], form: str, factor: float = 1.0) -> str:
    """Mean and standard deviation over seeds."""
    text = format(statistics.fmean(values) * factor, form)
    return text if len(values) < 2 else f"{text} ± {format(statistics.stdev(values) * factor, form.removeprefix('+'))}"


Column = tuple[str, str, str, float]
TRAFFIC: tuple[Column, ...] = (
    ("hits %", "hit_ratio", ".1f", 100),
    ("origin B", "origin_bytes_per_sample", ".0f", 1),
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
    for heading in ("", "origin bytes x", "times as fast", "top-1 points"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name in by_configuration(runs):
        verdicts = list(judge(runs, name))
        if verdicts and name != BASELINE:
            table.add_row(
                name, *(spread(verdict.measured, form) for verdict, form in zip(verdicts, FORMS, strict=True))
            )
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


def plain_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE, show_edge=False, pad_edge=False)


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
        "minio": "#1f77b4",
        "uniform+plan": "#9467bd",
        "importance": "#ff7f0e",
        "paper": "#d62728",
        "spider": "#2ca02c",
    }
    # These train as lru does, so that their accuracies lie upon each other.
    dashes = {"minio": "--", "uniform+plan": "--"}
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


@contextmanager
def scratch_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="spiderfs-train."))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def result_of(arguments: argparse.Namespace, extent: Extent, data: Data, runs: list[Run]) -> dict[str, Any]:
    return {
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "load_average": os.getloadavg(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        },
        "extent": asdict(extent),
        "latency_ms": arguments.latency_ms,
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
        f"cache {CACHED_SHARE:.0%}; source {arguments.latency_ms:g} ms away; {LOADER_WORKERS} loader workers",
        highlight=False,
    )
    runs: list[Run] = []
    try:
        with scratch_directory() as scratch, Progress(console=console, transient=True) as progress:
            for seed, name in itertools.product(range(1, extent.seeds + 1), arguments.configs):
                options = CONFIGURATIONS[name].options
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
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result_of(arguments, extent, data, runs), indent=1) + "\n")
    if arguments.plot is not None:
        console.print(f"plotted: {plot(runs, arguments.plot)}", soft_wrap=True)


def check_names(parser: argparse.ArgumentParser, given: list[str], known: Iterable[str]) -> None:
    if unknown := set(given) - set(known):
        parser.error(f"no such configuration: {', '.join(sorted(unknown))}; choose from {','.join(known)}")


def extent_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace, usual: Extent) -> Extent:
    """The usual one, with what was given in place."""
    extent = asdict(usual)
    extent |= {field: given for field in extent if (given := getattr(arguments, field)) is not None}
    if extent["epochs"] < 2 or extent["seeds"] < 1 or extent["training"] < BATCH:
        parser.error(f"at least 2 epochs (the first fills the cache), 1 seed and {BATCH} training images")
    return Extent(**extent)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="DIR/train/CLASS/NAME, DIR/test/...")
    parser.add_argument("--quick", action="store_true", help="fewer images, epochs and seeds: about a minute")
    for name, field in (("epochs", "epochs"), ("train-samples", "training"), ("test-samples", "held_out")):
        parser.add_argument(
            f"--{name}",
            type=int,
            dest=field,
            metavar="N",
            help=f"default {getattr(FULL, field)}, quick {getattr(QUICK, field)}",
        )
    parser.add_argument("--seeds", type=int, metavar="N", help=f"default {FULL.seeds}, quick {QUICK.seeds}")
    parser.add_argument(
        "--configs", default=",".join(CONFIGURATIONS), metavar="A,B", help="which to run (default %(default)s)"
    )
    parser.add_argument(
        "--latency-ms", type=float, default=6.0, metavar="MS", help="of the slow source (default %(default)s)"
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
    console = Console()
    return exit_status("train", lambda: measure(arguments, console), "interrupted; everything is unmounted and deleted")


if __name__ == "__main__":
    sys.exit(main())
