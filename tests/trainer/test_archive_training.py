"""Trainings over archives: ImageFolder over a tar, and WebDataset's shards as files with labels."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from archive_files import tar_of
from mounting import Mounted, eventually, mounted
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from trainer_hook import plan, webdataset_samples

CLASSES, PICTURES = 4, 160


def picture(label: int, number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (label * 60, number % 256, 0)).save(buffer, "PNG")
    return buffer.getvalue()


PICTURES_BY_PATH = {
    b"n%02d/%04d.png" % (number % CLASSES, number): picture(number % CLASSES, number) for number in range(PICTURES)
}


class LikeImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """As torchvision's: a class for each directory, in the order of their names, and all files below it."""

    def __init__(self, root: str, transform: Callable[[Any], torch.Tensor]) -> None:
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.samples = [
            (os.path.join(above, name), label)
            for label, known in enumerate(self.classes)
            for above, _, names in sorted(os.walk(os.path.join(root, known), followlinks=True))
            for name in sorted(names)
        ]
        self._transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with open(path, "rb") as file:
            return self._transform(Image.open(file).convert("RGB")), label


def image_folder() -> Any:
    """torchvision's own where it is installed; tests do without it, because it has a build for each of torch."""
    try:
        from torchvision.datasets import ImageFolder
    except ModuleNotFoundError:
        return LikeImageFolder
    return ImageFolder


def colour(image: Image.Image) -> torch.Tensor:
    pixel = image.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return torch.tensor(pixel)


def read_all(mount: Mounted, loader: DataLoader[Any], epochs: int = 2) -> None:
    for epoch in range(epochs):
        seen = []
        for pixels, labels in loader:
            assert (pixels[:, 0] == labels * 60).all()
            seen += pixels[:, 1].tolist()
        assert sorted(seen) == list(range(PICTURES))
        eventually(lambda epoch=epoch: mount.stats()["plans"] and mount.stats()["plans"][0]["epoch"] >= epoch)


@pytest.mark.opened_and_immutable
def test_image_folder_over_a_tar(tmp_path: Path, binding: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.tar").write_bytes(tar_of(PICTURES_BY_PATH))
    with mounted(source, tmp_path / "m", archives="tar") as mount:
        data = image_folder()(str(mount.point / "train.tar"), transform=colour)
        assert data.classes == [f"n{label:02d}" for label in range(CLASSES)]
        loader = DataLoader(data, 8, shuffle=True, num_workers=2)
        with plan(mount.point, loader):
            read_all(mount, loader)
            assert mount.metric("hook_malformed") == 0
        # Neighbours come together as soon as the plan is proven. By then much of so short an epoch has been pushed.
        assert mount.metric("origin_reads") < (1.0 if binding == "immutable" else 0.8) * PICTURES


MEMBERS, MEMBER_BYTES = 1500, 4000


class Members(Dataset[int]):
    """Reads each as where the data set is larger than memory: the kernel forgets it at once."""

    def __init__(self, root: Path) -> None:
        self.samples = [(str(root / f"{number:04d}"), 0) for number in range(MEMBERS)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        with open(self.samples[index][0], "rb") as file:
            assert file.read() == b"%04d" % index * (MEMBER_BYTES // 4)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return index


def test_with_a_fifth_cached_neighbours_save_requests_of_later_epochs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    contents = {b"%04d" % number: b"%04d" % number * (MEMBER_BYTES // 4) for number in range(MEMBERS)}
    (source / "train.tar").write_bytes(tar_of(contents))
    # A window of 2 s would be most of an epoch.
    first = "from spiderfs.daemon.caching import bringing; bringing._AHEAD_S = 0.05"
    chosen = {"archives": "tar", "fetches": 4, "source__latency_ms": 2, "capacity": MEMBERS * MEMBER_BYTES // 5}
    with mounted(source, tmp_path / "m", first=first, **chosen) as mount:
        loader = DataLoader(
            Members(mount.point / "train.tar"), 16, shuffle=True, generator=torch.Generator(), num_workers=2
        )
        with plan(mount.point, loader):
            counted = []
            for _ in range(3):
                assert sum(map(len, loader)) == MEMBERS
                counted.append((mount.metric("origin_reads"), mount.metric("origin_bytes") / MEMBER_BYTES))
    reads, came = (after - earlier for after, earlier in zip(counted[-1], counted[0], strict=True))
    assert reads < 0.70 * 2 * MEMBERS, "0.80 one by one"
    assert came < 2 * MEMBERS


class Files(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, samples: list[tuple[str, int]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        return colour(Image.open(path)), label


def test_shards_of_webdataset(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "train").mkdir(parents=True)
    for shard in range(4):
        members = {}
        for number in range(shard, PICTURES, 4):
            key, label = b"%04d" % number, (number // 4) % CLASSES
            members[key + b".png"] = picture(label, number)
            members[key + b".cls"] = b"%d" % label
            members[key + b".json"] = b'{"label": "%d", "of": "shard %d"}' % (label, shard)
        (source / "train" / f"{shard:03d}.tar").write_bytes(tar_of(members))
    with mounted(source, tmp_path / "m", archives="tar") as mount:
        samples = webdataset_samples(mount.point / "train")
        assert samples == webdataset_samples(mount.point / "train", sample="png", label="json.label")
        assert len(samples) == PICTURES
        assert samples[0] == (str(mount.point / "train" / "000.tar" / "0000.png"), 0)
        loader = DataLoader(Files(samples), 8, shuffle=True, num_workers=2)
        with plan(mount.point, loader, samples=samples):
            read_all(mount, loader)


@pytest.mark.parametrize(
    ("members", "arguments", "said"),
    [
        ({b"a.jpg": b"", b"a.png": b"", b"a.cls": b"1"}, {}, "a has the members cls, jpg, png: say which"),
        ({b"a.jpg": b"", b"a.cls": b"1"}, {"sample": "png"}, "a has the members cls, jpg: say which"),
        ({b"a.cls": b"1"}, {}, "a has the members cls: say which"),
        ({b"a.jpg": b""}, {}, "a has no .cls: say where its label is"),
        ({b"a.jpg": b"", b"a.cls": b"one"}, {}, "a.cls holds no whole number: say where"),
        ({b"a.jpg": b"", b"a.json": b"{}"}, {"label": "json.x"}, "a.json holds no whole number 'x': say where"),
        ({b"a.jpg": b"", b"a.json": b"{"}, {"label": "json.x"}, "a.json holds no whole number 'x': say where"),
    ],
)
def test_shards_that_say_too_little(
    tmp_path: Path, members: dict[bytes, bytes], arguments: dict[str, str], said: str
) -> None:
    for name, content in members.items():
        (tmp_path / os.fsdecode(name)).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        webdataset_samples(tmp_path, **arguments)
