"""Runs `spiderfs demo`, then trains a small network on real images over a slow line in five ways, and compares them.

`spiderfs.sources.slow` simulates the slow line: a mount uses it by `-o source.latency_ms=...`, and without spiderfs
the loader's workers use the same class themselves. The five ways are: straight from the source; through a mount that
evicts what was used longest ago; through a mount with the default policy; through a mount that gets the loader's plan;
and through a mount that a hook guides. The first four read the same bytes in the same order and start from the same
weights, so they must reach the same accuracy, and only the waiting differs. With the hook, the sampler prefers
important samples, so the accuracy is a result there and not a check.

The mounts are `immutable`, as those of nearly all trainings can be. The data of this demo fit into memory, where the
kernel would keep all that it has read of a mount, and the cache would have nothing to do. So whoever reads a file
through a mount has the kernel drop it from memory afterwards, as happens by itself where the data are larger than
memory. All four mounts are read so. Straight from the source, each read waits for the line anyway.

Run it with scripts/demo, which installs what is missing. Whatever ends the demo, Ctrl-C included: the mounts are
unmounted, the loader's workers end, and the temporary directory is deleted.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from image_training import BATCH, SEED, Epoch, ImageFolder, Observer, end_loader_workers, train
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

from spiderfs.linux.mounts import mounts
from spiderfs.sources.local import LocalSource
from spiderfs.sources.slow import SlowSettings, SlowSource
from trainer_hook import Hook, Planning, SpiderSampler, attach, plan

ROOT = Path(__file__).resolve().parent.parent
SPIDERFS = Path(sys.executable).parent / "spiderfs"
MADE_PIXELS = (
    96  # scikit-learn's digits have 8 x 8 pixels; drawn larger, they make files like real images, of about 4 kB
)
CACHED_SHARE = 0.20
HELD_OUT_EVERY = 5
COMMAND_PATIENCE_S = 60.0  # mounting and unmounting take about a second
# The names of the ways of training in the tables and in the plot; each but the first has a mount of that name.
DIRECT, LRU, PLAIN, PLANNED, GUIDED = "direct", "lru", "plain", "plan", "hook"
MOUNTS = {LRU: "lru", PLAIN: "spider", PLANNED: "spider", GUIDED: "spider"}  # the policy of each mount
COLOURS = {DIRECT: "#7f7f7f", LRU: "#1f77b4", PLAIN: "#ff7f0e", PLANNED: "#9467bd", GUIDED: "#2ca02c"}
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}

console = Console()


@dataclass(frozen=True)
class Line:
    """The slow line to the source."""

    latency_ms: float
    bandwidth_bytes_per_s: int


@dataclass(frozen=True)
class Data:
    """An image folder, CLASS/NAME, split into samples to train on and samples held out."""

    root: Path
    classes: list[str]
    training: list[str]
    held_out: list[str]
    training_bytes: int


@dataclass(frozen=True)
class Row:
    """One epoch, with the share of its samples that did not wait for the source, and its origin bytes."""

    epoch: Epoch
    hit_ratio: float
    origin_bytes_per_sample: float


@dataclass(frozen=True)
class Counts:
    """The mount's counts so far: opens that had to wait for the source, and bytes read from it."""

    misses: int
    origin_bytes: int


class SlowReader:
    """Reads samples over the slow line without a cache; every loader worker opens the line for itself.

    One listing finds out all versions beforehand, so a read costs one request to the source and no stat, which is the
    least that reading without a cache can cost.
    """

    def __init__(self, root: Path, samples: list[str], line: Line, state: Path) -> None:
        self._root, self._state = root, state
        SlowSettings.create(state, latency_ms=line.latency_ms, bandwidth=line.bandwidth_bytes_per_s).close()
        listing = LocalSource(str(root))
        self._versions = {path: listing.stat(os.fsencode(path)).version for path in samples}
        listing.close()
        self._source: SlowSource | None = None
        self._opened_by = 0

    def __call__(self, path: str) -> bytes:
        if self._source is None or self._opened_by != os.getpid():
            self._source = SlowSource(LocalSource(str(self._root)), SlowSettings.open(self._state))
            self._opened_by = os.getpid()
        version = self._versions[path]
        return self._source.read(os.fsencode(path), 0, version.size, version)


class PlanObserver:
    """Publishes plans of what the loader will read, without a hook."""

    sampler = None

    def __init__(self, mountpoint: Path) -> None:
        self._mountpoint = mountpoint
        self._planning: Planning | None = None

    def begin(self, model: nn.Module, loader: DataLoader[Any]) -> None:
        self._planning = plan(self._mountpoint, loader)

    def epoch_end(self, accuracy: float) -> None:
        pass

    def close(self) -> None:
        if self._planning is not None:
            self._planning.close()


