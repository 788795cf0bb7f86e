"""The images, network, schedule and evaluation that benchmarks train with, in train.py and in in_process.py."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.common.command import Extent
from trainer_hook import EchoSampler, ImpactSampler, InfoBatchSampler, PoolSampler, ShadeSampler, SpiderSampler
from trainer_hook.samplers.epoch import EpochSampler, SampledEpoch, through_pool

CACHED_SHARE = 0.20
BATCH = 64
EVALUATED = 500  # images at a time
PIXELS = 32
LEARNING_RATE = 4e-3
IMAGES = "DIR holds train/CLASS/NAME and test/CLASS/NAME"
# This seed chooses the images; all trainings, whatever their own seeds, train on the same ones.
DRAW_SEED = 0


# How often an EchoSampler draws each sample in a cycle.
ECHOES = {"echo 2": 2, "echo 3": 3}
# The same for an InfoBatchSampler.
INFOBATCH = {"infobatch": 1, "infobatch, echo 2": 2}
BY_SCORES: dict[str, Callable[..., SpiderSampler]] = {
    "spider": SpiderSampler,
    "shade": ShadeSampler,
    # The released program of SpiderCache has the sampler of SHADE's, with a replication factor of 3.
    "spider released": ShadeSampler,
    # The trainings here have few epochs, and at most half of them may be the warm-up.
    "impact": partial(ImpactSampler, warm_up=3),
    "icache": partial(ImpactSampler, hybrid=False),
}

# The blocks of a PoolSampler, whose pool is as large as the cache.
POOLS = {"pool 4": 4, "pool 16": 16, "pool 64": 64}
BUFFER = "buffer of sorted shards"
# Shards of so many samples, and a buffer of as many, as shares of all: ImageNet's shards of 1,200 are a tenth of that.
SHARD = 0.01


class BufferSampler(EpochSampler):
    """Draws as loaders of sorted shards do: shards in a random order, each from its beginning, through a buffer."""

    def __init__(self, samples: int, seed: int) -> None:
        super().__init__(samples, seed=seed)
        self._shard = max(1, round(SHARD * samples))

    def _draw(self, number: int) -> SampledEpoch:
        rng = np.random.default_rng([self._seed, number])
        shards = np.split(np.arange(self.samples, dtype=np.uint32), range(self._shard, self.samples, self._shard))
        coming = np.concatenate([shards[at] for at in rng.permutation(len(shards))])
        return SampledEpoch(number, through_pool(coming[:, None], self._shard, rng))


def sampler_named(name: str, samples: int, seed: int, epochs: int, **by_scores: float) -> EpochSampler:
    """The sampler of this name for a training of so many epochs; `by_scores` are options of samplers with scores."""
    if name in ECHOES:
        return EchoSampler(samples, times=ECHOES[name], window=CACHED_SHARE, seed=seed)
    if name in INFOBATCH:
        return InfoBatchSampler(samples, epochs=epochs, times=INFOBATCH[name], window=CACHED_SHARE, seed=seed)
    if name in POOLS:
        return PoolSampler(samples, block=POOLS[name], pool=CACHED_SHARE, seed=seed)
    if name == BUFFER:
        return BufferSampler(samples, seed)
    return BY_SCORES[name](samples, seed=seed, **by_scores)


@dataclass(frozen=True)
class Data:
    root: Path  # of the training images
    training: list[tuple[str, int]]  # CLASS/NAME and label
    training_bytes: int
    images: Tensor  # held out
    labels: Tensor
    classes: int


class Images(Dataset[tuple[Tensor, int, int, int]]):
    """Gives image, label, index, and the inode that the mount served, which is a substitute's after a redirect."""

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
    """An image as a model takes it: 3 x 32 x 32 numbers from -0.5 to 0.5."""
    return pixels(file).float() / 255 - 0.5


def pixels(file: Any) -> Tensor:
    """An image as it is: 3 x 32 x 32 bytes."""
    image = Image.open(file).convert("RGB")
    if image.size != (PIXELS, PIXELS):
        image = image.resize((PIXELS, PIXELS))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


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
    """A residual block of two convolutions; with `normalised` its shortcut is normalised too (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, normalised: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            if normalised:
                self.shortcut = nn.Sequential(self.shortcut, nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def network(classes: int) -> nn.Sequential:
    """A residual network of three stages; it halves the image first, so that a CPU is faster than the source."""
    widths = (16, 16, 32, 64)
    stages = [Block(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)]
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, LEARNING_RATE, weight_decay=0.02)


Schedule = Callable[[torch.optim.Optimizer, int], torch.optim.lr_scheduler.LRScheduler]


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], steps)


class Steps:
    """The optimizer and its schedule, for epochs that may read only a part of the samples.

    A short epoch takes fewer steps, and the schedule more of its own with each, so that all trainings of as many epochs
    end with the same learning rate. The highest learning rate is the one with which `optimizer` is made.
    """

    def __init__(
        self,
        model: nn.Module,
        epochs: int,
        samples: int,
        batch: int = BATCH,
        optimizer: Optimizer = adamw,
        schedule: Schedule = one_cycle,
    ) -> None:
        self._each_epoch = -(-samples // batch)
        self._scheduled = 0
        self.optimizer = optimizer(model.parameters())
        self._schedule = schedule(self.optimizer, epochs * self._each_epoch)

    def taken(self, epoch: int, batches: int, of: int) -> None:
        """Note that a batch's step was taken; `of` is the number of steps in this epoch, whose first has number 0."""
        due = epoch * self._each_epoch + self._each_epoch * batches // of
        for _ in range(due - self._scheduled):
            self._schedule.step()
        self._scheduled = due

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "scheduled": self._scheduled,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self._scheduled = state["scheduled"]


def as_they_are(images: Tensor) -> Tensor:
    return images


def evaluate(model: nn.Module, data: Data, prepared: Callable[[Tensor], Tensor] = as_they_are) -> float:
    """The share of held-out images whose class the model finds (top-1); `prepared` makes its input of images."""
    model.eval()
    with torch.no_grad():
        parts = [data.images[first : first + EVALUATED] for first in range(0, len(data.images), EVALUATED)]
        guesses = torch.cat([model(prepared(part)).argmax(1) for part in parts])
    return float((guesses == data.labels).float().mean())


def flipped(images: Tensor) -> Tensor:
    """Each image as it is or mirrored, with the same chance."""
    mirrored = torch.rand(len(images), device=images.device) < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


def small_network(classes: int) -> nn.Sequential:
    # A training takes half of the time that it takes with the other layout of memory.
    return network(classes).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def halved(embeddings: Tensor) -> Tensor:
    """Embeddings in half precision, as the hook sends them."""
    return embeddings.half()


@dataclass(frozen=True)
class Recipe:
    """What a training without a mount does with its images, whatever its sampler and its cache are."""

    network: Callable[[int], nn.Sequential] = small_network
    """Makes the model for so many classes; its last layer is the classifier."""
    optimizer: Optimizer = adamw
    schedule: Schedule = one_cycle
    batch: int = BATCH
    augmented: Callable[[Tensor], Tensor] = flipped
    """Makes the model's input of images, for a training."""
    prepared: Callable[[Tensor], Tensor] = as_they_are
    """The same for an evaluation."""
    embedded: Callable[[Tensor], Tensor] = halved
    """Makes of the classifier's input what the scorer gets."""
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of each forward pass."""


SMALL = Recipe()
