"""What a view costs and saves where the cache is small: origin bytes, and the time of epochs, beside originals.

    .venv-dev/bin/python -m benchmarks.training.view_bytes                 some five minutes
    .venv-dev/bin/python -m benchmarks.training.view_bytes --data DIR      the same, of the images in DIR
    .venv-dev/bin/python -m benchmarks.training.view_bytes --quick         under a minute, for a look

A PyTorch DataLoader with two workers reads images through a mount as benchmarks.serving.image_loader does: Pillow
decodes each and crops it at random. Nothing is trained. The mount is not immutable, for with so few images the page
cache would hold all that the cache does not. The source answers 20 ms late, and the cache holds a fifth of the
originals' bytes. Mounts of originals and of the view take turns; each run begins with an empty cache. The first epoch
makes the views. With a plan (trainer_hook.plan) it hides the source, so both cores are busy; "later" is the mean of the
epochs after it. Without a plan the loader waits for the source; only the first epoch is read so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader

import trainer_hook
from benchmarks.common.command import add_data, add_numbers, command_line
from benchmarks.common.images import HELP, make_images
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.mounts import counts, mounted
from benchmarks.common.results import machine, plain_table, save, wide_console
from benchmarks.serving.image_loader import Extent, Images, loader_of

VIEW = "jpeg256"
LATENCY_MS = 20.0
CACHED = 0.2
EPOCHS = 3
TABLE_WIDTH = 100
# Origin bytes of a later epoch, and the time of the first one, with the view against originals: at most so much.
MOST_BYTES, MOST_BUSY, MOST_WAITING = 0.45, 1.9, 1.1

# A mount's options, by what it shows.
SHOWN = {"original": "plan=on", "view": f"plan=on,view={VIEW}"}


FULL, QUICK = Extent(1_000, rounds=3), Extent(200, rounds=1)


@dataclass(frozen=True)
class Run:
    """Seconds and origin bytes of each epoch with a plan; and of the first epoch without one, by a mount of its own."""

    seconds: list[float]
    origin_bytes: list[int]
    unplanned_s: float

    @property
    def first_s(self) -> float:
        return self.seconds[0]

    @property
    def later_s(self) -> float:
        return statistics.fmean(self.seconds[1:])

    @property
    def later_bytes(self) -> float:
        return statistics.fmean(self.origin_bytes[1:])


class Listed(Images):
    """The images, with the files that they are for `trainer_hook.plan`."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(paths)
        self.samples = [(path, 0) for path in paths]


def measure(source: Path, names: list[str], scratch: Path, capacity: int, options: str) -> Run:
    seconds, origin_bytes = [], []
    with mounted(source, scratch, capacity, LATENCY_MS, options) as mount:
        loader = loader_of(Listed([os.path.join(mount, name) for name in names]))
        with trainer_hook.plan(mount, loader):
            for _ in range(EPOCHS):
                before = counts(mount)["origin_bytes"]
                seconds.append(epoch_s(loader))
                origin_bytes.append(counts(mount)["origin_bytes"] - before)
        del loader
    with mounted(source, scratch, capacity, LATENCY_MS, options) as mount:
        unplanned_s = epoch_s(loader_of(Listed([os.path.join(mount, name) for name in names])))
    return Run(seconds, origin_bytes, unplanned_s)


def epoch_s(loader: DataLoader[Tensor]) -> float:
    begin = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - begin


def ratio(runs: dict[str, list[Run]], figure: str) -> float:
    """The median over the rounds of the view's figure, a property of `Run`, divided by the originals'."""
    pairs = zip(runs["view"], runs["original"], strict=True)
    return float(statistics.median(getattr(view, figure) / getattr(original, figure) for view, original in pairs))


def show(runs: dict[str, list[Run]], title: str, console: Console) -> None:
    table = plain_table(title, "", "no plan: first epoch, s", "plan: first epoch, s", "MB", "later epochs, s", "MB")
    for name, of_name in runs.items():
        cells = [
            statistics.median(run.unplanned_s for run in of_name),
            statistics.median(run.first_s for run in of_name),
            statistics.median(run.origin_bytes[0] for run in of_name) / 1e6,
            statistics.median(run.later_s for run in of_name),
            statistics.median(run.later_bytes for run in of_name) / 1e6,
        ]
        table.add_row(name, *(f"{cell:.1f}" for cell in cells))
    console.print(table)
    for what, figure, most in (
        ("origin bytes of a later epoch", "later_bytes", MOST_BYTES),
        ("time of the first epoch with a plan", "first_s", MOST_BUSY),
        ("time of the first epoch without one", "unplanned_s", MOST_WAITING),
    ):
        share = ratio(runs, figure)
        console.print(f"{what}, of originals': {share:.2f}, <= {most}: {'reached' if share <= most else 'missed'}")


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent = QUICK if arguments.quick else FULL
    count, rounds = arguments.images or extent.images, arguments.rounds or extent.rounds
    runs: dict[str, list[Run]] = {name: [] for name in SHOWN}
    with scratch_directory("view_bytes") as scratch:
        source = scratch / "source"
        names = make_images(source, arguments.data, count)
        total_bytes = sum((source / name).stat().st_size for name in names)
        for number in range(rounds):
            for name, options in list(SHOWN.items())[:: -1 if number % 2 else 1]:
                found = measure(source, names, scratch / "m", int(CACHED * total_bytes), options)
                runs[name].append(found)
    show(runs, f"{count:,} images of {total_bytes / count / 1000:.0f} kB, {rounds} rounds", console)
    figures = {name: [asdict(of_run) for of_run in of_name] for name, of_name in runs.items()}
    shares = {figure: ratio(runs, figure) for figure in ("later_bytes", "first_s", "unplanned_s")}
    return {"machine": machine(), "images": count, "bytes": total_bytes, "runs": figures, "of_originals": shares}


def main() -> int:
    parser = command_line(__doc__)
    add_data(parser, HELP)
    add_numbers(parser, FULL, QUICK, images="images", rounds="rounds")
    arguments = parser.parse_args()

    def measure_all() -> None:
        save(arguments.json, run(arguments, wide_console(TABLE_WIDTH)))

    return exit_status("view_bytes", measure_all, "interrupted; everything is unmounted and deleted")


if __name__ == "__main__":
    sys.exit(main())
