"""Pictures of four classes in a directory, and a small network that tells them apart."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from listed import Listed
from mounting import Mounted, eventually
from PIL import Image
from torch import Tensor, nn

CLASSES, PICTURES, SIDE = 4, 48, 8
EPOCHS = 2


def make_pictures(root: Path) -> None:
    """`train` and `test`, each with a directory a class."""
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        for number in range(PICTURES):
            label = number % CLASSES
            pixels = random.integers(0, 160, (SIDE, SIDE), dtype=np.uint8)
            # What tells the classes apart: two bright rows.
            pixels[2 * label : 2 * label + 2] += 90
            path = root / split / f"class{label}" / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)


class Pictures(Listed[tuple[Tensor, int]]):
    def __init__(self, root: Path) -> None:
        self.samples = [(str(path), int(path.parent.name[-1])) for path in sorted(root.rglob("*.png"))]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as picture:
            return torch.from_numpy(np.asarray(picture, np.float32) / 255)[None], label


class Classifier(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * SIDE**2, 16), nn.Linear(16, CLASSES)
        )


def check_recorded(mount: Mounted, batches: int = EPOCHS * PICTURES // 8) -> None:
    """Check that the daemon has the list, a score of each sample, every batch of the training, and the plans."""
    eventually(lambda: mount.metric("hook_batches") >= batches, what="all batches")
    assert mount.metric("hook_batches") == batches, "evaluation is not recorded"
    assert mount.metric("hook_malformed") == 0
    # In the first epoch loader workers may open some files before the daemon has got a plan.
    eventually(lambda: mount.metric("planned_opens") >= (EPOCHS - 1) * PICTURES, what="opens by plan")
    scores = eventually(lambda: mount.control("scores").read_text().splitlines(), what="scores")
    assert len(scores) == PICTURES
    assert re.search(r"scored share +1\.000\n", mount.control("graph").read_text())
