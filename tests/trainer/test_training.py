"""A training loop that knows nothing of spiderfs: over a mount it must compute, bit for bit, what it does without."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from mounting import eventually, mounted
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

CLASSES, FILES, SIDE, EPOCHS = 4, 200, 12, 3


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """One directory a class; half of the samples are PNG files, half are numpy arrays."""

    def __init__(self, root: Path) -> None:
        self.paths = sorted(os.path.join(place, name) for place, _, names in os.walk(root) for name in names)
        self.root = root

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.paths[index]
        if path.endswith(".png"):
            with Image.open(path) as image:
                pixels = np.asarray(image, dtype=np.float32)
        else:
            # Mapped, as large arrays are.
            pixels = np.array(np.load(path, mmap_mode="r"), dtype=np.float32)
        label = int(os.path.basename(os.path.dirname(path)).removeprefix("class"))
        return torch.from_numpy(pixels / 255)[None], label


def make_images(root: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(FILES):
        label = number % CLASSES
        pixels = random.integers(0, 160, (SIDE, SIDE), dtype=np.uint8)
        # What tells the classes apart: a bright quarter.
        row, column = divmod(label, 2)
        pixels[row * SIDE // 2 : (row + 1) * SIDE // 2, column * SIDE // 2 : (column + 1) * SIDE // 2] += 90
        directory = root / f"class{label}"
        directory.mkdir(exist_ok=True)
        content = io.BytesIO()
        if number // CLASSES % 2:
            Image.fromarray(pixels).save(content, "png")
            (directory / f"{number:04d}.png").write_bytes(content.getvalue())
        else:
            np.save(content, pixels)
            (directory / f"{number:04d}.npy").write_bytes(content.getvalue())


def train(root: Path) -> Iterator[float]:
    """Yield the loss of every batch; the same seed gives the same batches and weights."""
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * (SIDE // 2) ** 2, CLASSES),
    )
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(
        ImageFolder(root),
        batch_size=20,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator().manual_seed(1),
        # Not fork: this process has threads.
        multiprocessing_context="forkserver",
        persistent_workers=True,
    )
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimiser.step()
            yield loss.item()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    make_images(root)
    return root


@pytest.fixture(scope="module")
def plain_losses(images: Path) -> list[float]:
    return list(train(images))


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.not_immutable("several workers do more")), 2])
@pytest.mark.opened_and_immutable
def test_training_over_a_mount_is_training(
    images: Path, plain_losses: list[float], tmp_path: Path, workers: int, binding: str
) -> None:
    assert plain_losses[-1] < plain_losses[0] / 2, "nothing was learned, so nothing would be compared"
    with mounted(images, tmp_path / "m", workers=workers, **{"source.latency_ms": 1}) as mount:
        assert len(ImageFolder(mount.point)) == FILES
        assert list(train(mount.point)) == plain_losses
        # The page cache of an immutable mount answers later epochs unseen.
        opens = FILES if binding == "immutable" else EPOCHS * FILES
        figures = eventually(lambda: stats if (stats := mount.stats()["metrics"])["opens"] >= opens else None)
        # The second and third epoch came from the cache, and every byte once from the source.
        assert figures["opens"] - figures["opens_hit"] == FILES
        assert figures["origin_bytes"] == sum(path.stat().st_size for path in images.rglob("*.*"))
