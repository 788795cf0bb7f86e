"""A mount with a cache on several disks: all of them are used, and what happens to one costs no read."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from mounting import Mounted, eventually, mounted, run_spiderfs
from reading import digest, read_afresh, write_files
from test_broken_disk import Disk, made_disk

from spiderfs.shared.layout import EXTENTS_FILE, CacheLayout

pytestmark = pytest.mark.opened_and_immutable

FILES = {f"{number:02d}": 3_000 + 2_000 * number for number in range(40)}
LEFT_OUT = ["the cache goes on without", "the cache goes without"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def wanted(source: Path) -> Mapping[str, str]:
    return write_files(source, {**FILES, **{f"large {number}": (9 << 20) + number for number in range(4)}})


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with made_disk(tmp_path) as made:
        yield made


@contextlib.contextmanager
def over(source: Path, place: Path, *directories: Path, allowed: list[str] | None = None) -> Iterator[Mounted]:
    for directory in directories[1:]:
        if directory.parent.exists() and not allowed:
            directory.mkdir(exist_ok=True)
    places = ":".join(map(str, directories))
    options = {"capacity": "200MiB", "cache_dir": places}
    with mounted(source, place, cache=directories[0], allowed=allowed or [], **options) as mount:  # type: ignore[arg-type]
        yield mount


def read_all(mount: Mounted, wanted: Mapping[str, str]) -> None:
    assert {name: digest(read_afresh(mount.point / name)) for name in wanted} == wanted


def settled(mount: Mounted, wanted: Mapping[str, str]) -> list[int]:
    """The bytes in each directory once all files are kept."""
    read_all(mount, wanted)
    total = sum(path.stat().st_size for path in mount.source.iterdir())  # type: ignore[union-attr]
    eventually(lambda: mount.stats()["used_bytes"] == total, what="all files in the cache")
    return [found["used_bytes"] for found in mount.stats()["cache_dirs"]]


def test_both_are_used_and_kept_and_shown(source: Path, wanted: Mapping[str, str], tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with over(source, tmp_path / "m", a, b) as mount:
        used = settled(mount, wanted)
        assert min(used) > 0, "each has its part"
        assert CacheLayout(b).content.joinpath(EXTENTS_FILE).exists()
        assert not (CacheLayout(b).content / "data.mdb").exists(), "rows are in the first one"
        shown = mount.status()
        assert str(a) in shown
        assert str(b) in shown
        assert "left out" not in shown
        assert f'spiderfs_cache_dir_up{{directory="{b}"}} 1.0' in mount.control("metrics").read_text()
        listed = run_spiderfs("cache", "list").stdout
        assert f"{b}: " in listed
        refused = run_spiderfs("cache", "remove", b)
        assert "is in use" in refused.stderr
        other = tmp_path / "other"
        other.mkdir()
        busy = run_spiderfs("mount", source, other, "-o", f"cache_dir={tmp_path / 'c'}:{b}")
        assert "is in use by another mount" in busy.stderr
    with over(source, tmp_path / "m", a, b) as mount:
        assert [found["used_bytes"] for found in mount.stats()["cache_dirs"]] == used
        read_all(mount, wanted)
        assert mount.metric("origin_bytes") == 0
        assert run_spiderfs("doctor", mount.point).stdout.count("where") >= 2
    assert run_spiderfs("cache", "remove", a, b).returncode == 0
    assert not b.exists()


def test_one_that_is_missing_is_left_out_with_a_warning(
    source: Path, wanted: Mapping[str, str], tmp_path: Path
) -> None:
    a, b, away = tmp_path / "a", tmp_path / "b", tmp_path / "away"
    with over(source, tmp_path / "m", a, b) as mount:
        used = settled(mount, wanted)
    b.rename(away)
    checked = run_spiderfs("doctor", source, "-o", f"cache_dir={a}:{b}").stdout
    assert "goes without" in checked
    with over(source, tmp_path / "m", a, b, allowed=LEFT_OUT) as mount:
        assert len(mount.logged("goes without")) == 1
        assert not b.exists(), "without its disk, it would be made on another"
        eventually(lambda: mount.stats()["used_bytes"] <= used[0], what="rows of the missing one go")
        read_all(mount, wanted)
        assert 0 < mount.metric("origin_bytes") <= used[1]
        assert f"{b}: left out" in mount.status()
        assert f'spiderfs_cache_dir_up{{directory="{b}"}} 0.0' in mount.control("metrics").read_text()
        assert f"{b} was missing" in " ".join(run_spiderfs("doctor", mount.point).stdout.split())
    away.rename(b)
    new = write_files(source, {"new": 50_000})
    with over(source, tmp_path / "back", a, b) as mount:
        read_all(mount, {**wanted, **new})
        eventually(lambda: mount.stats()["cache_dirs"][1]["used_bytes"], what="the empty one gets what is new")


def test_one_that_goes_while_mounted(source: Path, wanted: Mapping[str, str], tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with over(source, tmp_path / "m", a, b) as mount:
        settled(mount, wanted)
        mount.expect(*LEFT_OUT, "taking stock")
        shutil.rmtree(b)
        read_all(mount, wanted)
        eventually(lambda: f"{b}: left out" in mount.status())
        eventually(lambda: not mount.stats()["cache_dirs"][1]["used_bytes"], what="the end of its rows")
        settled(mount, wanted)
        before = mount.metric("origin_bytes")
        read_all(mount, wanted)
        assert mount.metric("origin_bytes") == before
        assert not mount.logged("the cache is made again")


def test_one_that_turns_read_only(source: Path, wanted: Mapping[str, str], disk: Disk, tmp_path: Path) -> None:
    a, b = tmp_path / "a", disk.point / "b"
    with over(source, tmp_path / "m", a, b) as mount:
        read_all(mount, dict(list(wanted.items())[:10]))
        mount.expect(*LEFT_OUT, "taking stock", "Read-only file system", "could not be written to disk")
        disk.break_down()
        read_all(mount, wanted)
        eventually(lambda: f"{b}: left out" in mount.status(), what="it is left out")
        eventually(lambda: not mount.stats()["cache_dirs"][1]["used_bytes"], what="the end of its rows")
        settled(mount, wanted)
    with over(source, tmp_path / "m", a, b, allowed=LEFT_OUT) as mount:
        assert mount.logged("cannot be used .Read-only file system")
        read_all(mount, wanted)
        assert mount.metric("origin_bytes") == 0, "all of it is in the other one"