class HookObserver:
    """The trainer's side of spiderfs: `attach` before the first epoch, `epoch_end` after each."""

    def __init__(self, mountpoint: Path, samples: int) -> None:
        self.sampler = SpiderSampler(samples, seed=SEED)
        self._mountpoint = mountpoint
        self._hook: Hook | None = None

    def begin(self, model: nn.Module, loader: DataLoader[Any]) -> None:
        self._hook = attach(self._mountpoint, model, loader)

    def epoch_end(self, accuracy: float) -> None:
        if self._hook is not None:
            self._hook.epoch_end(accuracy)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.close()


def observer_for(name: str, mountpoint: Path, samples: int) -> PlanObserver | HookObserver | None:
    if name == PLANNED:
        return PlanObserver(mountpoint)
    return HookObserver(mountpoint, samples) if name == GUIDED else None


def make_digits(root: Path) -> None:
    """Write scikit-learn's 1,797 handwritten digits as CLASS/NNNN.png."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        directory = root / str(label)
        directory.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels * 255 / 16).astype(np.uint8))
        image.resize((MADE_PIXELS, MADE_PIXELS), Image.Resampling.BICUBIC).save(directory / f"{number:04d}.png")


def list_images(root: Path) -> list[str]:
    """All images below `root` as CLASS/NAME, sorted."""
    return sorted(
        f"{directory.name}/{entry.name}"
        for directory in os.scandir(root)
        if directory.is_dir()
        for entry in os.scandir(directory)
        if entry.is_file() and Path(entry.name).suffix.lower() in IMAGE_SUFFIXES
    )


def find_samples(root: Path, limit: int) -> Data:
    """The images below `root`, or a random choice of `limit` of them (0 means all), with a part held out."""
    paths = list_images(root)
    random.Random(SEED).shuffle(paths)
    if limit:
        paths = paths[:limit]
    if len(paths) < BATCH * HELD_OUT_EVERY:
        raise SystemExit(f"demo: {root} holds {len(paths)} images as CLASS/NAME, which is too few to train on")
    training = [path for number, path in enumerate(paths) if number % HELD_OUT_EVERY]
    return Data(
        root=root,
        classes=sorted({path.partition("/")[0] for path in paths}),
        training=training,
        held_out=paths[::HELD_OUT_EVERY],
        training_bytes=sum((root / path).stat().st_size for path in training),
    )


def mount_counts(mountpoint: Path) -> Counts:
    """Read the counts from the control file stats.json."""
    metrics = json.loads((mountpoint / ".spiderfs" / "stats.json").read_text())["metrics"]
    return Counts(metrics["opens"] - metrics["opens_hit"], metrics["origin_bytes"])


def command(*words: str | Path) -> None:
    """Print a spiderfs command as a user would type it, and run it; raises SubprocessError if it fails or hangs."""
    console.print("[bold]$ spiderfs", shlex.join(map(str, words)), soft_wrap=True, highlight=False)
    subprocess.run([SPIDERFS, *words], check=True, timeout=COMMAND_PATIENCE_S)


@contextmanager
def mounted(source: Path, scratch: Path, name: str, line: Line, capacity_bytes: int) -> Iterator[Path]:
    mountpoint = mountpoint_of(scratch, name)
    mountpoint.mkdir(parents=True)
    options = {
        "policy": MOUNTS[name],
        "immutable": "on",
        "capacity": f"{capacity_bytes // 1024}KiB",
        "cache_dir": scratch / name / "cache",
        "source.latency_ms": f"{line.latency_ms:g}",
        "source.bandwidth": line.bandwidth_bytes_per_s,
    }
    try:
        command("mount", source, mountpoint, "-o", ",".join(f"{name}={value}" for name, value in options.items()))
        yield mountpoint
    finally:
        end_loader_workers()  # as long as they live, the mount is busy
        if is_mounted(mountpoint):
            command("umount", mountpoint)


def mountpoint_of(scratch: Path, name: str) -> Path:
    return scratch / name / "mnt"


def is_mounted(mountpoint: Path) -> bool:
    """Whether something is mounted there, as the kernel's table says; a stat of the mount point could hang."""
    return any(mount.mountpoint == mountpoint for mount in mounts())


def train_through_mount(
    data: Data, held_out: ImageFolder, mountpoint: Path, epochs: int, observer: Observer | None = None
) -> Iterator[Row]:
    def read(path: str) -> bytes:
        with (mountpoint / path).open("rb") as file:
            content = file.read()
            # As if the data were larger than memory: see above.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return content

    # Every image-folder data set lists the folder first, and so the mount learns all names at once.
    if not set(data.training) <= set(list_images(mountpoint)):
        raise SystemExit("demo: the mount does not show the files of its source")
    before = mount_counts(mountpoint)
    for epoch in train(ImageFolder(data.training, data.classes, read), held_out, epochs, console, observer):
        after = mount_counts(mountpoint)
        # Counted by what was drawn: of the mount's opens, those are missing that the kernel answered from memory.
        drawn = len(data.training)
        hit_ratio = 1 - (after.misses - before.misses) / drawn
        yield Row(epoch, hit_ratio, (after.origin_bytes - before.origin_bytes) / drawn)
        before = after


