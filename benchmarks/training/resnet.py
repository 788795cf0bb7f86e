"""What full_size.py trains: a ResNet-18 for small images, and how its images, steps and embeddings are made."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.training.training import PIXELS, Block, Recipe
from trainer_hook.model.capture import projection

BATCH = 128
EMBEDDED = 64
# With momentum 0.9 and a batch of 128 a one-cycle schedule of 30 epochs with this rate is a usual recipe for CIFAR-10.
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
PADDING = 4
MEANS, DEVIATIONS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
# Channels of the first stage. Below 8, the convolutions of torch 2.13 on a CPU corrupt memory in this layout.
USUAL_WIDTH, QUICK_WIDTH = 64, 8


def resnet18(classes: int, width: int = USUAL_WIDTH) -> nn.Sequential:
    """A ResNet-18 (He et al., 2016) for images of 32 x 32; `width` is the number of channels of its first stage."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    stages = [
        layer
        for before, after in itertools.pairwise(widths)
        for layer in (Block(before, after, 1 if before == after else 2, True), Block(after, after, 1, True))
    ]
    stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes))


def on_device(classes: int, width: int, device: str) -> nn.Sequential:
    return resnet18(classes, width).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, LEARNING_RATE, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True)


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


def recipe_of(width: int, device: str) -> Recipe:
    return Recipe(
        network=functools.partial(on_device, width=width, device=device),
        optimizer=momentum,
        batch=BATCH,
        augmented=augmented,
        prepared=prepared,
        embedded=embedded,
        precision=nullcontext if device == "cpu" else mixed_precision,
    )
