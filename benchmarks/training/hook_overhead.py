"""The cost of the hook to a training step: the same training with the hook and without it, step by step in turns.

    .venv-dev/bin/python -m benchmarks.training.hook_overhead             about two minutes
    .venv-dev/bin/python -m benchmarks.training.hook_overhead --quick     some ten seconds, for a look

Two copies of one residual network train on the same images. Their steps take turns in changing order, so that other
load on the machine falls on both alike. A step takes a batch and does forward, backward and update. A real hook server
answers the hook, in a process of its own on the same cores. Since a step's time varies by more than the hook costs, a
second part measures that cost alone, with steps of a model that does almost nothing.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.common.command import command_line
from benchmarks.common.interruption import exit_status
from benchmarks.common.results import machine, plain_table, save
from benchmarks.fakes import RecordingSink
from spiderfs.daemon.training.connection.hook_server import HookServer, listen
from trainer_hook import Hook, attach

TARGET_PERCENT = 2.0
CLASSES = 10
PATIENCE_S = 30.0
BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    warm_steps: int
    steps: int
    small_steps: int
    batch: int = 64
    pixels: int = 32
    width: int = 16


FULL = Extent(warm_steps=10, steps=300, small_steps=5000)
QUICK = Extent(warm_steps=2, steps=10, small_steps=300)


@dataclass(frozen=True)
class Result:
    step_ms: float  # median, without the hook
    overhead_percent: float  # median of the pairs' differences, over the median step
    overhead_low_percent: float  # 95 % interval of that median, by bootstrap
    overhead_high_percent: float
    hook_us: float  # what the hook adds to a step, measured on steps that do almost nothing
    hook_percent: float  # the same over the residual network's step
    batches_sent: int
    batches_dropped: int


class Images(Dataset[tuple[Tensor, int]]):
    """Made-up images in memory, because reading is not what is measured."""

    def __init__(self, count: int, *shape: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._images = torch.randn(256, *shape, generator=generator)
        self.samples = [(f"class{number % CLASSES}/{number}.png", number % CLASSES) for number in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index % len(self._images)], self.samples[index][1]


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
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def residual_network(width: int) -> nn.Module:
    """A network like ResNet-18 for small images, narrow enough for a CPU; embeddings have 8 * width numbers."""
    widths = (width, width, 2 * width, 4 * width, 8 * width)
    stages = [Block(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)]
    stem = nn.Conv2d(3, width, 3, padding=1)
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, CLASSES))


class Training:
    def __init__(self, model: nn.Module, samples: Images, batch: int) -> None:
        self.model = model.train()
        self.loader: DataLoader[Any] = DataLoader(samples, batch_size=batch, shuffle=True, drop_last=True)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._batches: Iterator[Any] | None = None

    def step_s(self) -> float:
        begin = time.perf_counter()
        if self._batches is None:
            self._batches = iter(self.loader)
        images, labels = next(self._batches)
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(images), labels).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return time.perf_counter() - begin


def _serve(path: str, ready: Event) -> None:
    async def main() -> None:
        listener = listen(Path(path))
        ready.set()
        await HookServer(RecordingSink(), lambda name, amount: None).serve(listener, Path(path))

    trio.run(main)


@contextmanager
def daemon() -> Iterator[Path]:
    """A directory that looks like a mount and whose hook socket belongs to a real hook server."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        mount = Path(directory)
        (mount / ".spiderfs").mkdir()
        (mount / ".spiderfs" / "hook").write_bytes(bytes(mount / "hook.sock"))
        ready = context.Event()
        process = context.Process(target=_serve, args=(str(mount / "hook.sock"), ready), daemon=True)
        process.start()
        try:
            assert ready.wait(PATIENCE_S), "the hook server did not start"
            yield mount
        finally:
            process.terminate()
            process.join()


def in_turns(with_hook: Training, without: Training, warm_steps: int, steps: int) -> np.ndarray:
    """The seconds of each pair of steps, with the hook and without: shape (steps, 2)."""
    times = np.empty((warm_steps + steps, 2))
    for number, row in enumerate(times):
        for which in (0, 1) if number % 2 else (1, 0):
            row[which] = (with_hook, without)[which].step_s()
    return times[warm_steps:]


def paired(
    mount: Path, models: tuple[nn.Module, nn.Module], extent: Extent, steps: int, shape: Any
) -> tuple[np.ndarray, Hook]:
    samples = Images((extent.warm_steps + steps + 1) * extent.batch, *shape)
    with_hook, without = (Training(model, samples, extent.batch) for model in models)
    hook = attach(mount, with_hook.model, with_hook.loader)
    times = in_turns(with_hook, without, extent.warm_steps, steps)
    hook.close(PATIENCE_S)
    return times, hook


def measure(mount: Path, extent: Extent) -> Result:
    rng = np.random.default_rng(1)
    image = (3, extent.pixels, extent.pixels)
    models = residual_network(extent.width), residual_network(extent.width)
    times, hook = paired(mount, models, extent, extent.steps, image)
    step_s = float(np.median(times[:, 1]))
    differences = times[:, 0] - times[:, 1]
    resampled = np.median(rng.choice(differences, (BOOTSTRAPS, len(differences))), axis=1)
    low, high = np.percentile(resampled, [2.5, 97.5])

    embedding = 8 * extent.width
    small = nn.Linear(embedding, CLASSES), nn.Linear(embedding, CLASSES)
    small_times, _ = paired(mount, small, extent, extent.small_steps, (embedding,))
    hook_s = float(np.median(small_times[:, 0] - small_times[:, 1]))
    return Result(
        step_ms=1e3 * step_s,
        overhead_percent=100 * float(np.median(differences)) / step_s,
        overhead_low_percent=100 * float(low) / step_s,
        overhead_high_percent=100 * float(high) / step_s,
        hook_us=1e6 * hook_s,
        hook_percent=100 * hook_s / step_s,
        batches_sent=hook.counts["sent"],
        batches_dropped=hook.counts["dropped"],
    )


def show(result: Result, console: Console) -> None:
    table = plain_table("What the hook adds to a step of the training", "", "%", "microseconds")
    for what, percent in (
        ("in turns", result.overhead_percent),
        ("in turns, lower end of 95 %", result.overhead_low_percent),
        ("in turns, upper end of 95 %", result.overhead_high_percent),
        ("the hook by itself", result.hook_percent),
    ):
        table.add_row(what, f"{percent:+.2f}", f"{10 * percent * result.step_ms:+.0f}")
    console.print(table)
    reached = max(result.overhead_percent, result.hook_percent) < TARGET_PERCENT
    console.print(
        f"a step takes {result.step_ms:.1f} ms without the hook, on {torch.get_num_threads()} threads; "
        f"the hook sent {result.batches_sent} batches and dropped {result.batches_dropped}\n"
        f"target: less than {TARGET_PERCENT:.0f} %: {'reached' if reached else 'missed'}",
        highlight=False,
    )


def main() -> int:
    arguments = command_line(__doc__).parse_args()

    def run() -> None:
        with daemon() as mount:
            result = measure(mount, QUICK if arguments.quick else FULL)
        show(result, Console())
        save(arguments.json, asdict(result) | {"machine": machine()})

    return exit_status("hook_overhead", run, "interrupted")


if __name__ == "__main__":
    sys.exit(main())
