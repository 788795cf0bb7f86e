"""The images, network, schedule and evaluation that benchmarks train with, in train.py and in in_process.py."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.common.extent import Extent
from trainer_hook import EchoSampler, ImpactSampler, ShadeSampler, SpiderSampler

CACHED_SHARE = 0.20
BATCH = 64
EVALUATED = 500  # images at a time
PIXELS = 32
LEARNING_RATE = 4e-3
IMAGES = "DIR holds train/CLASS/NAME and test/CLASS/NAME"
# This seed chooses the images; all trainings, whatever their own seeds, train on the same ones.
DRAW_SEED = 0


def _echo(samples: int, *, times: int, seed: int, coverage: float = 0.0, settled: float = 0.0) -> EchoSampler:
    """An EchoSampler; it has no scores, and so it ignores the arguments that concern them."""
    return EchoSampler(samples, times=times, window=CACHED_SHARE, seed=seed)


SAMPLERS: dict[str, Callable[..., SpiderSampler]] = {
    "spider": SpiderSampler,
    "echo 2": partial(_echo, times=2),
    "echo 3": partial(_echo, times=3),
    "echo 4": partial(_echo, times=4),
    "shade": ShadeSampler,
    "shade without repeats": partial(ShadeSampler, repeats=1),
    "shade with 4 repeats": partial(ShadeSampler, repeats=4),
    # The trainings here have few epochs, and at most half of them may be the warm-up.
    "impact": partial(ImpactSampler, warm_up=3),
    "icache": partial(ImpactSampler, hybrid=False),
}


@dataclass(frozen=True)
class Data:
    root: Path  # of the training images
    training: list[tuple[str, int]]  # CLASS/NAME and label
    training_bytes: int
    images: Tensor  # held out
    labels: Tensor
    classes: int


class Images(Dataset[tuple[Tensor, int, int, int]]):
    """Gives image, label, index, and the inode that the mount served, which is a stand-in's after a redirect."""

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


def find_data(root: Path, extent: Extent) -> Data:
    """Draw images below root/train and root/test; raises RuntimeError if there are too few."""
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
    """A residual network of three stages; it halves the image first, so that a CPU is faster than the source."""
    widths = (16, 16, 32, 64)
    stages = [Block(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)]
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class Steps:
    """The optimizer and the one-cycle schedule, for epochs that may read only a part of the samples.

    A short epoch takes fewer steps, and the schedule more of its own with each, so that all trainings of as many epochs
    end with the same learning rate.
    """

    def __init__(self, model: nn.Module, epochs: int, samples: int) -> None:
        self._each_epoch = -(-samples // BATCH)
        self._scheduled = 0
        self.optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.02)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, LEARNING_RATE, epochs * self._each_epoch)

    def taken(self, epoch: int, batches: int, of: int) -> None:
        """Note that a batch's step was taken; `of` is the number of steps in this epoch, whose first has number 0."""
        due = epoch * self._each_epoch + self._each_epoch * batches // of
        for _ in range(due - self._scheduled):
            self._schedule.step()
        self._scheduled = due


def evaluate(model: nn.Module, data: Data) -> float:
    """The share of held-out images whose class the model finds (top-1)."""
    model.eval()
    with torch.no_grad():
        parts = [data.images[first : first + EVALUATED] for first in range(0, len(data.images), EVALUATED)]
        guesses = torch.cat([model(part).argmax(1) for part in parts])
    return float((guesses == data.labels).float().mean())
