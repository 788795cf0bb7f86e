"""Mounts that show some samples as views and the others as originals: which, and what of each the cache holds."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from image_files import image_file, picture
from mounting import Mounted, eventually, mounted
from profiled import note_sizes
from reading import source_with

from spiderfs.client import Client
from spiderfs.forms.profile import Cost, Form, Profile, SourceSpeed, load_record, save_record
from spiderfs.shared.layout import CacheLayout
from spiderfs.views.making import make
from spiderfs.views.recipe import NO_VIEW, Recipe

MOST = 50_000_000
SMALL = Recipe("bmp", 24)
PHOTOS = {
    f"train/{label}/{number:02d}.jpg": image_file(image=picture(160, 120, seed=100 * label + number))
    for label in (0, 1)
    for number in range(80)
}
VIEWS = {name: view for name, content in PHOTOS.items() if isinstance(view := make(content, SMALL, MOST), bytes)}
assert len(VIEWS) == len(PHOTOS)
ORIGINALS_BYTES, VIEWS_BYTES = sum(map(len, PHOTOS.values())), sum(map(len, VIEWS.values()))
OPTIONS = {"view": "small", "views": "small:bmp:24", "policy": "minio"}


source = source_with(PHOTOS)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a mount has been profiled."""
    note_sizes(tmp_path / "m", len(PHOTOS), {NO_VIEW: ORIGINALS_BYTES, "small": VIEWS_BYTES})
    return tmp_path / "m"


