"""While samples are pushed ahead and the source hangs, no one else does, whoever is killed and however it ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mounting import Mounted, descendants, detach, eventually, mounted, mounts_at, run_spiderfs, threads_of
from planning import planned, pusher
from programs import program
from reading import digest, readers, together, write_files

from benchmarks.common.sources import make_older
from spiderfs.core.plans.schedule import UNPROVEN_SAMPLES

CACHED = [f"cached/{number:03d}" for number in range(40)]
HANGING = [f"hanging/{number:03d}" for number in range(UNPROVEN_SAMPLES)]
SIZE = 300_000
# A new manager need not ask the source which files there are.
OPTIONS: dict[str, Any] = {"immutable": "on", "dir_ttl": "1h"}
# A call that waits for nothing takes milliseconds; two busy cores, and a process that was killed, add seconds.
QUICK_S = 25.0
STRESS_S = 3.0
KILLED = ("ended", "starts again", "ended: another one starts", "removed a mount that a crash had left")
_UMOUNT2 = "import ctypes, os, sys; sys.exit(ctypes.CDLL(None).umount2(os.fsencode(sys.argv[1]), 8))"
# After the unmount, workers serve open handles for so long: by default 5 s.
DRAINING_SOON = "from spiderfs.daemon import supervisor; supervisor.DRAIN_S = 0.5"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    write_files(source, dict.fromkeys([*CACHED, *HANGING], SIZE))
    for directory in (source, *source.iterdir()):
        # What a directory holds is trusted once it has settled.
        make_older(directory)
    return source


def all_under_way(ahead: dict[str, int]) -> bool:
    return ahead["under_way"] == ahead["limit"]


@contextlib.contextmanager
def pushing(mount: Mounted) -> Iterator[None]:
    """Have all pushes that there may be wait for a source that hangs; some files are cached."""
    assert len(list(mount.point.glob("*/*"))) == len(CACHED) + len(HANGING), "their names are known"
    for name in CACHED:
        (mount.point / name).read_bytes()
    with planned(mount, HANGING, lambda: mount.change("source.hang", 1)):
        pusher(mount)
        eventually(lambda: all_under_way(mount.stats()["fetches_ahead"]), what="pushes under way")
        yield


def alive(pids: list[int]) -> list[int]:
    """Those whose threads have not all ended."""
    return [pid for pid in pids if any(threads_of(pid))]


@pytest.mark.parametrize("workers", [1, 2])
def test_readers_of_cached_files_go_on_whoever_is_killed(source: Path, tmp_path: Path, workers: int) -> None:
    wanted = {name: digest((source / name).read_bytes()) for name in CACHED}
    chance = random.Random(workers)
    options = {**OPTIONS, "workers": workers, "allowed": KILLED}
    with mounted(source, tmp_path / "m", **options) as mount, pushing(mount):
        with readers(2, mount.point, wanted) as reading:
            until = time.monotonic() + STRESS_S
            while time.monotonic() < until:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice([pusher(mount), *mount.workers()]), signal.SIGKILL)
                time.sleep(0.3)
            # A trainer that comes to the next manager would wait for the source, so this is the last one to be killed.
            manager = mount.manager()
            os.kill(manager, signal.SIGKILL)
            eventually(lambda: mount.manager() != manager)
            assert mount.metric("manager_restarts") == 1
            seen = together(reading)
        assert (seen.wrong, seen.errors) == ([], [])
        assert seen.reads > 100
        assert seen.longest_s < QUICK_S
        mount.change("source.hang", 0)
        for name in HANGING:
            assert (mount.point / name).read_bytes() == (source / name).read_bytes()


def test_a_stopped_pusher_is_replaced_and_one_that_waits_for_the_source_is_not(source: Path, tmp_path: Path) -> None:
    soon = "from spiderfs.daemon.caching import push_ahead; push_ahead.ASK_S = push_ahead._LOST_S = 0.5"
    options = {**OPTIONS, "source.timeout_s": 0.5, "first": soon, "allowed": ["does nothing"]}
    with mounted(source, tmp_path / "m", **options) as mount:
        assert len(list(mount.point.glob("*/*"))) == len(CACHED) + len(HANGING), "their names are known"
        with planned(mount, HANGING, lambda: mount.change("source.hang", 1)):
            first = pusher(mount)
            # Several times as long as it may owe an answer.
            time.sleep(2)
            assert (pusher(mount), mount.logged("does nothing")) == (first, [])
            os.kill(first, signal.SIGSTOP)
            eventually(lambda: pusher(mount) != first, what="another pusher")
            assert len(mount.logged("does nothing")) == 1


_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may call umount2")


@pytest.mark.parametrize(
    "how",
    [pytest.param("umount2", marks=_ROOT), "spiderfs umount", pytest.param("SIGTERM", marks=pytest.mark.thorough)],
)
def test_the_mount_ends_while_pushes_wait(source: Path, tmp_path: Path, how: str) -> None:
    with mounted(source, tmp_path / "m", **OPTIONS, first=DRAINING_SOON) as mount, pushing(mount):
        pids = descendants(mount.supervisor.pid)
        assert pusher(mount) in pids
        begin = time.monotonic()
        if how == "umount2":
            # umount(8) would ask how large the source is, which hangs.
            subprocess.run([sys.executable, "-c", _UMOUNT2, mount.point], check=True, timeout=QUICK_S)
        elif how == "spiderfs umount":
            assert run_spiderfs("umount", mount.point).returncode == 0
        else:
            mount.supervisor.signal(signal.SIGTERM)
        assert mount.supervisor.ended(QUICK_S)
        assert time.monotonic() - begin < QUICK_S
        assert mounts_at(mount.point) == 0
        eventually(lambda: not alive(pids), QUICK_S, "the end of all processes")


def test_a_killed_supervisor_leaves_no_process(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", **OPTIONS, allowed=KILLED) as mount, pushing(mount):
        pids = descendants(mount.supervisor.pid)
        read = "import os, sys; os.read(os.open(sys.argv[1], os.O_RDONLY), 1)"
        with program(sys.executable, "-c", read, mount.point / HANGING[-1], stderr=subprocess.DEVNULL) as one:
            time.sleep(0.2)
            mount.supervisor.signal(signal.SIGKILL)
            assert one.wait(QUICK_S) != 0
        eventually(lambda: not alive(pids), QUICK_S, "the end of all processes")
        detach(mount.point)
