"""Mounts that show a view of each image: sizes are exact, bytes never change, and no image hurts anybody."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_files import image_file, picture, plain_png
from mounting import Mounted, descendants, eventually, mounted
from reading import write_contents, write_files

from spiderfs.views.making import make
from spiderfs.views.recipe import READY, Recipe

MOST = 50_000_000
PHOTOS = {
    f"train/{label}/{number}.jpg": image_file(image=picture(seed=10 * label + number))
    for label in (0, 1)
    for number in range(6)
}
MAKER = b"spiderfs.views.making"
LARGE_BYTES = (9 << 20) + 5


OTHERS = {
    "labels.csv": b"name,label\n",
    "empty.jpg": b"",
    "half.jpg": image_file(image=picture(700, 500))[:-9000],
    "clear.png": image_file("PNG", image=picture(mode="RGBA")),
    "bomb.png": plain_png(60_000, 60_000, bytes(1 << 20)),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    write_contents(source, PHOTOS | OTHERS)
    write_files(source, {"large.bin": LARGE_BYTES})
    return source


@pytest.fixture
def small(source: Path, tmp_path: Path) -> Iterator[Mounted]:
    with mounted(source, tmp_path / "m", view="small", views="small:jpeg:64:80") as mount:
        yield mount


SMALL = Recipe("jpeg", 64, 80)


def view_of(content: bytes, recipe: Recipe = SMALL) -> bytes:
    view = make(content, recipe, MOST)
    return view if isinstance(view, bytes) else content


def test_every_file_is_shown_with_the_size_and_the_bytes_of_its_view(small: Mounted) -> None:
    for name, content in PHOTOS.items():
        view = view_of(content)
        assert len(view) < len(content)
        assert (small.point / name).stat().st_size == len(view)
        assert (small.point / name).read_bytes() == view
        with open(small.point / name, "rb") as file:
            assert file.seek(0, os.SEEK_END) == len(view)
    metrics = small.stats()["metrics"]
    assert metrics["views_made"] == len(PHOTOS)
    assert metrics["origin_bytes"] == sum(map(len, PHOTOS.values()))
    # The reader waited in the look-up, so its first open is none that was served without waiting.
    eventually(lambda: small.metric("opens") >= len(PHOTOS))
    assert small.metric("opens") - small.metric("opens_hit") == len(PHOTOS)


def test_what_has_no_view_is_shown_as_it_is(small: Mounted) -> None:
    for name, content in OTHERS.items():
        assert (small.point / name).stat().st_size == len(content)
        assert (small.point / name).read_bytes() == content
    assert (small.point / "large.bin").read_bytes() == (small.source / "large.bin").read_bytes()
    shown = len(OTHERS) - 1  # of an empty file nothing is fetched
    assert small.metric("views_as_they_are") == shown
    assert len(small.logged("is shown as it is")) == shown
    photo = next(iter(PHOTOS))
    (small.point / photo).read_bytes()
    eventually(lambda: small.stats()["forms"] == {"original": shown, "small": 1})
    assert "small (jpeg:64:80), 1 made" in small.status()


@pytest.mark.opened_and_immutable
def test_a_view_that_has_left_the_cache_is_made_again_with_the_same_bytes(small: Mounted) -> None:
    for name in PHOTOS:
        (small.point / name).read_bytes()
    eventually(lambda: small.metric("opens") == len(PHOTOS))
    small.control("evict").write_text("train/**\n")
    eventually(lambda: small.stats()["forms"]["small"] == 0)
    for name, content in PHOTOS.items():
        fd = os.open(small.point / name, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        assert (small.point / name).stat().st_size == len(view_of(content))
    assert small.metric("views_made") in (len(PHOTOS), 2 * len(PHOTOS))
    for name, content in PHOTOS.items():
        assert (small.point / name).read_bytes() == view_of(content)


def test_warming_makes_views_and_a_later_mount_of_the_view_has_them(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", view="bmp256") as mount:
        mount.control("warm").write_text("train/**\n")
        eventually(lambda: mount.metric("warmed") == len(PHOTOS))
        eventually(lambda: mount.stats()["forms"]["bmp256"] == len(PHOTOS))
        size = sum(len(view_of(content, READY["bmp256"])) for content in PHOTOS.values())
        assert mount.stats()["used_bytes"] == size
    for view in ("bmp256", "jpeg256", "bmp256"):
        with mounted(source, tmp_path / "m", view=view) as mount:
            for name, content in PHOTOS.items():
                expected = view_of(content, READY[view])
                assert (mount.point / name).stat().st_size == len(expected)
                assert (mount.point / name).read_bytes() == expected
            # A cache that has shown another view meanwhile has kept the bytes, and looks at the names again.
            assert mount.metric("views_made") == (len(PHOTOS) if view == "jpeg256" else 0)
    with mounted(source, tmp_path / "m") as mount:
        for name, content in PHOTOS.items():
            assert (mount.point / name).read_bytes() == content


def test_a_cached_read_does_not_wait_for_a_maker_that_hangs(small: Mounted) -> None:
    names = list(PHOTOS)
    cached, other = names[0], names[1]
    (small.point / cached).read_bytes()
    eventually(lambda: small.metric("opens") == 1)
    (pid,) = descendants(small.supervisor.pid, MAKER)
    os.kill(pid, signal.SIGSTOP)
    waiting = threading.Thread(target=(small.point / other).read_bytes)
    waiting.start()
    try:
        # The reader is in the kernel now, or will be in a moment; either way the cached file is read at once.
        for _ in range(20):
            began = time.monotonic()
            fd = os.open(small.point / cached, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.read(fd, 1 << 20) == view_of(PHOTOS[cached])
            os.close(fd)
            assert time.monotonic() - began < 9
    finally:
        os.kill(pid, signal.SIGKILL)
        waiting.join()
    assert (small.point / other).read_bytes() == view_of(PHOTOS[other])


def test_a_cache_that_was_lost_still_knows_its_view(source: Path, tmp_path: Path) -> None:
    name, content = next(iter(PHOTOS.items()))
    often = "from spiderfs.daemon import supervisor; supervisor.LOOK_S = 0.2"
    view = {"view": "small", "views": "small:jpeg:64:80"}
    # The processes say what they miss, in one order or another; both mounts have one log.
    with mounted(source, tmp_path / "m", first=often, allowed=["WARNING"], **view) as mount:
        shutil.rmtree(mount.cache / "store", ignore_errors=True)
        eventually(lambda: mount.logged("the cache is made again"))
        eventually((mount.cache / "store/view").exists)
        eventually(lambda: (mount.point / name).read_bytes() == view_of(content))
        (mount.point / "labels.csv").read_bytes()
    with mounted(source, tmp_path / "m", allowed=["WARNING"]) as mount:
        assert (mount.point / name).stat().st_size == len(content)
        assert (mount.point / name).read_bytes() == content
