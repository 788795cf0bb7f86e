"""A source that fails, hangs or is unreachable: cached files are served, others end in an error within the limit."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from mounting import Mounted, eventually, mounted
from reading import error_of, error_within, read_through, write_files

pytestmark = pytest.mark.opened_and_immutable

TIMEOUT_S = 0.5
# What the start of threads, the kernel and the interpreter may add on two busy cores.
SLACK_S = 10.0
TROUBLES = ("the source has not answered within", r"the source is gone", r"the source failed", "the source hangs")
SIZES = {f"{kind}/{number}": 5_000 for kind in ("cached", "other") for number in range(10)}


@pytest.fixture(params=[1, 2])
def mount(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Iterator[Mounted]:
    """A mount whose names expire at once, so that all have expired when the source fails and the kernel always asks."""
    options = {"source.timeout_s": TIMEOUT_S, "source.attempts": 2, "ttl": 0, "negative_ttl": 0, "dir_ttl": 0}
    with mounted(source, tmp_path / "m", workers=request.param, allowed=TROUBLES, **options) as found:
        yield found


def read_all(mount: Mounted, kind: str, wanted: dict[str, str]) -> None:
    some = {name: digest for name, digest in wanted.items() if name.startswith(kind)}
    read_through(mount.point, some)


def fetch_all(mount: Mounted, kind: str) -> None:
    """Have them cached: on a busy machine a source that is well may be late, too."""
    for name in SIZES:
        if name.startswith(kind):
            eventually(lambda name=name: _reads(mount.point / name))


@pytest.mark.both_bindings
@pytest.mark.parametrize("fault", ["source.gone", "source.hang"])
def test_without_its_source_a_mount_serves_what_it_knows(mount: Mounted, source: Path, fault: str) -> None:
    wanted = write_files(source, SIZES)
    fetch_all(mount, "cached")
    read_all(mount, "cached", wanted)
    assert len(os.listdir(mount.point / "cached")) == 10
    assert len(list(os.scandir(mount.point / "other"))) == 10
    assert len(os.listdir(mount.point)) == 2
    mount.change(fault, "on")
    limit_s = TIMEOUT_S * mount.workers_wanted + SLACK_S
    allowed = {errno.EIO, errno.ETIMEDOUT}
    assert error_within(limit_s, (mount.point / "other/0").read_bytes) in allowed
    # Every worker has to find out for itself, in at most one time limit; then no one waits for what is cached.
    eventually(lambda: _quick(lambda: read_all(mount, "cached", wanted), 10 * TIMEOUT_S))
    assert sorted(os.listdir(mount.point)) == ["cached", "other"]
    assert len(os.listdir(mount.point / "cached")) == 10
    # Known names keep their attributes; of an unknown name no one can say that it is missing.
    assert (mount.point / "other/1").stat().st_size == 5_000
    assert error_within(limit_s, (mount.point / "other/1").read_bytes) in allowed
    assert error_of(os.stat, mount.point / "never-seen") in allowed
    mount.change(fault, "off")
    # A question that was just asked in vain is not asked again within a second.
    fetch_all(mount, "other")
    read_all(mount, "other", wanted)
    (source / "new").write_bytes(b"after the fault")
    assert eventually(lambda: _reads(mount.point / "new")) == b"after the fault"
    eventually(lambda: mount.metric("source_reachable") == 1)


def _quick(action: object, limit_s: float) -> bool:
    began = time.monotonic()
    action()  # type: ignore[operator]
    return time.monotonic() - began < limit_s


def _reads(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError as exc:
        if exc.errno in (errno.EIO, errno.ETIMEDOUT):
            return None
        raise


def test_a_source_that_hangs_costs_readers_in_four_workers_one_limit(source: Path, tmp_path: Path) -> None:
    """All readers want the same file, any free worker answers a reader, and the kernel lets readers wait in line."""
    write_files(source, {"small": 5_000, "large": 3 << 20})
    limit_s = 5.0
    options = {"source.timeout_s": limit_s, "source.attempts": 2, "sample_max_bytes": "1MiB", "read_ahead": 0}
    with mounted(source, tmp_path / "m", workers=4, allowed=TROUBLES, **options) as mount:
        # Names and handles exist before the source hangs, so that only one request waits.
        assert len(list(os.scandir(mount.point))) == 2
        handles = [os.open(mount.point / "large", os.O_RDONLY) for _ in range(8)]
        mount.change("source.hang", "on")
        answers: list[tuple[int, float]] = []

        def timed(action: Callable[[], object]) -> None:
            began = time.monotonic()
            try:
                action()
            except OSError as exc:
                answers.append((exc.errno or 0, time.monotonic() - began))

        def across_two_blocks(fd: int) -> None:
            os.pread(fd, 64 << 10, (1 << 20) - (32 << 10))

        actions: list[Callable[[], object]] = [partial(across_two_blocks, fd) for fd in handles]
        actions += [(mount.point / "small").read_bytes] * 8
        actions += [(mount.point / "never seen").stat] * 8
        threads = [threading.Thread(target=timed, args=(action,)) for action in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        mount.change("source.hang", "off")
        for fd in handles:
            os.close(fd)
        assert [number for number, _ in answers] == [errno.ETIMEDOUT] * 24
        assert max(seconds for _, seconds in answers) < 2 * limit_s


def test_a_hanging_request_goes_on_when_the_source_comes_back(source: Path, tmp_path: Path) -> None:
    (source / "file").write_bytes(b"late but whole")
    with mounted(source, tmp_path / "m", **{"source.timeout_s": 60}) as mount:
        assert (mount.point / "file").stat().st_size == 14
        mount.change("source.hang", "on")
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append((mount.point / "file").read_bytes()))
        reader.start()
        eventually(lambda: mount.metric("source_requests") >= 1)
        assert found == []
        mount.change("source.hang", "off")
        reader.join(30)
        assert found == [b"late but whole"]


def test_passing_errors_are_retried_and_no_one_sees_them(source: Path, tmp_path: Path) -> None:
    wanted = write_files(source, {f"{number}": 5_000 for number in range(80)} | {"large": 10 << 20})
    options = {"source.error_rate": 0.2, "source.attempts": 10, "source.timeout_s": 60}
    with mounted(source, tmp_path / "m", workers=2, **options) as mount:
        read_through(mount.point, wanted, 2, 1)
        assert mount.metric("source_retries") > 5
        assert mount.metric("source_errors") == 0
