"""How fast a real data loader gets images through warm mounts: JPEG decode and random crop, beside the local disk.

    .venv-dev/bin/python -m benchmarks.serving.image_loader                 some two minutes
    .venv-dev/bin/python -m benchmarks.serving.image_loader --quick         under a minute, for a look

A PyTorch DataLoader with two workers reads every image once in an epoch, in a new order: Pillow decodes it, and crops,
resizes and flips it as torchvision's RandomResizedCrop(224) and RandomHorizontalFlip do. Nothing is trained. The images
have ImageNet's size: the photos of --data, or images that are made up (benchmarks/common/images.py). "view" is an
immutable mount that shows a view of each image, so its loader decodes another form. "Buffered" is the same mount, and a
loader that says how large the buffer of a file is: without that, the open() of Python before 3.14 asks the mount
whether the file is a terminal. Systems take turns epoch by epoch. Each has served every image once before, so its cache
and the page cache are warm. A ratio is the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from torch.utils.data import DataLoader, Dataset

from benchmarks import tables
from benchmarks.common.augmentation import as_bytes, crop_of, mirrored
from benchmarks.common.command import add_data, add_names, command_line, main
from benchmarks.common.images import HELP, make_images
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import end_loader_workers, leave_signals_to_the_parent
from benchmarks.common.results import turns
from benchmarks.serving import process_cost
from benchmarks.serving.peers import PEERS, Mounted, install_missing, mounted
from benchmarks.serving.readers import read_all

CROP = 224
BATCH = 64
LOADER_WORKERS = 2
VIEWS = ("jpeg256", "bmp256")
# The loader says how large the buffer of a file is.
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


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent: Extent = arguments.extent
    install_missing(arguments.peers)
    with scratch_directory("image_loader") as scratch, ExitStack() as stack:
        source, others = scratch / "source", [name for name in arguments.peers if name != "native"]
        names = make_images(source, arguments.data, extent.images)
        total_bytes = sum((source / name).stat().st_size for name in names)
        os.sync()
        peers = [stack.enter_context(mounted(name, source, scratch / "peers")) for name in ("native", *others)]
        for view in arguments.views:
            # A socket's path has 107 bytes at most.
            peer = stack.enter_context(mounted("immutable", source, scratch / view, f"view={view}"))
            peers.append(replace(peer, name=f"view {view}"))
        peers += [replace(peer, name=peer.name + BUFFERED) for peer in peers if peer.name not in ("native", "spiderfs")]
        stack.callback(end_loader_workers)  # as long as they live, the mounts are busy
        for peer in [*peers, peers[0]]:
            read_all([os.fsencode(peer.root / name) for name in names], 1, seed=0)
        loaders = []
        for peer in peers:
            buffering = BUFFER_BYTES if peer.name.endswith(BUFFERED) else -1
            loaders.append((peer, loader_of(Images([os.path.join(peer.root, name) for name in names], buffering))))
        for peer, loader in loaders:
            measure(peer, loader)  # begins its workers
        epochs: dict[str, list[Epoch]] = {peer.name: [] for peer in peers}
        for _, (peer, loader) in turns(loaders, extent.rounds):
            epochs[peer.name].append(measure(peer, loader))
        del loaders, loader
    rates = {system: [epoch.images_per_s for epoch in of_system] for system, of_system in epochs.items()}
    shares = {system: tables.rounds(of_system, rates["native"]) for system, of_system in rates.items()}
    figures = {system: [asdict(epoch) for epoch in of_system] for system, of_system in epochs.items()}
    result = {"images": extent.images, "bytes": total_bytes, "epochs": figures, "of_native": shares}
    print(tables.image_loader(result))
    return result


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_data(program, HELP)
    default = ("native", "spiderfs", "immutable")
    add_names(program, "--peers", PEERS, "systems beside native (default spiderfs,immutable)", default=default)
    add_names(program, "--views", VIEWS, "views beside them (default both)", default=VIEWS)
    main(run, program)
