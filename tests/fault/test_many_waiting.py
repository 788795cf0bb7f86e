"""Hundreds of readers that wait for a source which hangs: who asks for what is cached does not wait behind them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import Mounted, eventually, mounted

WAITING = 1100
CACHED = [f"cached {number}" for number in range(20)]
# A cached file takes a millisecond; two busy cores may add seconds. The source leaves everything unanswered for 60 s.
QUICK_S = 30.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "other").mkdir(parents=True)
    for name in [*CACHED, *(f"other/{number}" for number in range(WAITING))]:
        (source / name).write_bytes(name.encode() * 2000)
    return source


def _waits(thread: threading.Thread) -> bool:
    """Whether a thread is in a call, and that not for a lock of this process."""
    where = Path(f"/proc/self/task/{thread.native_id}/wchan").read_text()
    return where not in ("", "0") and not where.startswith("futex")


@contextlib.contextmanager
def waiting(mount: Mounted) -> Iterator[None]:
    """Have each of the other files opened and read by a thread, which waits until this context ends."""
    errors: list[OSError] = []

    def read(number: int) -> None:
        name = f"other/{number}"
        try:
            assert (mount.point / name).read_bytes() == name.encode() * 2000
        except OSError as exc:
            errors.append(exc)

    before = threading.stack_size(1 << 18)
    threads = [threading.Thread(target=read, args=(number,)) for number in range(WAITING)]
    mount.change("source.hang", "on")
    for thread in threads:
        thread.start()
    threading.stack_size(before)
    try:
        eventually(lambda: all(map(_waits, threads)))
        yield
    finally:
        mount.change("source.hang", "off")
        for thread in threads:
            thread.join()
    assert errors == []


def test_cached_files_are_read_while_hundreds_of_readers_wait(source: Path, tmp_path: Path) -> None:
    options = {"source.timeout_s": 60, "ttl": "1h", "dir_ttl": "1h", "fetches": 16}
    with mounted(source, tmp_path / "m", **options) as mount:  # type: ignore[arg-type]
        for name in CACHED:
            assert (mount.point / name).read_bytes() == name.encode() * 2000
        names = os.listdir(mount.point / "other")
        assert len(names) == WAITING
        for name in CACHED:
            fd = os.open(mount.point / name, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        with waiting(mount):
            for name in CACHED:
                began = time.monotonic()
                assert (mount.point / name).read_bytes() == name.encode() * 2000
                assert time.monotonic() - began < QUICK_S
