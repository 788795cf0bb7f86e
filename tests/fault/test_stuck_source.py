"""Threads that wait in the kernel for the source, so that not even SIGKILL ends them: no one waits for such threads.

The source is a spiderfs mount itself, whose own source hangs: what a FUSE daemon has taken and not answered, the kernel
waits for whatever happens to the asker (request_wait_answer in fs/fuse/dev.c), as on a hard NFS mount of old.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import Mounted, children, eventually, mounted, options_text, run_spiderfs, unmount
from reading import error_within, readers, together, write_files

from spiderfs.options.paths import check_source_answers

TIMEOUT_S = 0.5
# What two busy cores may add, and the second after which the supervisor looks for children that ended without a signal.
SLACK_S = 20.0
TROUBLES = (
    "has not answered within|left this unanswered",
    r"(worker \d+|the manager) ended",
    "the process ends",
    "was killed while it waited there",
    "removed a mount that a crash had left",
)
EVERY_TIME = {"ttl": 0, "dir_ttl": 0, "negative_ttl": 0}
CACHED, OTHERS = ([f"{kind}/{number}" for number in range(4)] for kind in ("cached", "other"))


def is_stuck(pid: int) -> bool:
    """Whether a process that was killed still exists because one of its threads waits in the kernel."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return "D" in states


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    wanted = write_files(tmp_path / "files", dict.fromkeys([*CACHED, *OTHERS], 5_000))
    for name in wanted:
        os.utime(tmp_path / "files" / name, (1e9, 1e9))  # a mount does not cache a file that has just been written
    return wanted


@pytest.fixture
def below(tmp_path: Path, files: dict[str, str]) -> Iterator[Mounted]:
    """The source: a mount that answers until `source.hang` is set; if it is detached then, it never answers again."""
    options = {"source.timeout_s": 3600, "allowed": ["is in use: it is detached"], **EVERY_TIME}
    with mounted(tmp_path / "files", tmp_path / "below", **options) as mount:
        yield mount


def make_stuck(below: Mounted, mount: Mounted) -> list[int]:
    """The processes of the mount that wait in vain for the source."""
    below.change("source.hang", "on")
    mount.control("warm").write_text("other\n")
    assert error_within(2 * TIMEOUT_S + SLACK_S, (mount.point / OTHERS[0]).read_bytes) == errno.ETIMEDOUT
    worker, manager = mount.workers()[0], mount.manager()
    return [worker, manager, *children(worker), *children(manager)]


# An ordinary user can end a connection only if the system has mounted fusectl (docs/design/architecture.md).
_WITH_ABORT = pytest.mark.skipif(
    os.geteuid() != 0 and not os.listdir("/sys/fs/fuse/connections"), reason="no one has mounted fusectl"
)


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("supervisor", marks=_WITH_ABORT),
        "worker",
        "manager",
        *(pytest.param(victim, marks=pytest.mark.thorough) for victim in ("none", "its reading process")),
    ],
)
def test_a_process_that_cannot_end_holds_no_one(
    tmp_path: Path, files: dict[str, str], below: Mounted, victim: str
) -> None:
    cache = tmp_path / "cache"
    options = {"source.timeout_s": TIMEOUT_S, "cache": cache, "allowed": TROUBLES, **EVERY_TIME}
    with mounted(below.point, tmp_path / "m", **options) as mount:
        for name in CACHED:
            (mount.point / name).read_bytes()
        os.listdir(mount.point / "other")
        asked = make_stuck(below, mount)
        worker, manager, reading, _ = asked
        victims = {"supervisor": mount.supervisor.pid, "worker": worker, "its reading process": reading}
        victims |= {"manager": manager}
        if victim in victims:
            os.kill(victims[victim], signal.SIGKILL)
        if victim == "supervisor":
            with readers(1, mount.point, {name: files[name] for name in CACHED}, rounds=1) as one:
                assert {kind for _, kind, _ in together(one, SLACK_S).errors} <= {"ENOTCONN", "ECONNABORTED"}
        else:
            with readers(1, mount.point, {name: files[name] for name in CACHED}, rounds=1) as one:
                seen = together(one, len(CACHED) * SLACK_S)
            assert (seen.wrong, seen.errors) == ([], [])
            assert seen.longest_s < TIMEOUT_S + SLACK_S
            assert error_within(2 * TIMEOUT_S + SLACK_S, (mount.point / OTHERS[1]).read_bytes) == errno.ETIMEDOUT
            eventually(lambda: mount.stats()["metrics"]["internal_errors"] == 0, SLACK_S)
            began = time.monotonic()
            assert run_spiderfs("umount", mount.point).returncode == 0
            assert time.monotonic() - began < SLACK_S
        assert mount.supervisor.ended(SLACK_S)
        assert any(is_stuck(pid) for pid in asked)
        # The hanging mount is detached, and another source shows the same files at its path.
        unmount(below.point, "-l")
        with mounted(tmp_path / "files", tmp_path / "well", point=below.point):
            with (
                mounted(below.point, tmp_path / "m", **options) as again,
                readers(1, again.point, files, rounds=1) as one,
            ):
                seen = together(one)
            assert (seen.wrong, seen.errors, seen.reads) == ([], [], len(files))
        assert any(is_stuck(pid) for pid in asked), "no one has waited for them"
    below.supervisor.signal(signal.SIGKILL)
    eventually(
        lambda: not any(is_stuck(pid) for pid in asked),
        what="the end of the stuck processes after the end of the source",
    )


def test_a_mount_begins_though_its_first_answer_is_slow(tmp_path: Path, files: dict[str, str]) -> None:
    options = {"source.timeout_s": 0.2, "source.latency_ms": 1000, "allowed": TROUBLES, **EVERY_TIME}
    with mounted(tmp_path / "files", tmp_path / "m", **options) as mount:
        assert error_within(SLACK_S, (mount.point / OTHERS[0]).read_bytes) == errno.ETIMEDOUT


def test_a_mount_over_a_source_that_hangs_says_so(tmp_path: Path, below: Mounted) -> None:
    (tmp_path / "mnt").mkdir()
    below.change("source.hang", "on")
    assert check_source_answers.__defaults__ == (10.0,)
    first = "from spiderfs.options import paths; paths.check_source_answers.__defaults__ = (0.5,)"
    options = options_text({"cache_dir": tmp_path / "cache"})
    done = run_spiderfs("mount", below.point, tmp_path / "mnt", "-o", options, first=first)
    assert done.returncode == 1
    assert "has not answered for 0.5 s" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    below.change("source.hang", "off")
