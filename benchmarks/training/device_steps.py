"""Whether a mount keeps a device busy, and what the hook costs its steps.

    .venv-dev/bin/python -m benchmarks.training.device_steps --json FILE      ten minutes, on a GPU
    .venv-dev/bin/python -m benchmarks.training.device_steps --quick          a minute on a CPU, to see that it runs

Loader workers read whole files, and a ResNet-50 (a small network with --quick) trains on images that lie on the device
already: as in MLPerf Storage, nothing is decoded, so that storage alone can make the device wait. **Utilisation** is
the time of the steps as a share of the epoch (MLPerf Storage asks for 90 %). The device is timed from the first to the
last kernel of each step, by CUDA events or by the clock of a CPU, whose steps take cores from the daemon.

    local            the local disk, without a mount
    source           the source, without a mount
    mount            a mount whose cache holds a fifth of the files
    plan             the same with a plan
    plan, hook       the same with the hook, which sends embeddings of all samples to the scorer

The systems take turns. Epochs after the first count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.common.command import command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import leave_signals_to_the_parent, mounted
from benchmarks.common.results import plain_table, spread, turns
from benchmarks.training.training import CACHED_SHARE, network
from trainer_hook import attach, plan

CLASSES, PER_DIRECTORY = 100, 500
ENOUGH = 0.9
SYSTEMS = ("local", "source", "mount", "plan", "plan, hook")


@dataclass(frozen=True)
class Extent:
    files: int
    kilobytes: int
    batch: int
    pixels: int
    workers: int
    latency_ms: int
    epochs: int
    rounds: int


FULL = Extent(files=20_000, kilobytes=112, batch=128, pixels=224, workers=8, latency_ms=5, epochs=2, rounds=2)
QUICK = Extent(files=512, kilobytes=112, batch=32, pixels=32, workers=2, latency_ms=5, epochs=2, rounds=1)


class Bottleneck(nn.Module):
    """A residual block of three convolutions (He et al., 2016, figure 5, right)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def resnet_50() -> nn.Sequential:
    """ResNet-50 as MLPerf trains it (He et al., 2016, table 1; the stride is in the 3 x 3 convolution)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for width, blocks, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(inputs, width, first if number == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


class Contents(Dataset[tuple[int, int]]):
    """Reads a file whole, and gives its length and its class."""

    def __init__(self, root: Path, names: list[str], latency_ms: float) -> None:
        self.samples = [(os.path.join(root, name), number % CLASSES) for number, name in enumerate(names)]
        self._latency_s = latency_ms / 1000

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[int, int]:
        path, label = self.samples[index]
        time.sleep(self._latency_s)
        with open(path, "rb") as file:
            return len(file.read()), label


def make_files(root: Path, extent: Extent) -> list[str]:
    names = [f"{number // PER_DIRECTORY:04d}/{number:07d}" for number in range(extent.files)]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(os.urandom(1000 * extent.kilobytes))
    return names


@contextmanager
def timed(device: str, took: list[Callable[[], float]]) -> Iterator[None]:
    """Add a function that returns the seconds between first and last kernel; call it when the device is idle."""
    if device == "cpu":
        began_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - began_s
        took.append(lambda: seconds)
        return
    event: Any = torch.cuda.Event
    first, last = (event(enable_timing=True) for _ in range(2))
    first.record()
    yield
    last.record()
    took.append(lambda: first.elapsed_time(last) / 1000)


def epochs_of(system: str, root: Path, names: list[str], extent: Extent, device: str) -> list[dict[str, float]]:
    """Train on the files below `root`; returns what each epoch after the first took."""
    torch.manual_seed(1)
    model = network(CLASSES) if device == "cpu" else resnet_50()
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(extent.batch, 3, extent.pixels, extent.pixels, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    files = Contents(root, names, extent.latency_ms if system == "source" else 0)
    loader: DataLoader[Any] = DataLoader(
        *(files, extent.batch, True),
        num_workers=extent.workers,
        drop_last=True,
        worker_init_fn=leave_signals_to_the_parent,
    )
    found = []
    with ExitStack() as stack:
        if system == "plan, hook":
            stack.enter_context(closing(attach(root, model, loader)))
        elif system == "plan":
            stack.enter_context(plan(root, loader))
        for _ in range(extent.epochs):
            took: list[Callable[[], float]] = []
            size, began_s = 0, time.perf_counter()
            for lengths, labels in loader:
                with timed(device, took), torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(images), labels.to(device)).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                size += int(lengths.sum())
            if device != "cpu":
                torch.cuda.synchronize()
            seconds, steps = time.perf_counter() - began_s, [step() for step in took]
            if size != len(steps) * extent.batch * extent.kilobytes * 1000:
                raise RuntimeError(f"{system}: {size} bytes were read, not those of {len(steps)} batches")
            found.append(
                {
                    "images_per_s": len(steps) * extent.batch / seconds,
                    "utilisation": sum(steps) / seconds,
                    "step_ms": statistics.median(steps) * 1000,
                }
            )
    return found[1:]


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent: Extent = arguments.extent
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    rows: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    with scratch_directory("device-steps") as scratch:
        names = make_files(scratch / "source", extent)
        capacity = int(CACHED_SHARE * extent.files * extent.kilobytes * 1000)
        for number, system in turns(SYSTEMS, extent.rounds):
            with ExitStack() as stack:
                root = scratch / "source"
                if system not in ("local", "source"):
                    place = scratch / f"{number}-{system}".replace(", ", "-")
                    mount = mounted(root, place, capacity, extent.latency_ms, "immutable")
                    root = stack.enter_context(mount)
                rows[system] += epochs_of(system, root, names, extent, device)
            console.log(f"{number + 1}. {system}")
    show(rows, device, console)
    return {"extent": asdict(extent), "device": device, "epochs": rows}


def show(rows: dict[str, list[dict[str, float]]], device: str, console: Console) -> None:
    table = plain_table(f"Epochs after the first, on {device}", "", "images/s", f"busy, % ({ENOUGH:.0%})", "step ms")
    for system, epochs in rows.items():
        columns = {name: [epoch[name] for epoch in epochs] for name in epochs[0]}
        busy = spread(columns["utilisation"], ".0f", 100)
        table.add_row(system, spread(columns["images_per_s"], ".0f"), busy, spread(columns["step_ms"], ".2f"))
    console.print(table)
    plain, hooked = (statistics.median(epoch["step_ms"] for epoch in rows[name]) for name in ("plan", "plan, hook"))
    console.print(f"the hook makes a step {hooked / plain:.3f} times as long", highlight=False)


if __name__ == "__main__":
    main(measure, command_line(__doc__, FULL, QUICK))
