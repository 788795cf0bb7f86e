"""Transforms of Pillow images: RandAugment (Cubuk et al., 2020, section 3), random crop, mirroring, and resizing.

Each is one step of a pipeline, as `trainer_hook.refurbish` splits them. Their random draws come from Python's `random`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

# RandAugment's scale of strength, whose end is the strongest form of each distortion.
STRONGEST = 30
# What ImageNet trainings commonly use: two layers of magnitude 9.
MAGNITUDE = 9
# Of the parts of an image that a distortion leaves without a pixel.
GREY = (128, 128, 128)
CROPPED_SHARE, ASPECTS, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10  # RandomResizedCrop's defaults


class Layer:
    """One layer of RandAugment: one of 14 distortions, chosen at random, of magnitude MAGNITUDE."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return random.choice(DISTORTIONS)(image, MAGNITUDE / STRONGEST)


class Resize:
    """The shorter side becomes `side` pixels long."""

    def __init__(self, side: int) -> None:
        self._side = side

    def __call__(self, image: Image.Image) -> Image.Image:
        scale = self._side / min(image.size)
        width, height = (round(length * scale) for length in image.size)
        return image.resize((width, height), Image.Resampling.BILINEAR)


class Crop:
    """A random square of `side` pixels, of the image with `padding` black pixels around it."""

    def __init__(self, side: int, padding: int = 0) -> None:
        self._side, self._padding = side, padding

    def __call__(self, image: Image.Image) -> Image.Image:
        left, top = (
            random.randint(0, length + 2 * self._padding - self._side) - self._padding for length in image.size
        )
        return image.crop((left, top, left + self._side, top + self._side))


def crop_of(width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random part of an image, drawn as RandomResizedCrop draws it."""
    for _ in range(TRIES):
        area = width * height * random.uniform(*CROPPED_SHARE)
        aspect = math.exp(random.uniform(*map(math.log, ASPECTS)))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, top = random.randint(0, width - wide), random.randint(0, height - high)
            return left, top, left + wide, top + high
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def mirrored(image: Image.Image) -> Image.Image:
    """The image as it is or mirrored, with the same chance."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def as_bytes(image: Image.Image) -> Tensor:
    """The image as bytes in the form (3, height, width)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def as_numbers(image: Image.Image) -> Tensor:
    """The image as numbers from -0.5 to 0.5 in the form (3, height, width)."""
    return as_bytes(image).float() / 255 - 0.5


class Compose:
    """Steps one after another."""

    def __init__(self, transforms: Sequence[Callable[..., Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


def _either(value: float) -> float:
    return value if random.random() < 0.5 else -value


def _moved(image: Image.Image, *matrix: float) -> Image.Image:
    # An affine transform is twice as fast with the nearest pixel as with any other, and usual for RandAugment.
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=GREY)


def _enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Callable[[Image.Image, float], Image.Image]:
    return lambda image, strength: kind(image).enhance(1 + _either(0.9 * strength))


DISTORTIONS: tuple[Callable[[Image.Image, float], Image.Image], ...] = (
    lambda image, _: image,
    lambda image, _: ImageOps.autocontrast(image),
    lambda image, _: ImageOps.equalize(image),
    lambda image, strength: image.rotate(_either(30 * strength), fillcolor=GREY),
    lambda image, strength: ImageOps.solarize(image, round(255 * (1 - strength))),
    lambda image, strength: ImageOps.posterize(image, 8 - round(4 * strength)),
    _enhanced(ImageEnhance.Color),
    _enhanced(ImageEnhance.Contrast),
    _enhanced(ImageEnhance.Brightness),
    _enhanced(ImageEnhance.Sharpness),
    lambda image, strength: _moved(image, 1, _either(0.3 * strength), 0, 0, 1, 0),
    lambda image, strength: _moved(image, 1, 0, 0, _either(0.3 * strength), 1, 0),
    lambda image, strength: _moved(image, 1, 0, _either(0.45 * strength * image.width), 0, 1, 0),
    lambda image, strength: _moved(image, 1, 0, 0, 0, 1, _either(0.45 * strength * image.height)),
)
