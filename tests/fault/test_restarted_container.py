"""A mount in a mount namespace of its own, as a container has, whose processes are all killed: the next one takes over.

The mount point lies in a directory that both namespaces share, as with `rshared` volumes and Bidirectional ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mounting
import pytest
from mounting import eventually, mounts_at
from reading import write_files

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mount namespaces")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "shared"
    (directory / "data").mkdir(parents=True)
    subprocess.run(["mount", "--bind", directory, directory], check=True)
    subprocess.run(["mount", "--make-shared", directory], check=True)
    yield directory
    subprocess.run(["umount", "--recursive", "--lazy", directory], check=True)


@contextlib.contextmanager
def container(source: Path, point: Path, cache: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The mount in the foreground, in a session and a mount namespace of its own."""
    command = ["unshare", "--mount", "--propagation", "unchanged", "--", mounting.SPIDERFS, "mount", "--foreground"]
    options = f"immutable,allow_other,cache_dir={cache},log_file={log}"
    process = subprocess.Popen([*command, source, point, "-o", options], start_new_session=True, stderr=sys.stderr)
    try:
        yield process
    finally:
        kill(process.pid)
        process.wait(30)


def kill(session: int) -> None:
    """Kill all processes of a session, as the end of a container does."""
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(entry)) == session:
                os.kill(int(entry), signal.SIGKILL)


def test_the_next_container_takes_over_under_a_running_reader(tmp_path: Path, shared: Path) -> None:
    source, point = tmp_path / "source", shared / "data"
    write_files(source, {"a": 1000})

    def answers() -> bool:
        # A file may still be read after the end, as long as the kernel has it in memory.
        with contextlib.suppress(OSError):
            return (point / ".spiderfs/stats.json").read_bytes() != b""
        return False

    with container(source, point, tmp_path / "cache", tmp_path / "log"):
        eventually(answers)
    eventually(lambda: not answers(), what="the end of the mount")
    with container(source, point, tmp_path / "cache", tmp_path / "log") as second:
        eventually(answers)
        assert (point / "a").read_bytes() == (source / "a").read_bytes()
        assert mounts_at(point) == 1
        second.terminate()
        assert second.wait(30) == 0
        assert mounts_at(point) == 0