def train_directly(data: Data, held_out: ImageFolder, read: SlowReader, epochs: int) -> Iterator[Row]:
    # Nothing is cached and every file is read once as a whole, so the bytes are known without counting.
    bytes_per_sample = data.training_bytes / len(data.training)
    for epoch in train(ImageFolder(data.training, data.classes, read), held_out, epochs, console):
        yield Row(epoch, 0.0, bytes_per_sample)


def report(title: str, rows: Iterator[Row]) -> list[Row]:
    """Print each epoch as it ends."""
    console.print(f"\n[bold cyan]{title}")
    done = []
    for row in rows:
        done.append(row)
        console.print(
            f"  epoch {len(done)}: {row.epoch.seconds:5.1f} s   accuracy {row.epoch.accuracy:.1%}   hits"
            f" {row.hit_ratio:5.1%}   origin bytes/sample {row.origin_bytes_per_sample:,.0f}",
            highlight=False,
        )
    return done


def compare(ways: dict[str, list[Row]]) -> Table:
    table = Table(title="Comparison", title_justify="left", box=box.SIMPLE)
    table.add_column()
    for name in ways:
        table.add_column(name, justify="right")

    def line(name: str, write: Callable[[list[Row]], str]) -> None:
        table.add_row(name, *(write(rows) for rows in ways.values()))

    line("first epoch, s", lambda rows: f"{rows[0].epoch.seconds:.1f}")
    line("each later epoch, s", lambda rows: f"{mean(row.epoch.seconds for row in rows[1:]):.1f}")
    line("hit ratio, later epochs", lambda rows: f"{mean(row.hit_ratio for row in rows[1:]):.1%}")
    line(
        "origin bytes per sample, later epochs",
        lambda rows: f"{mean(row.origin_bytes_per_sample for row in rows[1:]):,.0f}",
    )
    line("all epochs, s", lambda rows: f"{sum(row.epoch.seconds for row in rows):.1f}")
    line("accuracy at the end", lambda rows: f"{rows[-1].epoch.accuracy:.1%}")
    return table


