"""How fast a real data loader gets images through warm mounts: JPEG decode and random crop, beside the local disk.

    .venv-dev/bin/python -m benchmarks.serving.image_loader                 some two minutes
    .venv-dev/bin/python -m benchmarks.serving.image_loader --data DIR      the same, of the images in DIR
    .venv-dev/bin/python -m benchmarks.serving.image_loader --quick         under a minute, for a look

A PyTorch DataLoader with two workers reads every image once in an epoch, in a new order: Pillow decodes it, and crops,
resizes and flips it as torchvision's RandomResizedCrop(224) and RandomHorizontalFlip do. Nothing is trained. The images
have ImageNet's size: the photos of --data, or images that are made up (benchmarks/common/images.py). "view" is an
immutable mount that shows a view of each image, so its loader decodes another form; "local" has copies of these views
on the local disk, which are as fast as a mount of them can be. "buffered" is the same mount, and a loader that says how
large the buffer of a file is: without that, the open() of Python before 3.14 asks the mount whether the file is a
terminal. Systems take turns epoch by epoch. Each has served every image once before, so its cache and the page cache
are warm. A ratio is the median of the ratios within a round. "CPU" is the processor time of the loader's workers and
the daemon together, which other load on the machine changes less than it changes the rate.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from torch.utils.data import DataLoader, Dataset

from benchmarks.common.augmentation import as_bytes, crop_of, mirrored
from benchmarks.common.command import add_data, add_names, add_numbers, command_line
from benchmarks.common.images import HELP, make_images
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.mounts import end_loader_workers, leave_signals_to_the_parent
from benchmarks.common.results import at_least, machine, plain_table, save, wide_console
from benchmarks.serving import process_cost
from benchmarks.serving.peers import PEERS, Mounted, install_missing, mounted
from benchmarks.serving.readers import read_all

CROP = 224
BATCH = 64
LOADER_WORKERS = 2
TABLE_WIDTH = 100
# The share of the local disk's rate that each must reach.
TARGETS = {"immutable": 0.97, "view jpeg256": 1.9, "view bmp256": 2.6}
VIEWS = ("jpeg256", "bmp256")
BUFFERED, BUFFER_BYTES = ", buffered", 64 << 10


@dataclass(frozen=True)
class Extent:
    images: int
    rounds: int


FULL, QUICK = Extent(2_000, rounds=9), Extent(500, rounds=3)


@dataclass(frozen=True)
class Epoch:
    """One epoch of one system."""

    images_per_s: float
    cpu_ms_per_image: float


class Images(Dataset[torch.Tensor]):
    """Decoded, cropped and flipped images, as bytes in the form (3, 224, 224)."""

    def __init__(self, paths: list[str], buffering: int = -1) -> None:
        """`buffering`: see open()."""
        self._paths = paths
        self._buffering = buffering

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self._paths[index], "rb", buffering=self._buffering) as opened, Image.open(opened) as file:
            image = file.convert("RGB")
        cropped = image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=crop_of(*image.size))
        return as_bytes(mirrored(cropped))


def copy_files(root: Path, names: list[str], into: Path) -> None:
    for name in names:
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, into / name)


def images_of(peer: Mounted, names: list[str]) -> Images:
    paths = [os.path.join(peer.root, name) for name in names]
    return Images(paths, BUFFER_BYTES if peer.name.endswith(BUFFERED) else -1)


def loader_of(images: Images) -> DataLoader[torch.Tensor]:
    return DataLoader(
        images,
        batch_size=BATCH,
        shuffle=True,
        num_workers=LOADER_WORKERS,
        persistent_workers=True,
        worker_init_fn=leave_signals_to_the_parent,
    )


def measure(peer: Mounted, loader: DataLoader[torch.Tensor]) -> Epoch:
    # The workers of other systems wait meanwhile, and cost nothing.
    processes = [*peer.processes(), *(child.pid for child in multiprocessing.active_children() if child.pid)]
    before_s = process_cost.cpu_seconds(processes)
    begin = time.perf_counter()
    images = sum(len(batch) for batch in loader)
    took_s = time.perf_counter() - begin
    cpu_s = process_cost.cpu_seconds(processes) - before_s
    return Epoch(images / took_s, cpu_s / images * 1000)


def ratio(epochs: dict[str, list[Epoch]], system: str, field: str = "images_per_s") -> float:
    """How many times the local disk's figure a system's is: the median of the ratios within the rounds."""
    pairs = zip(epochs[system], epochs["native"], strict=True)
    return float(statistics.median(getattr(ours, field) / getattr(local, field) for ours, local in pairs))


def show(epochs: dict[str, list[Epoch]], title: str, console: Console) -> None:
    table = plain_table(title, "", "images/s", "least", "most", "x native", "CPU ms/image", "x native", "target")
    for system, of_system in epochs.items():
        rates = [epoch.images_per_s for epoch in of_system]
        cost_ms = statistics.median(epoch.cpu_ms_per_image for epoch in of_system)
        share = ratio(epochs, system)
        cells = [f"{figure:,.0f}" for figure in (statistics.median(rates), min(rates), max(rates))]
        of_local = ratio(epochs, system, "cpu_ms_per_image")
        table.add_row(
            system,
            *cells,
            f"{share:.3f}",
            f"{cost_ms:.3f}",
            f"{of_local:.3f}",
            at_least(TARGETS.get(system.removesuffix(BUFFERED)), share),
        )
    console.print(table)


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent = QUICK if arguments.quick else FULL
    count, rounds = arguments.images or extent.images, arguments.rounds or extent.rounds
    epochs: dict[str, list[Epoch]] = {}
    with scratch_directory("image_loader") as scratch, ExitStack() as stack:
        names = make_images(scratch / "source", arguments.data, count)
        total_bytes = sum((scratch / "source" / name).stat().st_size for name in names)
        os.sync()
        source, others = scratch / "source", [name for name in arguments.peers if name != "native"]
        peers = [stack.enter_context(mounted(name, source, scratch / "peers")) for name in ("native", *others)]
        for view in arguments.views:
            # A socket's path has 107 bytes at most.
            peer = stack.enter_context(mounted("immutable", source, scratch / view, f"view={view}"))
            peers.append(replace(peer, name=f"view {view}"))
            copies = scratch / "copies" / view
            copy_files(peer.root, names, copies)
            peers.append(Mounted(f"local {view}", copies, None))
        for peer in [peer for peer in peers if peer.name in TARGETS]:
            peers.append(replace(peer, name=peer.name + BUFFERED))
        stack.callback(end_loader_workers)  # as long as they live, the mounts are busy
        for peer in [*peers, peers[0]]:
            read_all([os.fsencode(peer.root / name) for name in names], 1, seed=0)
        loaders = [(peer, loader_of(images_of(peer, names))) for peer in peers]
        for peer, loader in loaders:
            measure(peer, loader)  # begins its workers
        for number in range(rounds):
            first = number % len(loaders)
            for peer, loader in loaders[first:] + loaders[:first]:
                epochs.setdefault(peer.name, []).append(measure(peer, loader))
        epochs = {peer.name: epochs[peer.name] for peer in peers}
        show(epochs, f"{count:,} images of {total_bytes / count / 1000:.0f} kB, {rounds} rounds", console)
        del loaders, loader
    shares = {system: ratio(epochs, system) for system in epochs}
    figures = {system: [asdict(epoch) for epoch in of_system] for system, of_system in epochs.items()}
    return {"machine": machine(), "images": count, "bytes": total_bytes, "epochs": figures, "of_native": shares}


def main() -> int:
    parser = command_line(__doc__)
    add_data(parser, HELP)
    add_numbers(parser, FULL, QUICK, images="images", rounds="rounds")
    default = ("native", "spiderfs", "immutable")
    add_names(parser, "--peers", PEERS, "systems beside native (default spiderfs,immutable)", default=default)
    add_names(parser, "--views", VIEWS, "views beside them (default both)", default=VIEWS)
    arguments = parser.parse_args()

    def measure_all() -> None:
        install_missing(arguments.peers)
        save(arguments.json, run(arguments, wide_console(TABLE_WIDTH)))

    return exit_status("image_loader", measure_all, "interrupted; everything is unmounted and deleted")


if __name__ == "__main__":
    sys.exit(main())
