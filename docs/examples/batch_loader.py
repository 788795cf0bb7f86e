"""Whole batches made by threads, for a view that needs no decoding: what is left of a loader's work.

    python batch_loader.py /mnt/data          of a mount with -o immutable,view=bmp256

Threads suffice, because reading and OpenCV leave Python's lock to others while they work. Each writes its part of a
batch where the batch will lie: no sample is copied into a batch, and no batch passed from one process to another. It is
an ordinary DataLoader, which asks its data set for a whole batch at once, so `trainer_hook.plan` follows it.
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

SIDE = 224
EPOCHS = 2
# Red first, and not turned: as other readers give it.
FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
cv2.setNumThreads(0)  # our own threads are enough


class Pictures(Dataset[Any]):
    """Image files, in one folder for each class."""

    def __init__(self, root: Path, threads: int) -> None:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.samples = [
            (os.path.join(root, name, file), label)
            for label, name in enumerate(classes)
            for file in sorted(os.listdir(root / name))
        ]
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole batch: images as bytes (batch, SIDE, SIDE, 3), and labels."""
        images = np.empty((len(indices), SIDE, SIDE, 3), np.uint8)
        paths = [self.samples[index][0] for index in indices]
        parts = [slice(first, None, self._threads) for first in range(self._threads)]
        for _ in self._pool.map(lambda part: fill(images[part], paths[part]), parts):
            pass
        labels = [self.samples[index][1] for index in indices]
        return torch.from_numpy(images), torch.tensor(labels)


def fill(images: np.ndarray, paths: Sequence[str]) -> None:
    """Write random parts of these files, resized, into `images`."""
    for image, path in zip(images, paths, strict=True):
        pixels = cv2.imread(path, FLAGS)
        left, top, right, bottom = part_of(*pixels.shape[1::-1])
        cv2.resize(pixels[top:bottom, left:right], (SIDE, SIDE), dst=image)


def part_of(width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random part of an image, which is drawn like RandomResizedCrop's."""
    area = width * height * random.uniform(0.08, 1)
    aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    wide, high = min(width, round(math.sqrt(area * aspect))), min(height, round(math.sqrt(area / aspect)))
    left, top = random.randint(0, width - wide), random.randint(0, height - high)
    return left, top, left + wide, top + high


def batches(root: Path, batch_size: int = 64, threads: int = 2) -> DataLoader[Any]:
    """A loader of all pictures, in a new order each epoch, to be given to `trainer_hook.plan` and then to `ahead`."""
    pictures = Pictures(root, threads)
    return DataLoader(pictures, batch_size, shuffle=True, generator=torch.Generator(), collate_fn=lambda batch: batch)


def ahead(loader: Iterable[Any]) -> Iterator[Any]:
    """What the loader gives; while a batch is trained on, the next one is made."""
    batches = iter(loader)
    with ThreadPoolExecutor(1) as maker:
        coming = maker.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = maker.submit(next, batches, None)
            yield batch


def main(root: Path) -> None:
    loader = batches(root, threads=os.cpu_count() or 1)
    for epoch in range(EPOCHS):
        began = time.perf_counter()
        count = sum(len(labels) for _, labels in ahead(loader))
        print(f"epoch {epoch + 1}: {count / (time.perf_counter() - began):,.0f} images/s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
