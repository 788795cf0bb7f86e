"""A mount whose processes keep dying ends, and names the log with the reason."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from control_group import limited_memory, program_in
from mounting import PATIENCE_S, detach, eventually, mounted, mounts_at
from pauses import SHORT_PAUSES
from reading import digest, error_of, read_through, readers, together, write_files

SPIDERFS = Path(sys.executable).with_name("spiderfs")
# Less than LMDB's map, so that no process can open the store.
ADDRESS_SPACE_BYTES = 1 << 41


def limit_address_space() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))


def test_a_mount_that_cannot_begin_fails_and_names_its_log(tmp_path: Path) -> None:
    source, point, log = tmp_path / "source", tmp_path / "mnt", tmp_path / "log"
    source.mkdir()
    point.mkdir()
    done = subprocess.run(
        [SPIDERFS, "mount", source, point, "-o", f"cache_dir={tmp_path}/cache,log_file={log}"],
        preexec_fn=limit_address_space,
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"the log {log} says why" in done.stderr
    assert "Cannot allocate memory" in log.read_text()
    eventually(lambda: mounts_at(point) == 0, what="the mount to be gone")


def test_a_mount_whose_workers_die_at_once_ends_and_its_readers_get_an_error(tmp_path: Path) -> None:
    source, dying = tmp_path / "source", tmp_path / "dying"
    source.mkdir()
    wanted = write_files(source, {"one": 5_000})
    first = f"""{SHORT_PAUSES}
import os
from spiderfs.daemon import supervisor

work = supervisor.work

def dying(*arguments):
    if os.path.exists({str(dying)!r}):
        os._exit(3)
    return work(*arguments)

supervisor.work = dying
"""
    allowed = (r"worker 0 ended \((signal 9|exit 3)\)", "20 workers in a row died.* giving up, the log .* says why")
    with mounted(source, tmp_path / "m", allowed=allowed, first=first) as mount:
        dying.touch()
        os.kill(mount.workers()[0], signal.SIGKILL)
        with readers(1, mount.point, wanted, rounds=1) as reader:
            seen = together(reader)
        assert [kind for _, kind, _ in seen.errors] in (["ENOTCONN"], ["ECONNABORTED"])
        assert mount.supervisor.ended(PATIENCE_S)
        # A reader must not take the empty directory below the mount for an empty data set.
        for look in (os.listdir, os.statvfs):
            assert error_of(look, mount.point) == errno.ENOTCONN
        assert len(mount.logged("worker 0 ended")) == 20
        assert len(mount.logged("worker 0 starts again in .* s ")) == 19
        detach(mount.point)


def test_deaths_without_number_end_no_mount_that_answers_between_them(source: Path, tmp_path: Path) -> None:
    wanted = write_files(source, {f"{number}": 20_000 + number for number in range(8)})
    allowed = (r"worker 0 ended \(signal 9\)", r"the manager ended \(signal 9\)")
    # Only what they have answered is progress here, and not how long they have lived.
    first = f"{SHORT_PAUSES}restarts.LIVED_S = 3600.0\n"
    with mounted(source, tmp_path / "m", allowed=allowed, ttl=0.01, first=first) as mount:
        with readers(2, mount.point, wanted) as some:
            for death in range(1, 25):
                os.kill(mount.workers()[0], signal.SIGKILL)
                assert digest((mount.point / f"{death % 8}").read_bytes()) == wanted[f"{death % 8}"]
                if death % 6 == 0:
                    os.kill(mount.manager(), signal.SIGKILL)
            seen = together(some)
        assert (seen.wrong, seen.errors) == ([], [])
        assert mount.metric("worker_restarts") == 24
        assert mount.metric("manager_restarts") == 4
        assert mount.metric("deadly_requests") == 0
        assert "4 manager restarts, 24 worker restarts" in mount.status()
        assert mount.logged(r"worker 0 starts again in 0\.05 s \(worker_restarts: 24\)")


@pytest.mark.both_bindings
@pytest.mark.opened_and_immutable
@pytest.mark.parametrize(("workers", "after_s"), [(1, 0.0), (2, 0.1)])
def test_a_request_at_which_each_worker_dies_is_answered_with_an_error(
    binding: str, source: Path, tmp_path: Path, workers: int, after_s: float
) -> None:
    """The others, some of which wait for the source when the worker dies, get their bytes."""
    wanted = write_files(source, {f"{number}": 20_000 + number for number in range(8)} | {"deadly": 20_000})
    del wanted["deadly"]
    request, method = (
        ("READ", "ImmutableFilesystem.read_immutable") if binding == "immutable" else ("OPEN", "Filesystem.open")
    )
    first = f"""{SHORT_PAUSES}
