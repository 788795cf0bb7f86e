"""A cache that is damaged or has no room: readers get the source's bytes, or an error, but never wrong bytes."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random

import pytest
from choices import all_or_covering
from mounting import Mounted, as_root, detach, eventually, mounted, run_spiderfs, settle
from reading import read_through, readers, together, write_files

from spiderfs.shared.layout import DATA_FILE, EXTENTS_FILE, RESERVE_FILE, CacheLayout

SIZES = {f"{number:03d}": 40_000 for number in range(40)} | {"large": (2 << 20) + 5}
# What is longer is read in blocks; by default 8 MiB.
LIMIT: dict[str, object] = {"sample_max_bytes": "1MiB"}
DAMAGE = (
    "the cache is damaged",
    "a page of the cache is gone",
    r"damaged",
    "the cache starts empty",
    r"worker \d+ ended",
    "the manager ended",
    "the cache holds other files than thought",
    "is not known",
)


def _overwrite(path: Path) -> None:
    """Write random bytes over most of the file, but not over the first pages, and over all of the pages after these."""
    size = path.stat().st_size
    random = Random(1)
    with open(path, "r+b") as file:
        for offset in range(4 * 4096, size, 4096):
            if offset < 128 * 4096 or random.random() < 0.3:
                file.seek(offset)
                file.write(random.randbytes(4096))


def _truncate(path: Path) -> None:
    # Most of the file of names is a reserve that holds nothing yet.
    os.truncate(path, min(path.stat().st_size // 3 // 4096, 6) * 4096)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _scramble_head(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(os.urandom(2 * 4096))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "overwritten": _overwrite,
    "truncated": _truncate,
    "emptied": _empty,
    "without head": _scramble_head,
}


FILES = {"content": f"content/{DATA_FILE}", "names": f"names/{DATA_FILE}", "extents": f"content/{EXTENTS_FILE}"}


@pytest.mark.parametrize(("damage", "what"), all_or_covering(DAMAGES, FILES))
def test_damage_between_mounts_serves_no_wrong_byte(source: Path, tmp_path: Path, what: str, damage: str) -> None:
    wanted = write_files(source, SIZES)
    cache = tmp_path / "cache"
    with (
        mounted(source, tmp_path / "m", cache=cache, **LIMIT) as mount,
        readers(1, mount.point, wanted, rounds=1) as one,
    ):
        assert together(one).wrong == []
    DAMAGES[damage](CacheLayout(cache).store / FILES[what])
    with mounted(source, tmp_path / "m", cache=cache, workers=2, allowed=DAMAGE, **LIMIT) as mount:
        read_through(mount.point, wanted, 2, 2)
        figures = mount.stats()["metrics"]
        assert figures["store_rebuilds"] + figures["checksum_failures"] > 0


@pytest.mark.parametrize(("damage", "what"), all_or_covering(DAMAGES, FILES))
def test_damage_under_a_mount_serves_no_wrong_byte(source: Path, tmp_path: Path, what: str, damage: str) -> None:
    wanted = write_files(source, SIZES)
    with mounted(source, tmp_path / "m", workers=2, capacity="16MiB", ttl=0.2, allowed=DAMAGE, **LIMIT) as mount:
        with readers(2, mount.point, wanted) as some:
            eventually(lambda: mount.metric("opens") > 2 * len(wanted))
            DAMAGES[damage](CacheLayout(mount.cache).store / FILES[what])
            before = mount.metric("opens")
            eventually(lambda: mount.metric("opens") > before + 2 * len(wanted), what="reads after the damage")
            seen = together(some)
        assert seen.wrong == []
        # The mount has forgotten what a handle means that was open while the names were lost.
        assert {kind for _, kind, _ in seen.errors} <= {"ESTALE"}
        read_through(mount.point, wanted, 2, 1)


def test_damage_to_what_the_processes_share_costs_no_read(source: Path, tmp_path: Path) -> None:
    """A disk that loses what was written leaves empty files, and new workers read all of them."""
    wanted = write_files(source, {f"{number:03d}": 4_000 for number in range(20)})
    allowed = (r"worker \d+ ended \(signal 9\)", "the options changed while mounted are lost")
    with mounted(source, tmp_path / "m", workers=2, allowed=allowed) as mount:
        for path in CacheLayout(mount.cache).run.directory.iterdir():
            if path.is_file():
                os.truncate(path, 0)
        for pid in mount.workers():
            os.kill(pid, signal.SIGKILL)
        read_through(mount.point, wanted, 2, 2)
        assert mount.metric("worker_restarts") == 2


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    place.mkdir()
    as_root("mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", place)
    try:
        yield place
    finally:
        detach(place)


FULL = (
    r"no space left for the cache .*",
    "no room to keep for names",
    "could not be written to disk",
    "readers around FUSE do not learn of the options",
    "workers do not learn of trainers",
)


def test_a_full_disk_costs_the_cache_and_no_read(source: Path, tmp_path: Path) -> None:
    """The disk has room for the reserve for names (32 MiB), and less room than the files need."""
    wanted = write_files(source, {f"{number:03d}": 100_000 for number in range(150)} | {"large": 9 << 20})
    with small_disk(tmp_path / "disk", "48M") as disk:
        cache = disk / "cache"
        with mounted(source, tmp_path / "m", workers=2, cache=cache, allowed=FULL) as mount:
            read_through(mount.point, wanted, 2, 2)
            assert mount.metric("store_failures") > 0
            # There is one warning, however many files do not fit and however many processes notice it.
            assert len(mount.logged("no space left for the cache|no room to keep for names")) == 1
            _everything_else_works(mount, wanted)
            # New names are found too, and the capacity can be lowered to the room that there is.
            (source / "new").write_bytes(b"new")
            assert (mount.point / "new").read_bytes() == b"new"


def _everything_else_works(mount: Mounted, wanted: dict[str, str]) -> None:
    for name in ("stats.json", "metrics", "config", "cache", "warm", "evict", "log"):
        # A process that has just written to the log may not have come to show it.
        eventually(lambda name=name: mount.control(name).read_bytes(), what=name)  # type: ignore[misc]
    assert len(os.listdir(mount.point)) == len(wanted)
    # A change that makes room must not need that room itself.
    mount.change("capacity", "2MiB")
    assert "\ncapacity=2MiB" in mount.control("config").read_text()
    eventually(lambda: mount.metric("used_bytes") <= 2 << 20)
    assert mount.control("log").read_bytes() is not None


def test_what_is_pinned_on_a_full_disk_is_fetched_once_there_is_room(source: Path, tmp_path: Path) -> None:
    write_files(source, {f"{number:02d}": 1_000_000 for number in range(20)})
    soon = "from spiderfs.vfs import fetcher; fetcher.FULL_PAUSE_S = 0.2"
    with (
        small_disk(tmp_path / "disk", "48M") as disk,
        mounted(source, tmp_path / "m", cache=disk / "cache", allowed=FULL, first=soon) as mount,
    ):
        full = run_spiderfs("pin", mount.point, ".")
        said = re.fullmatch(
            r"spiderfs: (\d+) files are not kept: make room on the full disk of the cache .*\n", full.stderr
        )
        assert said is not None, full.stderr
        assert full.returncode == 1
        assert 0 < int(said[1]) < 20
        for name in os.listdir(source):
            assert (mount.point / name).read_bytes() == (source / name).read_bytes()
        as_root("mount", "-o", "remount,size=96M", disk)
        eventually(lambda: run_spiderfs("pin", mount.point, ".").returncode == 0)
        assert mount.control("cache").read_text().count("user-pinned ") == 20


def test_a_file_larger_than_the_cache_can_hold_fills_no_disk(source: Path, tmp_path: Path) -> None:
    """A file of the cache may have 256 MiB here; the source's file is larger, and sparse."""
    limit_bytes, size = 256 << 20, (500 << 20) + 5
    with open(source / "large", "wb") as file:
        file.write(b"begin")
        file.seek(size - 5)
        file.write(b"- end")
    with open(source / "vast", "wb") as file:
        file.truncate((1 << 43) - 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with mounted(
            source, tmp_path / "m", read_ahead=0, fetches=8, allowed=("larger than the cache.s file system allows",)
        ) as mount:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            for name, offset, wanted in (
                ("large", 0, b"begin"),
                ("large", size - 5, b"- end"),
                ("vast", 1 << 42, bytes(5)),
            ):
                fd = os.open(mount.point / name, os.O_RDONLY)
                assert os.pread(fd, 5, offset) == wanted
                os.close(fd)
            (source / "small").write_bytes(b"small")
            settle(source)
            assert (mount.point / "small").read_bytes() == b"small"
            eventually(lambda: b" small" in mount.control("cache").read_bytes())
            assert b"large block 1\n" in mount.control("cache").read_bytes()
            assert mount.metric("store_failures") == 0
            assert not CacheLayout(mount.cache).run.full_disk.exists()
            assert len(mount.logged("file system allows")) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(disk: Path) -> None:
    """Fill the disk to the last byte."""
    for piece_bytes in (1 << 20, 4096):
        with open(disk / "filler", "ab", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(piece_bytes))
    assert os.statvfs(disk).f_bavail == 0


def read_all(mount: Mounted, source: Path, names: Iterable[str]) -> None:
    for name in names:
        assert (mount.point / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("kind", ["files", "blocks"])
def test_room_can_be_made_on_a_disk_without_any(source: Path, tmp_path: Path, kind: str) -> None:
    """Evicting a record needs pages of its own; a capacity that is refused is not shown as if it were accepted."""
    small = {f"{number:04d}": 3_000 for number in range(100)}
    wanted = write_files(source, small if kind == "files" else {"large": 20 << 20})
    with small_disk(tmp_path / "disk", "160M") as disk:
        cache = disk / "cache"
        with mounted(source, tmp_path / "m", cache=cache, capacity="100MiB", ttl=0.05, allowed=FULL) as mount:
            read_all(mount, source, wanted)
            bytes_wanted = sum((source / name).stat().st_size for name in wanted)
            eventually(lambda: mount.stats()["used_bytes"] == bytes_wanted)
            eventually(lambda: (CacheLayout(cache).content / RESERVE_FILE).exists(), what="the reserve")
            fill(disk)
            # Of known names, which are asked for again.
            read_all(mount, source, wanted)
            assert mount.status()
            mount.change("capacity", "1MiB")
            assert "\ncapacity=1MiB" in mount.control("config").read_text()
            assert mount.metric("used_bytes") <= 1 << 20
            assert mount.metric("capacity_bytes") == 1 << 20
            mount.change("policy", "lru")
            (mount.control("evict")).write_text("/\n")
            assert mount.metric("used_bytes") == 0
            read_all(mount, source, wanted)
