"""Planned samples are pushed ahead in an immutable mount: by whom, and what is counted and is not."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from mounting import Mounted, Process, children, eventually, mounted, run_spiderfs
from planning import planned, pusher
from reading import cached_pages, lasting_source, write_files

from spiderfs.core.plans.schedule import UNPROVEN_SAMPLES
from spiderfs.protocol import Batch

FILES, SIZE, SMALL = 60, 300_000, 30_000
NAMES = [f"{number % 4}/{number:04d}" for number in range(FILES)]
assert FILES <= UNPROVEN_SAMPLES, "no one shows here that a plan is followed"

BATCH = Batch("train", 0, 0, np.arange(8, dtype=np.uint32), np.ones((8, 4), np.float16))
FORGETS_NAMES = pytest.mark.skipif(
    tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 16), reason="this kernel forgets no names"
)


source = lasting_source(dict.fromkeys(NAMES, SIZE))


def pushed(mount: Mounted, files: int = FILES) -> None:
    eventually(lambda: mount.metric("pushed") >= files, what="pushed files")


def in_memory(mount: Mounted) -> int:
    """The number of files of which the kernel has all pages; no one is asked for them."""
    count = 0
    for name in NAMES:
        with open(mount.point / name, "rb") as file:
            count += cached_pages(file.fileno()) == -(-SIZE // mmap.PAGESIZE)
    return count


def drop_pages(mount: Mounted) -> None:
    for name in NAMES:
        with open(mount.point / name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("workers", [1, 2])
def test_files_that_the_kernel_knows_come_without_a_read(source: Path, tmp_path: Path, workers: int) -> None:
    with mounted(source, tmp_path / "m", immutable="on", workers=workers, source__latency_ms=5) as mount:
        for name in NAMES:
            assert (mount.point / name).stat().st_size == SIZE
        with planned(mount, NAMES):
            pushed(mount)
            eventually(lambda: in_memory(mount) == FILES, what="files in memory")
        for name in NAMES:
            assert (mount.point / name).read_bytes() == (source / name).read_bytes()
        metrics = mount.stats()["metrics"]
        assert (metrics["opens"], metrics["prefetched"], metrics["origin_reads"]) == (0, FILES, FILES)
        # A few may be pushed, each by three READs: more at a time than may be fetched.
        assert metrics["reads"] < FILES
        # They are in the store, too.
        drop_pages(mount)
        mount.change("source.hang", 1)
        for name in NAMES:
            assert (mount.point / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("workers", [1, 2])
def test_planned_files_are_in_memory_before_anybody_opens_them(source: Path, tmp_path: Path, workers: int) -> None:
    with mounted(source, tmp_path / "m", immutable="on", workers=workers, source__latency_ms=5) as mount:
        with planned(mount, NAMES):
            pushed(mount)
            (job,) = mount.stats()["jobs"]
            assert (job["samples"], job["origin_bytes"]) == (0, FILES * SIZE)
        for name in NAMES:
            assert (mount.point / name).read_bytes() == (source / name).read_bytes()
        metrics = mount.stats()["metrics"]
        assert (metrics["prefetched"], metrics["origin_bytes"]) == (FILES, FILES * SIZE)
        # The kernel had all of it.
        assert (metrics["opens"], metrics["opens_hit"], metrics["stall_microseconds"]) == (0, 0, 0)
        assert metrics["pushed"] == FILES


def test_what_is_in_the_store_alone_is_pushed_too(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", immutable="on") as mount:
        with planned(mount, NAMES):
            pushed(mount)
        eventually(lambda: mount.stats()["sections"]["landing"]["entries"] == 0)
        drop_pages(mount)
        with planned(mount, NAMES):
            pushed(mount, 2 * FILES)
        metrics = mount.stats()["metrics"]
        assert (metrics["prefetched"], metrics["origin_reads"], metrics["opens"]) == (FILES, FILES, 0)


def test_the_process_that_pushes_holds_nothing_of_the_daemons(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", immutable="on") as mount:
        assert len(children(mount.manager())) == 1, "it is made when it is needed"
        with planned(mount, NAMES):
            pid = pusher(mount)
            pushed(mount)
            held = {os.readlink(f"/proc/{pid}/fd/{fd}").split(":")[0] for fd in os.listdir(f"/proc/{pid}/fd")}
            assert held == {"socket", "/dev/null"}
            mapped = Path(f"/proc/{pid}/maps").read_text()
            assert "/dev/fuse" not in mapped
            assert os.fspath(tmp_path) not in mapped
            assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
        process = Process(pid)
        assert run_spiderfs("umount", mount.point).returncode == 0
        assert process.ended(30)


@FORGETS_NAMES
@pytest.mark.parametrize("workers", [1, 2])
def test_names_are_forgotten_before_pushes_for_who_will_get_substitutes(tmp_path: Path, workers: int) -> None:
    source = tmp_path / "source"
    # Each of them is one READ, so that nothing is fetched by two workers.
    write_files(source, dict.fromkeys(NAMES, SMALL))
    with mounted(source, tmp_path / "m", immutable="on", workers=workers, capacity=10 * SMALL) as mount:
        for name in NAMES:
            assert (mount.point / name).stat().st_size == SMALL, "the kernel trusts all names"
        with planned(mount, NAMES, sends_batches=True) as tell:
            pushed(mount)
            tell(BATCH)
            eventually(lambda: mount.stats()["trainers"][0]["batches"] == 1)
            lookups = mount.metric("lookups")
            for name in NAMES:
                assert (mount.point / name).read_bytes() == (source / name).read_bytes()
            assert mount.metric("lookups") - lookups >= FILES, "each could have had a substitute"
        metrics = mount.stats()["metrics"]
        assert metrics["pushed"] == FILES
        # Of two workers one has the kernel forget names after the other: what is pushed in between may be lost.
        assert max(metrics["opens"], metrics["origin_reads"] - FILES) <= (FILES // 10 if workers == 2 else 0)


@FORGETS_NAMES
@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_pushed_outlives_a_worker(source: Path, tmp_path: Path, workers: int) -> None:
    with mounted(source, tmp_path / "m", immutable="on", workers=workers) as mount:
        mount.expect(r"worker 0 ended \(signal 9\)")
        with planned(mount, NAMES, sends_batches=True):
            pushed(mount)
            os.kill(mount.workers()[0], signal.SIGKILL)
            eventually(lambda: mount.metric("worker_restarts") == 1 and len(mount.workers()) == workers)
            lookups = mount.metric("lookups")
            for name in NAMES:
                assert (mount.point / name).read_bytes() == (source / name).read_bytes()
            assert mount.metric("lookups") - lookups >= FILES, "the new worker knows too that names are to be asked for"
        metrics = mount.stats()["metrics"]
        assert metrics["pushed"] == FILES
        # Of two workers one has the kernel forget names after the other: what is pushed in between may be lost.
        assert max(metrics["opens"], metrics["origin_reads"] - FILES) <= (FILES // 10 if workers == 2 else 0)


@FORGETS_NAMES
@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_forgotten_for_substitutes_is_pushed_again(source: Path, tmp_path: Path, workers: int) -> None:
    with mounted(source, tmp_path / "m", immutable="on", workers=workers) as mount:
        with planned(mount, NAMES) as tell:
            pushed(mount)
            reads = mount.metric("reads")
            # It did not say that it would send batches. From the first on it may be given substitutes all the same, and
            # the kernel is to ask for each name.
            tell(BATCH)
            # A batch is scored when every worker has made the kernel forget. Each of two does, one after the other, so
            # what is pushed in between is lost again; and what is on its way then is not counted as pushed.
            eventually(lambda: "rows per second" in mount.control("graph").read_text(), what="scores")
            eventually(lambda: mount.metric("reads") >= 2 * reads, what="the same READs once more")
            if workers == 1:
                pushed(mount, 2 * FILES)
                # What was on its way while the kernel forgot may count as pushed again and be forgotten after all: its
                # reader gets it from the store.
                there = eventually(lambda: in_memory(mount) >= 0.9 * FILES and in_memory(mount), what="most pages")
            for name in NAMES:
                assert (mount.point / name).read_bytes() == (source / name).read_bytes()
            if workers == 1:
                assert mount.metric("opens") <= 2 * (FILES - there)
        metrics = mount.stats()["metrics"]
        assert (metrics["prefetched"], metrics["origin_reads"]) == (FILES, FILES)