def plot(ways: dict[str, list[Row]], path: Path) -> None:
    """Hit ratio, time and accuracy by epoch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: tuple[tuple[str, Callable[[Row], float]], ...] = (
        ("hits, % of samples", lambda row: 100 * row.hit_ratio),
        ("seconds per epoch", lambda row: row.epoch.seconds),
        ("accuracy on held-out images, %", lambda row: 100 * row.epoch.accuracy),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(13, 4), layout="constrained")
    for axis, (title, value) in zip(axes, panels, strict=True):
        for name, rows in ways.items():
            numbers = range(1, len(rows) + 1)
            # The first four have the same accuracy; their markers get smaller, so that all of them can be seen.
            size = 11 - 2 * list(ways).index(name)
            axis.plot(numbers, [value(row) for row in rows], color=COLOURS[name], marker="o", ms=size, label=name)
        axis.set(title=title, xlabel="epoch", xticks=range(1, len(ways[DIRECT]) + 1))
        axis.set_ylim(bottom=None if "accuracy" in title else 0)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


EXPECTATION = f"""\
What to expect: where an epoch reads every sample exactly once, in random
order, no policy can have more hits than the share of samples in the cache, here
about {CACHED_SHARE:.0%}. The default policy reaches that without a hook ("plain"), while
evicting what was used longest ago has only a few percent. One more line in the
training ("plan") publishes a plan of what will be read, and the mount fetches it in
time: the bytes are about as many, but the training hardly waits for them, from
the first epoch on. With the hook ("hook"), the sampler draws important samples
more often and the cache keeps them, so fewer bytes have to be fetched at all.
A few epochs of so small a set say little about accuracy;
benchmarks/training/train.py measures that.
"""


def demo(arguments: argparse.Namespace, scratch: Path) -> None:
    console.print("[bold]$ spiderfs demo", highlight=False)
    subprocess.run([SPIDERFS, "demo"], check=True, env={**os.environ, "TMPDIR": str(scratch)})
    console.print("\n[bold]The same with a training on real images, and its accuracy[/bold]")
    root = arguments.data
    if root is None:
        root = scratch / "digits"
        console.print("Making an image folder of scikit-learn's handwritten digits ...")
        make_digits(root)
    elif (root / "train").is_dir():
        root = root / "train"
    data = find_samples(root, arguments.samples)
    line = Line(arguments.latency_ms, arguments.bandwidth_mb * 1_000_000)
    console.print(
        f"{len(data.training):,} images to train on ({data.training_bytes / 1e6:.1f} MB), {len(data.held_out):,} held"
        f" out, {len(data.classes)} classes.\nThe source is {line.latency_ms:g} ms away and sends"
        f" {arguments.bandwidth_mb} MB/s; the cache holds {CACHED_SHARE:.0%} of the training bytes.\nHits are"
        " samples that did not wait for the source. What was read through a mount is dropped from memory, as if the"
        " data were larger than that.",
        highlight=False,
    )
    # Held-out samples are read from the disk, not through the mount, so that the figures are those of training alone.
    held_out = ImageFolder(data.held_out, data.classes, lambda path: (root / path).read_bytes())

    reader = SlowReader(root, data.training, line, scratch / "line")
    rows = train_directly(data, held_out, reader, arguments.epochs)
    ways = {DIRECT: report("Training without spiderfs, straight from the slow source", rows)}
    capacity = int(data.training_bytes * CACHED_SHARE)
    for name, title in (
        (LRU, "Through a mount that evicts what was used longest ago (policy=lru)"),
        (PLAIN, "Through a spiderfs mount with the default policy, without a hook"),
        (PLANNED, "Through a spiderfs mount that gets plans of what the loader will read"),
        (GUIDED, "Through a spiderfs mount, with the hook and its sampler"),
    ):
        with mounted(root, scratch, name, line, capacity) as mountpoint:
            observer = observer_for(name, mountpoint, len(data.training))
            rows = train_through_mount(data, held_out, mountpoint, arguments.epochs, observer)
            try:
                ways[name] = report(title, rows)
            finally:
                if observer is not None:
                    observer.close()

    console.print(compare(ways))
    plot(ways, arguments.plot)
    console.print(f"Plotted: {arguments.plot}\n", highlight=False, soft_wrap=True)
    console.print(EXPECTATION, highlight=False, soft_wrap=True)
    print_next_steps(arguments.data)


def print_next_steps(data: Path | None) -> None:
    example = data if data is not None else ROOT / "spiderfs"
    spiderfs = os.path.relpath(SPIDERFS) if SPIDERFS.is_relative_to(Path.cwd()) else str(SPIDERFS)
    console.print("[bold]Try next[/bold], with a folder of your own in place of the first one:", highlight=False)
    for step in (
        "mkdir -p /tmp/spiderfs-try",
        f"{spiderfs} mount {shlex.quote(str(example.resolve()))} /tmp/spiderfs-try -o capacity=20%",
        "ls /tmp/spiderfs-try",
        f"{spiderfs} status /tmp/spiderfs-try",
        f"{spiderfs} umount /tmp/spiderfs-try",
    ):
        console.print(f"  {step}", soft_wrap=True, highlight=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="Train without spiderfs and through it, and compare."
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="an image folder, DIR/CLASS/NAME or DIR/train/CLASS/NAME"
    )
    parser.add_argument(
        "--samples", type=int, default=2000, help="how many images to use, 0 for all (default %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=4, help="number of epochs, at least 2 (default %(default)s)")
    parser.add_argument("--latency-ms", type=float, default=10, help="latency of the slow source (default %(default)s)")
    parser.add_argument(
        "--bandwidth-mb", type=int, default=20, help="megabytes per second of the slow source (default %(default)s)"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        default=Path(tempfile.gettempdir()) / f"spiderfs-demo-{getpass.getuser()}.png",
        help="write the plot to FILE (default %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.data is not None and not arguments.data.is_dir():
        parser.error(f"{arguments.data} is not a directory")
    if not os.access(arguments.plot if arguments.plot.exists() else arguments.plot.parent, os.W_OK):
        parser.error(f"{arguments.plot} cannot be written: choose another file with --plot")
    if arguments.epochs < 2:
        parser.error("the first epoch only fills the cache: choose --epochs 2 or more")
    return arguments


def terminated(_signal: int, _frame: object) -> None:
    # The exception ends every open context, so that nothing is left behind.
    raise KeyboardInterrupt


def main() -> int:
    arguments = parse_arguments()
    # SIGINT is set too, because a shell makes the programs that it starts in the background ignore it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, terminated)
    scratch = Path(tempfile.mkdtemp(prefix="spiderfs-demo."))
    try:
        demo(arguments, scratch)
    except KeyboardInterrupt:
        console.print("\ninterrupted; everything is unmounted and deleted")
        return 130
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"demo: {shlex.join(map(str, error.cmd))} failed", file=sys.stderr)
        return 1
    finally:
        for mountpoint in (mountpoint_of(scratch, name) for name in MOUNTS):
            if is_mounted(mountpoint):
                # `spiderfs umount` has failed; a lazy unmount ends the mount as soon as no one uses it.
                subprocess.run(["fusermount3", "-u", "-z", mountpoint], check=False)
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
