"""Large files that are read in order: they come in parts."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mounting import children, eventually, mounted

from benchmarks.common.sources import make_older, patterned, write_patterned

SIZE = (96 << 20) + 4099
PIECE = 1 << 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    write_patterned(tmp_path / "source" / "large", SIZE)
    return tmp_path / "source"


def read(path: Path, until: int = SIZE, in_the_middle: Callable[[], object] = lambda: None) -> None:
    """Read from the beginning on, and compare; call `in_the_middle` after a quarter."""
    with open(path, "rb", buffering=0) as file:
        for at in range(0, until, PIECE):
            assert file.read(min(PIECE, until - at)) == patterned(at, min(at + PIECE, until))
            if at == SIZE // 4 // PIECE * PIECE:
                in_the_middle()


@pytest.mark.parametrize("immutable", ["off", "on"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_bytes_are_the_source_s_and_come_once(source: Path, tmp_path: Path, workers: int, immutable: str) -> None:
    options = {"capacity": "400MiB", "workers": workers, "immutable": immutable, "source__latency_ms": 300}
    with mounted(source, tmp_path / "m", **options) as mount:
        # Parts grow while their reader has to wait: while it reads more than a window of 8 blocks in the latency. With
        # 20 ms that was too much on two busy cores.
        read(mount.point / "large")
        metrics = mount.stats()["metrics"]
        assert metrics["origin_bytes"] == SIZE
        # Blocks alone would be 97 requests.
        assert metrics["origin_reads"] < 90


@pytest.mark.parametrize("workers", [1, 2])
def test_files_of_all_lengths_are_read_side_by_side(source: Path, tmp_path: Path, workers: int) -> None:
    sizes = {"large": SIZE, "another": (40 << 20) + 1, "short": (2 << 20) + 5, "a block": 1 << 20}
    for name in sizes:
        write_patterned(source / name, sizes[name])
    options = {"capacity": "400MiB", "workers": workers, "sample_max_bytes": "64KiB", "source__latency_ms": 5}
    with mounted(source, tmp_path / "m", **options) as mount, ThreadPoolExecutor(4) as threads:
        list(threads.map(read, [mount.point / name for name in sizes], sizes.values()))
        assert mount.metric("origin_bytes") == sum(sizes.values())
        eventually(lambda: mount.stats()["used_bytes"] == sum(sizes.values()))


def test_a_reader_that_stops_wastes_64_mebibytes_at_most(tmp_path: Path) -> None:
    source, size = tmp_path / "source", 200 << 20
    source.mkdir()
    write_patterned(source / "large", size)
    with mounted(source, tmp_path / "m", capacity="4GiB", source__latency_ms=50) as mount:
        read(mount.point / "large", until=80 << 20)
        # All that was asked for has come once all of it is in the cache.
        eventually(lambda: mount.stats()["used_bytes"] == mount.metric("origin_bytes"))
        assert mount.metric("origin_bytes") - (80 << 20) <= 64 << 20


def test_a_killed_reading_process_costs_no_bytes(source: Path, tmp_path: Path) -> None:
    allowed = (r"worker 0 ended \(exit 1\)", "the process ends")
    with mounted(source, tmp_path / "m", capacity="400MiB", source__latency_ms=20, allowed=allowed) as mount:

        def kill() -> None:
            ((reading,),) = (children(worker) for worker in mount.workers())
            os.kill(reading, signal.SIGKILL)

        read(mount.point / "large", in_the_middle=kill)
        assert mount.metric("worker_restarts") == 1


def test_a_file_that_is_replaced_meanwhile_gives_no_bytes_of_the_new_one(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", capacity="400MiB", workers=2, source__latency_ms=20) as mount:

        def replace() -> None:
            (tmp_path / "new").write_bytes(bytes(SIZE))
            make_older(tmp_path / "new", 7200.0)
            os.rename(tmp_path / "new", source / "large")

        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            read(mount.point / "large", in_the_middle=replace)
