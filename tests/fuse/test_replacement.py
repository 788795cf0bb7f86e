"""Files that are replaced by rename while several workers serve them: readers get old bytes or new ones, no errors."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mounting import Mounted, mounted
from reading import write_contents
from replacing import beside, is_whole, read_on, replaced

NAMES = [f"sample {number}" for number in range(12)]
MOST_BYTES = 60_000


@pytest.mark.parametrize(("workers", "options"), [(2, {"ttl": "0s"}), (3, {}), (1, {"ttl": "0s"})])
def test_a_file_that_is_replaced_all_the_time_is_read_without_errors(
    source: Path, tmp_path: Path, workers: int, options: dict[str, object]
) -> None:
    with (
        mounted(source, tmp_path / "place", workers=workers, **options) as mount,  # type: ignore[arg-type]
        replaced(source, NAMES, MOST_BYTES, pause_s=0.0005),
    ):
        outcome = read_on(mount.point, NAMES, MOST_BYTES, readers=8, reads=120)
        assert not outcome.errors, outcome
        assert not outcome.mixed, outcome
        assert outcome.right == 8 * 120


def test_a_file_that_is_replaced_faster_than_looked_up_is_read(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "place", workers=3) as mount, replaced(source, NAMES[:1], 200, pause_s=0.0):
        outcome = read_on(mount.point, NAMES[:1], 200, readers=8, reads=60)
        assert not outcome.errors, outcome
        assert not outcome.mixed, outcome
        assert outcome.right == 8 * 60


def test_a_large_file_that_is_replaced_all_the_time_can_be_opened(source: Path, tmp_path: Path) -> None:
    """What is opened may be gone when it is read, which is then ESTALE: an open waits for no bytes."""

    def open_and_read(reader: int) -> None:
        for turn in range(150):
            name = NAMES[(turn + reader) % 2]
            with open(mount.point / name, "rb", buffering=0) as file:
                try:
                    content = file.read()
                except OSError as exc:
                    if exc.errno != errno.ESTALE:
                        raise
                else:
                    assert is_whole(name, content, MOST_BYTES)

    with (
        mounted(source, tmp_path / "place", workers=2, ttl="0s", sample_max_bytes=1) as mount,
        replaced(source, NAMES[:2], MOST_BYTES, pause_s=0.0),
        ThreadPoolExecutor(4) as pool,
    ):
        list(pool.map(open_and_read, range(4)))


@contextlib.contextmanager
def killed(mount: Mounted, pause_s: float) -> Iterator[None]:
    """Kill one worker after the other until the context ends."""

    def kill(ended: threading.Event) -> None:
        for turn in itertools.count():
            if ended.wait(pause_s):
                return
            os.kill(mount.workers()[turn % mount.workers_wanted], signal.SIGKILL)

    with beside(kill):
        yield


def test_a_file_that_is_replaced_is_read_without_errors_while_workers_are_killed(source: Path, tmp_path: Path) -> None:
    """With the requests of a worker that has died the kernel hands out those of the others once more."""
    with (
        mounted(source, tmp_path / "place", workers=3, allowed=["worker . ended"]) as mount,
        replaced(source, NAMES, MOST_BYTES, pause_s=0.0005),
        killed(mount, pause_s=0.3),
    ):
        outcome = read_on(mount.point, NAMES, MOST_BYTES, readers=8, reads=200)
        assert not outcome.errors, outcome
        assert not outcome.mixed, outcome


def _large(path: Path) -> bytes:
    try:
        return path.read_bytes()[:8]
    except OSError as exc:
        # Where it is read in blocks, the open asks the source nothing; the next open gets the new file.
        if exc.errno != errno.ESTALE:
            raise
        return path.read_bytes()[:8]


# What is asked first of a directory that has become a link, and what comes.
UNCACHED: dict[str, tuple[Callable[[Path], object], object]] = {
    "known": (lambda train: (train / "0/known").read_bytes(), b"v2 known"),
    "new": (lambda train: (train / "0/new").read_bytes(), b"v2 new"),
    "large": (lambda train: _large(train / "0/large"), b"v2 large"),
    "listed": (lambda train: sorted(os.listdir(train)), ["0", "1"]),
}


@pytest.mark.parametrize("options", [{}, {"sample_max_bytes": "64KiB"}])
def test_a_directory_that_becomes_a_link_is_followed_at_once(
    source: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    first = {"0/known": b"v1 known", "0/large": b"v1 large".ljust(200_000)}
    second = {name: content.replace(b"v1", b"v2") for name, content in first.items()}
    second |= {"0/new": b"v2 new", "1/other": b"v2 other"}
    for case in UNCACHED:
        write_contents(source / case, first)
        write_contents(source / f"{case}-v2", second)
    with mounted(source, tmp_path / "place", ttl="1h", dir_ttl="1h", **options) as mount:  # type: ignore[arg-type]
        for case, (ask, found) in UNCACHED.items():
            train = mount.point / case
            for path in (train / "0/known", train / "0/large"):
                path.stat()
            os.rename(source / case, source / f"{case}-v1")
            os.symlink(f"{case}-v2", source / case)
            assert ask(train) == found
            assert os.readlink(train) == f"{case}-v2"