import os
import trio
from spiderfs.vfs.filesystem import Filesystem
from spiderfs.vfs.immutable_filesystem import ImmutableFilesystem

make_local = {method}

async def deadly(self, inode, *more):
    if self._catalogue.path_of(inode) == b"deadly":
        await trio.sleep({after_s})
        os.kill(os.getpid(), 9)
    return await make_local(self, inode, *more)

{method} = deadly
"""
    allowed = (r"worker \d ended \(signal 9\)", f"{request} of inode .*: 10 workers have died at this request")
    options = {"ttl": 0.01, "capacity": "64KiB", "policy": "lru", "source__latency_ms": 20}
    with mounted(source, tmp_path / "m", workers=workers, allowed=allowed, first=first, **options) as mount:
        with readers(4, mount.point, wanted) as some:
            assert error_of((mount.point / "deadly").read_bytes) == errno.EIO
            seen = together(some)
        assert (seen.wrong, seen.errors) == ([], [])
        # After a READ that has failed, the kernel asks for the first page alone, and that is another deadly request.
        deadly = 2 if binding == "immutable" else 1
        assert mount.metric("deadly_requests") == deadly
        # The first worker got the request before anybody had died.
        assert 10 * deadly <= mount.metric("worker_restarts") <= 11 * deadly
        inode = os.stat(mount.point / "deadly").st_ino
        assert mount.logged(f"{request} of inode {inode}: 10 workers have died at this request")


MEMORY_BYTES = 118 << 20


@pytest.mark.thorough
def test_a_mount_with_too_little_memory_goes_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new worker that got all requests of the one that ran out of memory would die too, and so would the mount."""
    wanted = write_files(source, {f"{number:02d}": 7 << 20 for number in range(16)})
    deaths = (
        "worker 0 ended",
        "the manager ended",
        "the process ends",
        "has not begun",
        "Traceback",
        "Error",
        "Exception",
    )
    with limited_memory(MEMORY_BYTES) as group:
        monkeypatch.setattr("mounting.SPIDERFS", program_in(group, tmp_path / "spiderfs"))
        with mounted(source, tmp_path / "m", allowed=deaths) as mount:
            with contextlib.ExitStack() as all_at_once:
                each = [readers(1, mount.point, {name: digest}, rounds=1) for name, digest in wanted.items()]
                seen = together([reader for some in each for reader in all_at_once.enter_context(some)], 150)
            assert (seen.wrong, seen.errors, seen.reads) == ([], [], len(wanted))
            assert mount.metric("worker_restarts") > 0


def test_a_process_that_does_not_begin_is_started_again(tmp_path: Path) -> None:
    """Such a process waits, for example, for a lock of the store whose holder died without releasing it."""
    source, hang = tmp_path / "source", tmp_path / "hang"
    source.mkdir()
    wanted = write_files(source, {"one": 5_000})
    first = f"""
import os, time
from spiderfs.daemon import supervisor

supervisor.START_S = 4.0
work = supervisor.work

def hanging_once(*arguments):
    if os.path.exists({str(hang)!r}):
        os.unlink({str(hang)!r})
        time.sleep(3600)
    return work(*arguments)

supervisor.work = hanging_once
"""
    allowed = (r"worker 0 ended \(signal 9\)", "has not begun")
    with mounted(source, tmp_path / "m", allowed=allowed, first=first) as mount:
        hang.touch()
        os.kill(mount.workers()[0], signal.SIGKILL)
        read_through(mount.point, wanted)
        assert not hang.exists()
        assert mount.logged("a process has not begun within 4 s: all are started again")
