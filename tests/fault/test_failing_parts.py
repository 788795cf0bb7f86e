"""Trouble while parts of a large file are coming: readers get the source's bytes or an error, and nothing is left."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mounting import Mounted, as_root, eventually, mounted
from test_damaged_store import FULL, small_disk
from test_failing_source import SLACK_S, TROUBLES

from benchmarks.common.sources import patterned, write_patterned
from spiderfs.shared.layout import BLOCKS_DIRECTORY, CacheLayout

SIZE, PIECE = (96 << 20) + 4099, 1 << 20
# A large file that is not cached after the disk was full is tried again soon.
SOON = "from spiderfs.vfs import fetcher; fetcher.FULL_PAUSE_S = 0.2"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    write_patterned(tmp_path / "source/large", SIZE)
    return tmp_path / "source"


def read(mount: Mounted, in_the_middle: Callable[[], object] = lambda: None) -> None:
    """Read all of it, and compare; call `in_the_middle` in the middle of the file."""
    with open(mount.point / "large", "rb", buffering=0) as file:
        for at in range(0, SIZE, PIECE):
            wanted, found = patterned(at, min(at + PIECE, SIZE)), b""
            # Of a piece whose end fails, its begin comes first, and then the error.
            while len(found) < len(wanted) and (more := file.read(PIECE - len(found))):
                found += more
            assert found == wanted
            if at == SIZE // 2 // PIECE * PIECE:
                in_the_middle()


def can_read(mount: Mounted, in_the_middle: Callable[[], object] = lambda: None) -> bool:
    try:
        read(mount, in_the_middle=in_the_middle)
    except OSError as exc:
        assert exc.errno in (errno.EIO, errno.ETIMEDOUT)  # noqa: PT017
        return False
    return True


def is_cached(mount: Mounted) -> bool:
    before = mount.metric("origin_bytes")
    # The kernel keeps no pages of a file that is opened again after it was not cached.
    read(mount)
    return mount.metric("origin_bytes") == before


def takes_what_it_counts(mount: Mounted) -> bool:
    """Whether the blocks on the disk are those that the cache has."""
    directory = CacheLayout(mount.cache).content / BLOCKS_DIRECTORY
    on_disk = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    return bool(on_disk <= mount.stats()["used_bytes"] + 8192)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_becomes_full_costs_the_cache_and_no_read(source: Path, tmp_path: Path, workers: int) -> None:
    options = {"workers": workers, "capacity": "400MiB", "source__latency_ms": 5, "allowed": FULL}
    with (
        small_disk(tmp_path / "disk", "80M") as place,
        mounted(source, tmp_path / "m", cache=place / "cache", first=SOON, **options) as mount,  # type: ignore[arg-type]
    ):
        read(mount)
        assert mount.metric("store_failures") > 0
        eventually(lambda: takes_what_it_counts(mount), what="that nothing is left")
        as_root("mount", "-o", "remount,size=256M", place)
        eventually(lambda: is_cached(mount), what="all of it in the cache")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_hangs_within_a_part_costs_one_limit(source: Path, tmp_path: Path, workers: int) -> None:
    options = {"workers": workers, "capacity": "400MiB", "source__latency_ms": 5, "source__timeout_s": 1}
    with mounted(source, tmp_path / "m", allowed=TROUBLES, **options) as mount:  # type: ignore[arg-type]
        waited_since = time.monotonic()

        def hang() -> None:
            nonlocal waited_since
            mount.change("source.hang", "on")
            waited_since = time.monotonic()

        assert not can_read(mount, in_the_middle=hang)
        assert time.monotonic() - waited_since < 2 * 1 + SLACK_S
        mount.change("source.hang", "off")
        # What was just asked in vain is not asked again within a second.
        eventually(lambda: can_read(mount), what="the source's bytes")
        eventually(lambda: takes_what_it_counts(mount), what="that nothing is left")


def test_a_line_that_becomes_slow_costs_no_read(source: Path, tmp_path: Path) -> None:
    """What is on its way then takes longer than the time limit, and each block of it less."""
    options = {"source__latency_ms": 40, "source__bandwidth": "200MiB", "source__timeout_s": 3}
    with mounted(source, tmp_path / "m", capacity="1200MiB", **options) as mount:  # type: ignore[arg-type]
        read(mount, in_the_middle=lambda: mount.change("source.bandwidth", "5MiB"))
        assert mount.metric("source_timeouts") == 0
        assert mount.metric("origin_bytes") == SIZE
