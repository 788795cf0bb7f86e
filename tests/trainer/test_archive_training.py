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
from listed import Listed, Read
from mounting import Mounted, eventually, mounted
from PIL import Image
from torch.utils.data import DataLoader

from trainer_hook import plan, webdataset_samples

CLASSES, PICTURES = 4, 160


def picture(label: int, number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (label * 60, number % 256, 0)).save(buffer, "PNG")
    return buffer.getvalue()


PICTURES_BY_PATH = {
    b"n%02d/%04d.png" % (number % CLASSES, number): picture(number % CLASSES, number) for number in range(PICTURES)
}


class LikeImageFolder(Listed[tuple[torch.Tensor, int]]):
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


def checked(path: Path, number: int) -> int:
    """Reads as where the data set is larger than memory: the kernel forgets it at once."""
    with open(path, "rb") as file:
        assert file.read() == b"%04d" % number * (MEMBER_BYTES // 4)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return number


@pytest.mark.thorough
def test_with_a_fifth_cached_neighbours_save_requests_of_later_epochs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    contents = {b"%04d" % number: b"%04d" % number * (MEMBER_BYTES // 4) for number in range(MEMBERS)}
    (source / "train.tar").write_bytes(tar_of(contents))
    # A window of 2 s would be most of an epoch.
    first = "from spiderfs.daemon.caching import prefetch_backend; prefetch_backend._AHEAD_S = 0.05"
    chosen = {"archives": "tar", "fetches": 4, "source__latency_ms": 2, "capacity": MEMBERS * MEMBER_BYTES // 5}
    with mounted(source, tmp_path / "m", first=first, **chosen) as mount:
        members = [(mount.point / "train.tar" / f"{number:04d}", number) for number in range(MEMBERS)]
        loader = DataLoader(Read(members, checked), 16, shuffle=True, generator=torch.Generator(), num_workers=2)
        with plan(mount.point, loader):
            counted = []
            for _ in range(3):
                assert sum(map(len, loader)) == MEMBERS
                counted.append((mount.metric("origin_reads"), mount.metric("origin_bytes") / MEMBER_BYTES))
    reads, came = (after - earlier for after, earlier in zip(counted[-1], counted[0], strict=True))
    assert reads < 0.70 * 2 * MEMBERS, "0.80 one by one"
    assert came < 2 * MEMBERS


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
        data = Read(samples, lambda path, label: (colour(Image.open(path)), label))
        loader = DataLoader(data, 8, shuffle=True, num_workers=2)
        with plan(mount.point, loader, samples=samples):
            read_all(mount, loader)


@pytest.mark.parametrize(
    ("members", "arguments", "said"),
    [
        ({b"a.jpg": b"", b"a.png": b"", b"a.cls": b"1"}, {}, "a has the members cls, jpg, png: name the extension"),
        ({b"a.jpg": b"", b"a.cls": b"1"}, {"sample": "png"}, "a has the members cls, jpg: name the extension"),
        ({b"a.cls": b"1"}, {}, "a has the members cls: name the extension"),
        ({b"a.jpg": b""}, {}, "a has no .cls: name the place of its label"),
        ({b"a.jpg": b"", b"a.cls": b"one"}, {}, "a.cls holds no whole number: name the place"),
        ({b"a.jpg": b"", b"a.json": b"{}"}, {"label": "json.x"}, "a.json holds no whole number 'x': name the place"),
        ({b"a.jpg": b"", b"a.json": b"{"}, {"label": "json.x"}, "a.json holds no whole number 'x': name the place"),
    ],
)
def test_shards_that_say_too_little(
    tmp_path: Path, members: dict[bytes, bytes], arguments: dict[str, str], said: str
) -> None:
    for name, content in members.items():
        (tmp_path / os.fsdecode(name)).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        webdataset_samples(tmp_path, **arguments)


def put(root: Path, members: dict[str, bytes]) -> None:
    """Files below shards as a mount shows them, and beside them."""
    for name, content in members.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


PLAIN = {f"{shard}.tar/{number}.{kind}": b"7" for shard in (0, 1) for number in (0, 1) for kind in ("jpg", "cls")}
CAPTIONS = {f"0.tar/{number}.{kind}": b'{"width": 7}' for number in (0, 1) for kind in ("jpg", "txt", "json")}


@pytest.mark.parametrize(
    ("members", "arguments", "expected"),
    [
        ({**PLAIN, "0.parquet": b"x", "0_stats.json": b"{}", "nshards.txt": b"2"}, {}, ["0.tar/0.jpg", "0.tar/1.jpg"]),
        ({**{f"test/{name}": b"7" for name in PLAIN}, "README.md": b"x"}, {}, ["test/0.tar/0.jpg", "test/0.tar/1.jpg"]),
        ({**PLAIN, "0.tar/._0.jpg": b"mac", "0.tar/.DS_Store": b"ds"}, {}, ["0.tar/0.jpg", "0.tar/1.jpg"]),
        ({**PLAIN, ".cache/x.tar/0.lock": b"", "0.tar/.d/2.jpg": b"", "0.tar/.d/2.cls": b"7"}, {},
         ["0.tar/0.jpg", "0.tar/1.jpg", "0.tar/.d/2.jpg"]),
        ({"a.tar/0.image.jpg": b"", "a.tar/0.label.cls": b"7"}, {"label": "label.cls"}, ["a.tar/0.image.jpg"]),
        ({"a.zip/0.image.jpg": b"", "a.zip/0.depth.png": b"", "a.zip/0.meta.json": b'{"a.b": "7"}'},
         {"sample": "image.jpg", "label": "meta.json.a.b"}, ["a.zip/0.image.jpg"]),
        (CAPTIONS, {"label": "json.width"}, ["0.tar/0.jpg", "0.tar/1.jpg"]),
        ({**PLAIN, "annotations.zip": b"PK"}, {}, ["0.tar/0.jpg", "0.tar/1.jpg"]),
    ],
    ids=["beside shards", "beside directories", "macOS", "hidden", "dots", "fields of dots", "captions", "other kinds"],
)  # fmt: skip
def test_usual_layouts_of_shards(
    tmp_path: Path, members: dict[str, bytes], arguments: dict[str, str], expected: list[str]
) -> None:
    put(tmp_path, members)
    samples = webdataset_samples(tmp_path, **arguments)
    assert samples[: len(expected)] == [(str(tmp_path / path), 7) for path in expected]
    assert len(samples) == sum(".tar/" in name or ".zip/" in name for name in members if name.endswith(".jpg")) - (
        "0.tar/._0.jpg" in members
    )


def test_no_shard_is_left_out_in_silence(tmp_path: Path) -> None:
    put(tmp_path, PLAIN)
    for path, error in ((tmp_path / "none", FileNotFoundError), (tmp_path / "0.tar" / "0.jpg", NotADirectoryError)):
        with pytest.raises(error):
            webdataset_samples(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no samples at or below .*/empty: name the directory"):
        webdataset_samples(tmp_path / "empty")
    (tmp_path / "2.tar").symlink_to("0.tar/0.jpg")
    with pytest.raises(ValueError, match=r"2\.tar is a file: mount with -o archives=tar"):
        webdataset_samples(tmp_path)
    put(tmp_path / "files", {"0.tar": b"x"})
    with pytest.raises(ValueError, match=r"0\.tar is a file: mount with -o archives=tar"):
        webdataset_samples(tmp_path / "files")


def test_a_shard_that_was_cut_short_is_an_error(tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    whole = tar_of({b"0.jpg": bytes(900), b"0.cls": b"1"})
    (source / "0.tar").write_bytes(whole)
    (source / "1.tar").write_bytes(whole[:2000])
    with mounted(source, tmp_path, archives="tar", allowed=["1.tar cannot be shown"]) as mount:
        with pytest.raises(OSError, match=r"Errno 5\] it has no end: it may have been cut short: .*/1\.tar"):
            webdataset_samples(mount.point)
        assert len(webdataset_samples(mount.point / "0.tar")) == 1


VERSIONED = 40


# The manager looks for earlier versions every few seconds.
SOON = (
    "from spiderfs.daemon.caching import cache_control; cache_control.INTERVAL_S = cache_control.IDLE_INTERVAL_S = 0.05"
)


def test_a_replaced_archive_is_fetched_ahead_of_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()

    def put(version: bytes) -> None:
        new = tmp_path / "new"
        new.write_bytes(tar_of({b"%04d" % number: b"%04d" % number + version * 3000 for number in range(VERSIONED)}))
        os.utime(new, (1e9 + version[0], 1e9 + version[0]))
        new.rename(source / "a.tar")

    put(b"1")
    options = {"archives": "tar", "capacity": "40kB", "ttl": 0, "dir_ttl": 0, "source__latency_ms": 2}
    with mounted(source, tmp_path / "m", first=SOON, **options) as mount:
        members = [(mount.point / "a.tar" / f"{number:04d}", 0) for number in range(VERSIONED)]
        loader = DataLoader(Read(members, lambda path, _: path.read_bytes()[-1:]), 4, shuffle=True)

        def fetched_ahead() -> int:
            before = mount.metric("prefetched")
            versions = {one for batch in loader for one in batch}
            assert versions == {current}
            return int(mount.metric("prefetched") - before)

        with plan(mount.point, loader):
            current = b"1"
            assert [fetched_ahead() > VERSIONED / 4 for _ in range(2)] == [True, True]
            put(current := b"2")
            fetched_ahead()
            assert any(fetched_ahead() > VERSIONED / 4 for _ in range(3))
            assert mount.metric("hook_malformed") == 0
