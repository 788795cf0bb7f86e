"""Mounts that show originals and several views at once: each path has the bytes of its form, and no other's."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_files import image_file, picture
from mounting import Mounted, descendants, eventually, is_running, mounted
from PIL import Image
from reading import write_contents

from spiderfs.views.making import make
from spiderfs.views.recipe import READY, Recipe

MOST = 50_000_000
PHOTOS = {
    f"train/{label}/{number}.jpg": image_file(image=picture(700, 500, seed=10 * label + number))
    for label in (0, 1)
    for number in range(4)
}
HALF = image_file(image=picture(700, 500))[:-3000]
RECIPES = {**READY, "small": Recipe("jpeg", 64, 80)}
LONGEST = 8 << 20


def view_of(content: bytes, view: str) -> bytes:
    made = make(content, RECIPES[view], MOST)
    return made if isinstance(made, bytes) else content


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    others = {"half.jpg": HALF, "labels.csv": b"name,label\n", "empty.jpg": b"", "large.bin": bytes(LONGEST) + b"end"}
    write_contents(source, PHOTOS | others)
    os.symlink("train/0/0.jpg", source / "link.jpg")
    return source


@pytest.fixture
def mount(source: Path, tmp_path: Path) -> Iterator[Mounted]:
    with mounted(source, tmp_path / "m", views="small:jpeg:64:80") as mount:
        yield mount


def views(mount: Mounted) -> Path:
    return mount.point / ".spiderfs/views"


def cached_forms(mount: Mounted, shown: str = "original") -> Counter[str]:
    """How many files are cached in which form, by the list of what is cached; none of them is as it is in a view."""
    paths = [line.split()[3] for line in mount.control("cache").read_text().splitlines()]
    return Counter(path.split("/")[2] if path.startswith(".spiderfs/views/") else shown for path in paths)


def test_the_directory_lists_all_forms_and_makes_nothing(mount: Mounted) -> None:
    assert "views" in os.listdir(mount.point / ".spiderfs")
    assert sorted(os.listdir(views(mount))) == sorted(["original", *RECIPES])
    assert os.readlink(views(mount) / "original") == "../.."
    for view in RECIPES:
        assert (views(mount) / view).is_dir()
        assert sorted(os.listdir(views(mount) / view)) == sorted(os.listdir(mount.point))
    found = subprocess.run(["find", views(mount), "-type", "f"], capture_output=True, check=True, timeout=60)
    assert len(found.stdout.splitlines()) == len(RECIPES) * (len(PHOTOS) + 4)
    assert mount.metric("views_made") == 0
    for unknown in ("large", "..small", "small ", "original2", "\udcff", "x" * 300):
        with pytest.raises(FileNotFoundError):
            os.stat(views(mount) / unknown)
    assert not (mount.point / ".spiderfs/.spiderfs").exists()
    assert not (views(mount) / "small/.spiderfs").exists()


def test_each_path_has_the_size_and_the_bytes_of_its_form(mount: Mounted) -> None:
    for name, content in PHOTOS.items():
        inodes = set()
        for view in ("small", "bmp256", "npy256", "original"):
            expected = content if view == "original" else view_of(content, view)
            path = views(mount) / view / name
            assert path.stat().st_size == len(expected)
            assert path.read_bytes() == expected
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                assert mapped[:] == expected
            inodes.add(path.stat().st_ino)
        assert len(inodes) == 4
        assert (mount.point / name).stat().st_ino == (views(mount) / "original" / name).stat().st_ino
    wanted = dict.fromkeys(("original", "small", "bmp256", "npy256"), len(PHOTOS))
    # The manager hears a moment later of what was fetched.
    eventually(lambda: mount.stats()["forms"] == cached_forms(mount) == wanted)
    assert mount.metric("views_made") == 3 * len(PHOTOS)
    text = ", ".join(f"{count} {form}" for form, count in mount.stats()["forms"].items())
    assert f"{text} samples\n" in mount.status()


def test_a_view_that_the_root_shows_is_the_root(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", views="small:jpeg:64:80", view="small") as mount:
        assert os.readlink(views(mount) / "small") == "../.."
        for name, content in PHOTOS.items():
            path = views(mount) / "small" / name
            assert path.stat().st_ino == (mount.point / name).stat().st_ino
            assert path.read_bytes() == view_of(content, "small")
            assert (views(mount) / "original" / name).read_bytes() == content
            assert (views(mount) / "bmp256" / name).read_bytes() == view_of(content, "bmp256")
        assert mount.metric("views_made") == 2 * len(PHOTOS)
        eventually(lambda: mount.stats()["forms"] == cached_forms(mount, "small"))
        assert mount.stats()["forms"] == dict.fromkeys(("original", "small", "bmp256"), len(PHOTOS))


def test_readers_of_two_views_at_once_get_each_their_own(source: Path, tmp_path: Path) -> None:
    wrong: list[str] = []

    def read(view: str, side: int) -> None:
        for _ in range(3):
            for name in PHOTOS:
                with Image.open(views(mount) / view / name) as image:
                    image.load()
                    if min(image.size) != side:
                        wrong.append(f"{view}/{name}: {image.size}")

    with mounted(source, tmp_path / "m", views="small:jpeg:64:80", workers=2, source__latency_ms=3) as mount:
        sides = {"small": 64, "bmp256": 256, "png256": 256, "original": 500}
        threads = [threading.Thread(target=read, args=item) for item in 2 * list(sides.items())]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert mount.metric("views_made") == 3 * len(PHOTOS)


def test_warm_and_evict_mean_the_form_that_a_line_names(mount: Mounted) -> None:
    def warm(line: str) -> str:
        mount.control("warm").write_text(line + "\n")
        text = eventually(lambda: mount.control("warm").read_text().startswith("idle") and mount.control("warm"))
        return str(text.read_text().partition("(")[0])

    assert warm("train/**") == "idle: 8 files found, 8 fetched "
    assert warm(".spiderfs/views/original/train") == "idle: 8 files found, 0 fetched "
    assert warm(f"{views(mount)}/small/train/0") == "idle: 4 files found, 4 fetched "
    assert warm(".spiderfs/views/*/train/1/0.jpg") == f"idle: {len(RECIPES)} files found, {len(RECIPES)} fetched "
    assert warm(".spiderfs/views/small/train/1/1.jpg") == "idle: 1 files found, 1 fetched "
    assert warm("**/1.jpg") == "idle: 2 files found, 0 fetched "
    eventually(lambda: mount.stats()["forms"].get("small") == 6)
    for line, evicted in (("**/0.jpg", 2), (".spiderfs/views/small", 6), (".spiderfs/views/*/train/1/0.jpg", 5)):
        mount.control("evict").write_text(line + "\n")
        assert mount.control("evict").read_text() == f"{evicted} records evicted by the last request\n"


def test_a_change_at_the_source_is_a_new_version_in_every_form(source: Path, tmp_path: Path) -> None:
    name = "train/0/0.jpg"
    with mounted(source, tmp_path / "m", views="small:jpeg:64:80", ttl="0s") as mount:
        paths = {view: views(mount) / view / name for view in ("small", "bmp256")}
        for view, path in paths.items():
            assert path.read_bytes() == view_of(PHOTOS[name], view)
        content = image_file(image=picture(640, 480, seed=99))
        (source / name).write_bytes(content)
        for view, path in paths.items():
            # Until it has settled, the new version is shown as it is.
            eventually(lambda path=path, view=view: path.read_bytes() == view_of(content, view))  # type: ignore[misc]
            assert path.stat().st_size == len(view_of(content, view))


def _small(mount: Mounted, name: str) -> bytes | None:
    try:
        return (views(mount) / "small" / name).read_bytes()
    except OSError:
        return None


@pytest.mark.thorough
def test_a_mount_ends_while_a_view_is_made(source: Path, tmp_path: Path) -> None:
    read: list[bytes | None] = []
    with mounted(source, tmp_path / "m", views="small:jpeg:64:80", allowed=["WARNING"]) as mount:
        assert _small(mount, "train/0/0.jpg")
        (maker,) = descendants(mount.supervisor.pid, b"spiderfs.views.making")
        os.kill(maker, signal.SIGSTOP)
        reader = threading.Thread(target=lambda: read.append(_small(mount, "train/1/0.jpg")))
        reader.start()
        began = time.monotonic()
        mount.stop()
        reader.join(30)
        # A maker is given up after 10 s, and its mount need not wait for it.
        assert time.monotonic() - began < 30
    assert read in ([None], [view_of(PHOTOS["train/1/0.jpg"], "small")])
    eventually(lambda: not is_running(maker))
