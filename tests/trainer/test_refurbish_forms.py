"""refurbish in mounts with `forms`: augmented samples have the part A of the cache, beside views and originals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composing import Compose
from image_files import image_file, picture
from listed import Listed
from mounting import Mounted, eventually, mounted
from PIL import Image
from profiled import note_sizes
from reading import source_with
from torch.utils.data import DataLoader

import trainer_hook
from spiderfs.views.making import make
from spiderfs.views.recipe import NO_VIEW, Recipe
from trainer_hook.refurbishing.stores import MountStore, PartialStore

SMALL = Recipe("bmp", 24)
PHOTOS = {f"{number:03d}.jpg": image_file(image=picture(160, 120, seed=number)) for number in range(120)}
VIEWS = {name: view for name, content in PHOTOS.items() if isinstance(view := make(content, SMALL, 50_000_000), bytes)}
VIEWS_BYTES, ORIGINALS_BYTES = (sum(map(len, contents.values())) for contents in (VIEWS, PHOTOS))
# The sample that is kept: 4,000 numbers of 4 bytes.
NUMBERS, PARTIAL_BYTES = 4000, 16_000
CAPACITY = 1_200_000


def resized(image: Image.Image) -> torch.Tensor:
    pixels = np.asarray(image.convert("L").resize((80, 50)), np.float32)
    assert pixels.size == NUMBERS
    return torch.from_numpy(pixels.copy())


def noisy(image: torch.Tensor) -> torch.Tensor:
    return image + 1000 * torch.rand(1)


class Photos(Listed[Any]):
    def __init__(self, root: Path) -> None:
        self.samples = [(str(root / name), number) for number, name in enumerate(sorted(PHOTOS))]
        self.transform = Compose([resized, noisy, torch.clone])

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        with Image.open(path) as image:
            return self.transform(image), label


source = source_with(PHOTOS)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a mount has been profiled."""
    note_sizes(tmp_path / "m", len(PHOTOS), {NO_VIEW: ORIGINALS_BYTES, "small": VIEWS_BYTES})
    return tmp_path / "m"


def refurbished(mount: Mounted, workers: int = 0) -> DataLoader[Any]:
    loader = DataLoader(Photos(mount.point), 12, shuffle=True, num_workers=workers)
    return trainer_hook.refurbish(loader, split=2, reuse=2)


def epoch_of(loader: DataLoader[Any]) -> dict[int, float]:
    drawn = {
        int(label): float(image.sum()) for images, labels in loader for image, label in zip(images, labels, strict=True)
    }
    assert sorted(drawn) == list(range(len(PHOTOS)))
    return drawn


@pytest.mark.parametrize(
    ("forms", "options"),
    [("40-20-40", {"view": "small", "views": "small:bmp:24"}), ("50-0-50", {}), ("0-0-100", {})],
)
def test_augmented_samples_have_their_part_and_no_more(
    source: Path, place: Path, forms: str, options: dict[str, Any]
) -> None:
    with mounted(source, place, capacity=CAPACITY, forms=forms, policy="minio", **options) as mount:
        loader = refurbished(mount)
        assert isinstance(loader.dataset._store, MountStore)  # type: ignore[attr-defined]
        kept = {index for index in range(len(PHOTOS)) if loader.sampler._generations.kept[index]}  # type: ignore[attr-defined]
        room_bytes = min(0.9, int(forms.split("-")[2]) / 100) * CAPACITY
        assert 0.8 * room_bytes < len(kept) * PARTIAL_BYTES < room_bytes
        before = epoch_of(loader)
        for epoch in range(1, 4):
            now = epoch_of(loader)
            again = {index for index in now if now[index] == before[index]}
            # Of what is kept half is used again, and all else is made again.
            assert again <= kept
            assert len(kept) // 2 <= len(again) <= len(kept) // 2 + 1
            stats, before = mount.stats(), now
            assert stats["sections"]["partials"]["bytes"] <= room_bytes
            assert stats["used_bytes"] <= CAPACITY
            assert stats["split"] == forms, epoch
        # The first sample was put to try it out, whether it is among those that are kept or not. What the mount was too
        # slow to take, it takes another time.
        entries = len(kept | {0})
        eventually(lambda: mount.stats()["sections"]["partials"]["entries"] == entries or not epoch_of(loader))
        if options:
            # Views have their part beside it, and nothing that is kept pushes them out.
            found = mount.stats()
            assert 5 < found["sections"]["views"]["entries"] == found["forms"]["small"]
            assert found["sections"]["views"]["bytes"] <= 0.2 * CAPACITY
        assert mount.metric("partials_refused") == 0


def test_without_a_part_for_them_they_lie_in_memory(source: Path, place: Path) -> None:
    options = {"view": "small", "views": "small:bmp:24", "forms": "60-40-0"}
    with mounted(source, place, capacity=CAPACITY, policy="minio", **options) as mount:
        loader = refurbished(mount, workers=1)
        assert isinstance(loader.dataset._store, PartialStore)  # type: ignore[attr-defined]
        before = epoch_of(loader)
        now = epoch_of(loader)
        assert sum(now[index] == before[index] for index in now) == len(PHOTOS) // 2
        stats = mount.stats()
        assert stats["sections"].get("partials", {}).get("entries", 0) == 0
        assert stats["split"] == "60-40-0"
