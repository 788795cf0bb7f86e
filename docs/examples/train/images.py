"""What the loops beside this file train with: images in one folder for each class, and a small network.

With torchvision, `datasets.ImageFolder(root, transform)` takes the place of `Images(root)`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

SIDE = 64


def tensor_of(image: Image.Image) -> Tensor:
    """Pixels from 0 to 1 (3, SIDE, SIDE)."""
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE)), np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1)


class Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, root: str) -> None:
        self.classes = sorted(path.name for path in Path(root).iterdir() if path.is_dir())
        # `trainer_hook.plan` finds this list by its name.
        self.samples = [
            (str(path), label) for label, name in enumerate(self.classes) for path in sorted(Path(root, name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as image:
            return tensor_of(image), label


def network(classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(classes))
