"""Samples that are windows of one large file, and whether their bytes are the source's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.common.sources import patterned

SIZE = 24 << 20


def windows(samples: int, overlapping: bool = True) -> list[tuple[int, int]]:
    """Where each sample begins and how long it is: anywhere in the file, or one directly after the other."""
    rng = random.Random(4)
    lengths = [rng.randrange(8_000, 64_000) for _ in range(samples)]
    if overlapping:
        return [(rng.randrange(SIZE - length), length) for length in lengths]
    begins = np.concatenate(([0], np.cumsum(lengths)[:-1])).tolist()
    return list(zip(begins, lengths, strict=True))


def piece(path: Path, offset: int, length: int) -> bytes:
    """Read through a handle of one's own, past Python's buffer."""
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        return file.read(length)


class Windows(Dataset[bool]):
    """Says of each sample whether its bytes are the source's."""

    def __init__(self, path: Path, places: list[tuple[int, int]]) -> None:
        self.path, self.places = path, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> bool:
        offset, length = self.places[index]
        return self.read(offset, length) == patterned(offset, offset + length)

    def read(self, offset: int, length: int) -> bytes:
        return piece(self.path, offset, length)


class Mapped(Windows):
    def read(self, offset: int, length: int) -> bytes:
        return np.memmap(self.path, np.uint8, "r")[offset : offset + length].tobytes()


def read_epochs(loader: DataLoader[Any], epochs: int) -> None:
    for _ in range(epochs):
        assert torch.cat(list(loader)).all(), "other bytes than the source's"
