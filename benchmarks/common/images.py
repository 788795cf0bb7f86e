"""Image files for the benchmarks of loaders: photos as they are, smaller images enlarged, or images that are made up.

Photos of ImageNet's size are what the figures are meant for. Images without such a size are made into it: 500 x 375
pixels as JPEG, with noise, so that a file has some 110 kB and takes as long to decode as a photo or longer.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.common.sources import make_older

SIZE = (500, 375)
PHOTO_SIDE = 256  # pixels of the shorter side, with which an image is taken as it is
QUALITY = 90
NOISE = 26.0  # standard deviation; with it a JPEG of this size and quality has some 110 kB
NOISES = 16  # made once, since to draw one takes longer than all else
SUFFIXES = (".jpg", ".jpeg", ".png")
IN_A_DIRECTORY = 500
HELP = "take the photos below DIR, and enlarge smaller images there, in place of images that are made up"


def make_images(root: Path, data: Path | None, count: int, in_a_directory: int = IN_A_DIRECTORY) -> list[str]:
    """Write image files below `root`, so many a directory; returns their names. Too few below `data` are repeated."""
    found = [] if data is None else sorted(path for path in data.rglob("*") if path.suffix.lower() in SUFFIXES)
    if data is not None and not found:
        raise RuntimeError(f"{data} holds no .jpg, .jpeg or .png: name another directory, or leave --data out")
    chosen = random.Random(0).sample(found, min(count, len(found)))
    generator = np.random.default_rng(0)
    noise = noise_of(generator)
    names = []
    for number in range(count):
        name = f"{number // in_a_directory:03d}/{number:06d}.jpg"
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not chosen:
            enlarge(Image.fromarray(generator.integers(0, 256, (6, 8, 3), dtype=np.uint8)), next(noise), path)
        else:
            given = chosen[number % len(chosen)]
            with Image.open(given) as file:
                if min(file.size) < PHOTO_SIDE:
                    enlarge(file.convert("RGB"), next(noise), path)
                else:
                    shutil.copyfile(given, path)
        make_older(path)
        names.append(name)
    return names


def noise_of(generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Noise for one image after the other: int16 of the form (375, 500, 3)."""
    noises = [generator.normal(0, NOISE, (SIZE[1], SIZE[0], 3)).astype(np.int16) for _ in range(NOISES)]
    number = 0
    while True:
        yield np.roll(noises[number % NOISES], number, axis=(0, 1))
        number += 1


def enlarge(picture: Image.Image, noise: np.ndarray, path: Path) -> None:
    pixels = np.asarray(picture.resize(SIZE, Image.Resampling.BICUBIC), dtype=np.int16)
    Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8)).save(path, quality=QUALITY)
