"""What full_size.py trains: a ResNet-18, and how its images, steps and embeddings are made, by one of two recipes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.training.training import PIXELS, Block, Optimizer, Recipe, Schedule, one_cycle
from trainer_hook.model.capture import projection

EMBEDDED = 64
# With momentum 0.9 and a batch of 128 a one-cycle schedule of 30 epochs with this rate is a usual recipe for CIFAR-10.
# SpiderCache and SHADE train with the rate alone.
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
PADDING = 4
MEANS, DEVIATIONS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
# Channels of the first stage. Below 8, the convolutions of torch 2.13 on a CPU corrupt memory in this layout.
USUAL_WIDTH, QUICK_WIDTH = 64, 8


def small_stem(width: int) -> nn.Sequential:
    """A first layer for images of 32 x 32."""
    return nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


def torchvision_stem(width: int) -> nn.Sequential:
    """The first layers of torchvision, which are meant for images of 224 x 224: they halve the image twice."""
    convolution = nn.Conv2d(3, width, 7, 2, 3, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))


Stem = Callable[[int], nn.Sequential]


def resnet18(classes: int, width: int = USUAL_WIDTH, stem: Stem = small_stem) -> nn.Sequential:
    """A ResNet-18 (He et al., 2016); `width` is the number of channels of its first stage."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    stages = [
        layer
        for before, after in itertools.pairwise(widths)
        for layer in (Block(before, after, 1 if before == after else 2, True), Block(after, after, 1, True))
    ]
    return nn.Sequential(stem(width), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes))


def on_device(classes: int, width: int, device: str, stem: Stem) -> nn.Sequential:
    return resnet18(classes, width, stem).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, LEARNING_RATE, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True)


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, LEARNING_RATE)


def constant(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def prepared(images: Tensor) -> Tensor:
    """The model's input of images of bytes."""
    means, deviations = (torch.tensor(numbers, device=images.device)[:, None, None] for numbers in (MEANS, DEVIATIONS))
    return ((images.float() / 255 - means) / deviations).contiguous(memory_format=torch.channels_last)


def augmented(images: Tensor) -> Tensor:
    """The model's input of images of bytes, each cropped at random after a padding of 4 and perhaps mirrored."""
    padded = nn.functional.pad(images, (PADDING,) * 4)
    count, device = len(images), images.device
    top, left = torch.randint(0, 2 * PADDING + 1, (2, count, 1), device=device)
    along = torch.arange(PIXELS, device=device)
    mirrored = torch.rand(count, 1, device=device) < 0.5
    rows, columns = top + along, left + torch.where(mirrored, along.flip(0), along)
    which = torch.arange(count, device=device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=device)[None, :, None, None]
    return prepared(padded[which, channels, rows[:, None, :, None], columns[:, None, None, :]])


def embedded(embeddings: Tensor) -> Tensor:
    """Embeddings as the hook sends them: of length 1, projected to 64 numbers, in half precision."""
    unit = nn.functional.normalize(embeddings.float(), dim=1)
    if unit.shape[1] > EMBEDDED:
        unit = unit @ _projection(unit.shape[1], str(unit.device))
    return unit.half()


@functools.cache
def _projection(width: int, device: str) -> Tensor:
    return projection(width, EMBEDDED).to(device)


def mixed_precision() -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16)


class Kind(NamedTuple):
    stem: Stem
    optimizer: Optimizer
    schedule: Schedule
    batch: int


RECIPES = {
    "tuned": Kind(small_stem, momentum, one_cycle, 128),
    "papers": Kind(torchvision_stem, plain_sgd, constant, 256),
}


def recipe_of(name: str, width: int, device: str) -> Recipe:
    kind = RECIPES[name]
    return Recipe(
        network=functools.partial(on_device, width=width, device=device, stem=kind.stem),
        optimizer=kind.optimizer,
        schedule=kind.schedule,
        batch=kind.batch,
        augmented=augmented,
        prepared=prepared,
        embedded=embedded,
        precision=nullcontext if device == "cpu" else mixed_precision,
    )
