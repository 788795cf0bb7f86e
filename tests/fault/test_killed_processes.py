"""Processes of a mount that die: readers must not notice the death of a worker or the manager, and never hang."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from mounting import PATIENCE_S, Mounted, eventually, is_running, mounted, mounts_at, run_spiderfs
from pauses import SHORT_PAUSES
from reading import error_of, read_through, readers, together, write_files

pytestmark = pytest.mark.opened_and_immutable

FILES = 60
# Small files, a file as long as the kernel's largest READ, and a file that is read in blocks.
SIZES = {f"dir{number % 3}/{number}": 3_000 + number * 997 for number in range(FILES)} | {
    "large": (2 << 20) + 17,
    "medium": 1 << 20,
}
# What is longer is read in blocks. By default that is 8 MiB, of which readers would do little else than read.
LIMIT: dict[str, object] = {"sample_max_bytes": "1MiB"}
# A read waits for a new worker (fork and start: 0.1 s idle, 1 s on two busy cores) some times over, when it is killed
# again before it has answered. Beyond this it is a hang.
LONGEST_READ_S = 45.0
# The seconds that the kernel, the source's thread and the readers themselves may add on two busy cores.
LONGEST_QUIET_READ_S = 15.0
CLEANED = "removed a mount that a crash had left"
RESTARTS = (r"worker \d+ ended \(signal 9\)", r"the manager ended \(signal 9\)")


@pytest.mark.both_bindings
@pytest.mark.parametrize(("workers", "latency_ms"), [(1, 0), (2, 0), (2, 10)])
def test_killed_workers_cost_no_reader_a_byte(source: Path, tmp_path: Path, workers: int, latency_ms: int) -> None:
    """With a slow source a killed worker always leaves requests behind; else it dies during or between them."""
    wanted = write_files(source, SIZES)
    random = Random(workers)
    kills = 10
    options = LIMIT | {"ttl": 0.05, "capacity": "3MiB", "policy": "lru", "source__latency_ms": latency_ms}
    with mounted(source, tmp_path / "m", workers=workers, allowed=RESTARTS, first=SHORT_PAUSES, **options) as mount:
        with readers(8, mount.point, wanted) as all_readers:
            for _ in range(kills):
                before = mount.metric("opens")
                victim = random.choice(mount.workers())
                os.kill(victim, signal.SIGKILL)
                # Until a worker has ended it could be chosen again, and killing it twice does nothing.
                eventually(lambda victim=victim: not is_running(victim), what="the worker's end")
                eventually(lambda before=before: mount.metric("opens") > before + 3, what="reads after the kill")
            seen = together(all_readers)
        assert seen.wrong == []
        assert seen.errors == []
        assert seen.reads > 8 * len(SIZES)
        assert seen.longest_s < LONGEST_READ_S
        assert mount.metric("worker_restarts") == kills
        assert mount.metric("resends") >= 1


@pytest.mark.both_bindings
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_supervisor_ends_reads_and_the_next_mount_works(source: Path, tmp_path: Path, workers: int) -> None:
    wanted = write_files(source, SIZES)
    cache = tmp_path / "cache"
    with mounted(source, tmp_path / "m", workers=workers, cache=cache, allowed=[CLEANED], **LIMIT) as mount:
        pids = [*mount.workers(), mount.manager()]
        with readers(4, mount.point, wanted) as all_readers:
            mount.supervisor.signal(signal.SIGKILL)
            # The readers' inputs stay open, so each reader must end by the error that it gets.
            for reader in all_readers:
                assert reader.process.wait(PATIENCE_S) == 0
            seen = together(all_readers)
        assert seen.wrong == []
        assert {kind for _, kind, _ in seen.errors} <= {"ENOTCONN", "ECONNABORTED", "EIO"}
        assert len(seen.errors) >= 4
        assert max(seconds for _, _, seconds in seen.errors) < LONGEST_READ_S
        eventually(lambda: not any(is_running(pid) for pid in pids), what="the end of all processes")
        assert mount.supervisor.ended(PATIENCE_S)
        assert error_of(os.statvfs, mount.point) == errno.ENOTCONN
        assert "its daemon is dead" in run_spiderfs("status").stdout
        with mounted(source, tmp_path / "m", workers=workers, cache=cache, allowed=[CLEANED], **LIMIT) as again:
            assert mounts_at(again.point) == 1
            read_through(again.point, wanted, 2, 1)


_VICTIM = """
import os, sys, threading
def read(path):
    while True:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.read()
for path in sys.argv[1:]:
    threading.Thread(target=read, args=[path]).start()
"""


# Several workers race for requests however many they are, and four do it more often than two.
@pytest.mark.both_bindings
@pytest.mark.parametrize("workers", [1, 4])
def test_no_worker_freezes_when_requests_vanish(source: Path, tmp_path: Path, workers: int) -> None:
    """Readers that are killed remove their requests from the queue between a worker's poll and its read(2)."""
    wanted = write_files(source, SIZES)
    paths = [name for name in wanted if name != "large"][:8]
    with mounted(source, tmp_path / "m", workers=workers, ttl=0.01, **LIMIT) as mount:
        pids = mount.workers()
        with readers(2, mount.point, wanted) as all_readers:
            for _ in range(15):
                victim = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _VICTIM, *(mount.point / name for name in paths)]
                )
                try:
                    before = mount.metric("reads")
                    eventually(lambda before=before: mount.metric("reads") > before + 20)
                finally:
                    victim.kill()
                    victim.wait()
            seen = together(all_readers)
        assert (seen.wrong, seen.errors) == ([], [])
        assert seen.longest_s < LONGEST_QUIET_READ_S
        assert mount.workers() == pids
        assert _all_workers_idle(mount)


def _all_workers_idle(mount: Mounted) -> bool:
    """Check that every worker sleeps in epoll; a worker frozen in read(2) of the FUSE descriptor would never wake."""
    for pid in mount.workers():
        eventually(
            lambda pid=pid: (
                "epoll" in Path(f"/proc/{pid}/wchan").read_text()
                or Path(f"/proc/{pid}/syscall").read_text().split()[0] == "232"
            ),
            what=f"worker {pid} in epoll",
        )
    return True