def shown(mount: Mounted) -> dict[str, str]:
    """Each file's form, by its bytes, which are those of its size, and come from the mount again."""
    found = {}
    for name, content in PHOTOS.items():
        fd = os.open(mount.point / name, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        read = (mount.point / name).read_bytes()
        assert (mount.point / name).stat().st_size == len(read)
        assert read in (content, VIEWS[name])
        found[name] = "original" if read == content else "small"
    return found


# Half of these bytes has room for a third of the samples as views.
CAPACITY = int(2 * VIEWS_BYTES / 3)


def test_the_cache_holds_of_each_form_what_the_split_says(source: Path, place: Path) -> None:
    with mounted(source, place, capacity=CAPACITY, forms="50-50-0", **OPTIONS) as mount:
        forms = shown(mount)
        views = [name for name, form in forms.items() if form == "small"]
        assert mount.stats()["split"] == "50-50-0"
        # A third less 5 % for landing, 3 %, and twice what the number of views varies by.
        assert mount.stats()["view_share"] == pytest.approx(0.307 - 2 * 0.036, abs=0.02)
        assert len(PHOTOS) / 8 < len(views) < len(PHOTOS) / 3
        # The manager of so small a cache does not decide about every file before the next ones push it out. What has
        # landed counts among the forms before that.
        eventually(lambda: shown(mount) == forms and mount.stats()["sections"]["views"]["entries"] == len(views))
        stats = mount.stats()
        assert stats["forms"]["small"] == len(views)
        assert stats["sections"]["views"] == {"bytes": sum(len(VIEWS[name]) for name in views), "entries": len(views)}
        assert stats["sections"]["samples"]["bytes"] > CAPACITY * 0.4
        assert stats["used_bytes"] <= CAPACITY
        text = mount.status()
        assert "50-50-0: 50% of the capacity for originals, 50% views, 0% augmented" in text
    with mounted(source, place, capacity=CAPACITY, forms="50-50-0", **OPTIONS) as mount:
        assert mount.stats()["forms"]["small"] == len(views)
        assert shown(mount) == forms
        assert mount.metric("views_made") == 0


def test_each_form_has_its_directory_and_one_job_may_read_it(source: Path, place: Path) -> None:
    with mounted(source, place, forms="50-50-0", capacity=CAPACITY, **OPTIONS) as mount:
        forms = mount.point / ".spiderfs/views"
        for form, contents in (("original", PHOTOS), ("small", VIEWS)):
            assert (forms / form).is_dir()
            assert not (forms / form).is_symlink()
            for name in list(PHOTOS)[:8]:
                assert (forms / form / name).stat().st_size == len(contents[name])
                assert (forms / form / name).read_bytes() == contents[name]
        assert set(shown(mount).values()) == {"original", "small"}


def test_readers_around_fuse_and_warming_get_the_same_forms(source: Path, place: Path) -> None:
    with mounted(source, place, forms="60-40-0", capacity="1MB", **OPTIONS) as mount:
        mount.control("warm").write_text("train/**\n")
        eventually(lambda: mount.control("warm").read_text().startswith("idle: 160 files"))
        forms = shown(mount)
        client = Client(mount.point)
        for name, form in forms.items():
            expected = VIEWS[name] if form == "small" else PHOTOS[name]
            assert client.read_bytes(mount.point / name) == expected
        mount.control("evict").write_text("train/**\n")
        eventually(lambda: mount.stats()["forms"] == {"original": 0, "small": 0})
        assert shown(mount) == forms


@pytest.mark.parametrize(("forms", "form"), [("0-100-0", "small"), ("100-0-0", "original")])
def test_a_pure_split_with_room_is_a_mount_of_that_form(source: Path, place: Path, forms: str, form: str) -> None:
    with mounted(source, place, capacity="2MB", forms=forms, **OPTIONS) as mount:
        assert set(shown(mount).values()) == {form}
        links = mount.point / ".spiderfs/views"
        assert [name for name in os.listdir(links) if (links / name).is_symlink()] == [form]
        assert mount.stats()["view_share"] == (form == "small")


# A worker takes twenty times as long for an original as for a view, and the source is far away.
FREE, SLOW, FAR = Cost(0.001, 0.0, 0.0), Cost(0.020, 0.0, 0.0), Cost(0.001, 0.020, 0.0)
PROFILE = Profile(
    cache_bytes=1e12,
    cores=4,
    source=SourceSpeed(0.010, 4, 1e9),
    samples=len(PHOTOS),
    workers=2,
    batch=8,
    step_s=None,
    uncached=Cost(0.020, 0.010, 0.0),
    encoded=Form(ORIGINALS_BYTES / len(PHOTOS), None, SLOW),
    augmented=Form(1e6, None, FREE),
    keeping=FREE,
    views={"small": Form(VIEWS_BYTES / len(PHOTOS), None, FREE)},
)


def test_a_mount_keeps_its_forms_and_says_what_the_next_one_would_take(source: Path, place: Path) -> None:
    record_path = CacheLayout(place / "cache").profile
    record = load_record(record_path)
    assert record is not None
    save_record(replace(record, profile=PROFILE), record_path)

    def row(mount: Mounted) -> str:
        text = mount.status()
        return next((line for line in text.splitlines() if line.strip().startswith("when remounted")), "")

    with mounted(source, place, capacity=CAPACITY, forms="auto", **OPTIONS) as mount:
        forms, share = shown(mount), mount.stats()["view_share"]
        assert (mount.stats()["next_split"], row(mount)) == ("0-100-0", "")
        mount.change("capacity", 2 * CAPACITY)
        roomy = replace(PROFILE, cache_bytes=2.0 * CAPACITY).best("small")
        assert (mount.stats()["next_split"], roomy.decoded < 1) == (str(roomy), True)
        assert f" {roomy}, " in row(mount)
        mount.change("capacity", CAPACITY)
        assert row(mount) == ""
        # Now decoding costs nothing, and the source is what is waited for.
        save_record(
            replace(record, profile=replace(PROFILE, encoded=PROFILE.views["small"], uncached=FAR)), record_path
        )
        assert "100-0-0" in row(mount)
        stats = mount.stats()
        assert (stats["split"], stats["next_split"], stats["view_share"]) == ("0-100-0", "100-0-0", share)
        assert shown(mount) == forms
        record_path.unlink()
        assert mount.stats()["next_split"] is None
        save_record(
            replace(record, profile=replace(PROFILE, encoded=PROFILE.views["small"], uncached=FAR)), record_path
        )
    with mounted(source, place, capacity=CAPACITY, forms="auto", **OPTIONS) as mount:
        assert (mount.stats()["split"], row(mount)) == ("100-0-0", "")
        assert set(shown(mount).values()) == {"original"}
