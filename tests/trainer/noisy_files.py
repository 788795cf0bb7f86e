"""A data set of files with numbers, and transforms that add random ones and count how often they ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from composing import Compose
from torch.utils.data import Dataset

SAMPLES, BATCH, NUMBERS = 40, 10, 1000


class Noise:
    """A transform that adds a random number, and counts how often it ran in this process."""

    runs = 0

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, sample: Any) -> Any:
        type(self).runs += 1
        return sample + self.scale * torch.rand(1).item()


class LastNoise(Noise):
    runs = 0


class Numbers(Dataset[Any]):
    """Sample i is what its file holds: 1,000 times the number 1000 i; its label is i."""

    def __init__(self, root: Path, last: float = 1.0) -> None:
        self.samples = [(str(root / f"{index:03d}.npy"), index) for index in range(SAMPLES)]
        self.transform = Compose([Noise(100), LastNoise(last)])

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        return self.transform(torch.from_numpy(np.load(path))), label


def write_numbers(directory: Path) -> None:
    directory.mkdir()
    for index in range(SAMPLES):
        np.save(directory / f"{index:03d}.npy", np.full(NUMBERS, 1000.0 * index))
