"""An ordinary PyTorch training of a small network on an image folder, which knows nothing of spiderfs."""

from __future__ import annotations

import io
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

LOADER_WORKERS = 2
WORKER_PATIENCE_S = 5.0  # a loader worker cannot end while its read hangs
BATCH = 32
PIXELS = 32  # width and height of the images for the network
SEED = 7


class Epoch(NamedTuple):
    seconds: float  # training alone, without the evaluation
    accuracy: float  # on the held-out samples


class Observer(Protocol):
    """An object that watches a training and may choose its samples."""

    @property
    def sampler(self) -> Sampler[int] | None:
        """The sampler for the training; with None the training uses its own."""

    def begin(self, model: nn.Module, loader: DataLoader[Any]) -> None: ...

    def epoch_end(self, accuracy: float) -> None: ...


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The ordinary image-folder data set; `read` turns a sample's path into its file's bytes."""

    def __init__(self, samples: list[str], classes: list[str], read: Callable[[str], bytes]) -> None:
        self.classes = classes
        self.samples = [(path, classes.index(path.partition("/")[0])) for path in samples]
        self.read = read

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        image = Image.open(io.BytesIO(self.read(path))).convert("RGB").resize((PIXELS, PIXELS))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255, label


def network(classes: int) -> nn.Module:
    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    features = PIXELS // 8
    return nn.Sequential(
        *stage(3, 16), *stage(16, 32), *stage(32, 64), nn.Flatten(), nn.Linear(64 * features**2, classes)
    )


def train(
    samples: ImageFolder, held_out: ImageFolder, epochs: int, console: Console, observer: Observer | None = None
) -> Iterator[Epoch]:
    """Train, and yield after each epoch; calls without an observer's sampler have the same weights and order."""
    # More threads do not make so small a network faster, and beside busy loader workers they make it slower.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = network(len(samples.classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler = None if observer is None else observer.sampler
    loader: DataLoader[Any] = DataLoader(
        samples,
        batch_size=BATCH,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=LOADER_WORKERS,
        generator=torch.Generator().manual_seed(SEED),
        worker_init_fn=leave_signals_to_the_parent,
    )
    if observer is not None:
        observer.begin(model, loader)
    for number in range(1, epochs + 1):
        begin = time.monotonic()
        model.train()
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            for images, labels in progress.track(loader, description=f"epoch {number} of {epochs}"):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        seconds = time.monotonic() - begin
        epoch = Epoch(seconds, accuracy(model, held_out))
        if observer is not None:
            observer.epoch_end(epoch.accuracy)
        yield epoch


def accuracy(model: nn.Module, samples: ImageFolder) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in DataLoader(samples, batch_size=BATCH):
            right += int((model(images).argmax(1) == labels).sum())
    return right / len(samples)


def leave_signals_to_the_parent(_worker: int) -> None:
    # Ctrl-C reaches every process of the terminal. The parent ends its loader workers, which should print no traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_loader_workers() -> None:
    """End loader workers after an interrupt; its traceback keeps the loader alive, so they would go on reading."""
    for process in multiprocessing.active_children():
        process.terminate()
        process.join(WORKER_PATIENCE_S)
