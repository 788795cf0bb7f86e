"""A mount whose processes keep dying ends, and names the log with the reason."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mounting import PATIENCE_S, detach, eventually, mounted, mounts_at
from reading import readers, together, write_files

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


@pytest.fixture
def spiderfs_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let `mounted` use a program `spiderfs` that first runs the given code."""

    def begin(what: str) -> None:
        program = tmp_path / "spiderfs"
        program.write_text(f"#!{sys.executable}\nfrom spiderfs.cli.main import main\n{what}\nmain()\n")
        program.chmod(0o755)
        monkeypatch.setattr("mounting.SPIDERFS", program)

    return begin


@pytest.mark.both_bindings
def test_a_mount_whose_processes_keep_dying_ends_and_logs_it(
    tmp_path: Path, spiderfs_after: Callable[[str], None]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    # The pauses between the deaths take a minute together.
    spiderfs_after("from spiderfs.daemon import restarts; restarts.LONGEST_PAUSE_S = restarts.FIRST_PAUSE_S")
    with mounted(source, tmp_path / "m", allowed=(r".* ended \(signal 9\)", "giving up, the log .* says why")) as mount:
        for deaths in range(1, 21):
            worker = mount.workers()[0]
            os.kill(worker, signal.SIGKILL)
            if deaths < 20:
                eventually(lambda worker=worker: mount.workers() != [worker], what="another worker")
        assert mount.supervisor.ended(PATIENCE_S)
        assert mount.logged("giving up")
        # A reader must not take the empty directory below the mount for an empty data set.
        for look in (os.listdir, os.statvfs):
            with pytest.raises(OSError) as caught:  # noqa: PT011
                look(mount.point)
            assert caught.value.errno == errno.ENOTCONN
        detach(mount.point)


CGROUPS = Path("/sys/fs/cgroup")
MEMORY_BYTES = 150 << 20


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group (cgroups(7)) that may use MEMORY_BYTES."""
    first = CGROUPS / "memory" / "memory.limit_in_bytes"
    parent, limit = (CGROUPS / "memory", "memory.limit_in_bytes") if first.exists() else (CGROUPS, "memory.max")
    group = parent / f"spiderfs-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as exc:
        pytest.skip(f"no control group can be made: {exc}")
    try:
        try:
            (group / limit).write_text(str(MEMORY_BYTES))
        except OSError as exc:
            pytest.skip(f"control groups do not limit memory here: {exc}")
        yield group
    finally:

        def removed() -> bool:
            with contextlib.suppress(OSError):
                group.rmdir()
            return not group.exists()

        eventually(removed, what="the end of the control group")


def test_a_mount_with_too_little_memory_goes_on(
    tmp_path: Path, little_memory: Path, spiderfs_after: Callable[[str], None]
) -> None:
    """A new worker that got all requests of the one that ran out of memory would die too, and so would the mount."""
    (tmp_path / "source").mkdir()
    wanted = write_files(tmp_path / "source", {f"{number:02d}": 7 << 20 for number in range(16)})
    spiderfs_after(f"import os; open('{little_memory}/cgroup.procs', 'w').write(str(os.getpid()))")
    deaths = (
        "worker 0 ended",
        "the manager ended",
        "the process ends",
        "has not begun",
        "Traceback",
        "Error",
        "Exception",
    )
    with mounted(tmp_path / "source", tmp_path / "m", allowed=deaths) as mount:
        with contextlib.ExitStack() as all_at_once:
            each = [readers(1, mount.point, {name: digest}, rounds=1) for name, digest in wanted.items()]
            seen = together([reader for some in each for reader in all_at_once.enter_context(some)], 150)
        assert (seen.wrong, seen.errors, seen.reads) == ([], [], len(wanted))
        assert mount.metric("worker_restarts") > 0


def test_a_process_that_does_not_begin_is_started_again(tmp_path: Path, spiderfs_after: Callable[[str], None]) -> None:
    """Such a process waits, for example, for a lock of the store whose holder died without releasing it."""
    source, hang = tmp_path / "source", tmp_path / "hang"
    source.mkdir()
    wanted = write_files(source, {"one": 5_000})
    spiderfs_after(
        f"""
import os, time
from spiderfs.daemon import supervisor

supervisor.START_S = 1.0
work = supervisor.work

def hanging_once(*arguments):
    if os.path.exists({str(hang)!r}):
        os.unlink({str(hang)!r})
        time.sleep(3600)
    return work(*arguments)

supervisor.work = hanging_once
"""
    )
    with mounted(source, tmp_path / "m", allowed=(r"worker 0 ended \(signal 9\)", "has not begun")) as mount:
        hang.touch()
        os.kill(mount.workers()[0], signal.SIGKILL)
        with readers(1, mount.point, wanted, rounds=1) as reader:
            seen = together(reader)
        assert (seen.wrong, seen.errors, seen.reads) == ([], [], 1)
        assert not hang.exists()
        assert mount.logged("a process has not begun within 1 s: all are started again")
