"""What a daemon logs stays bounded, in lines of a minute and in the size of its file."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spiderfs.daemon import background
from spiderfs.daemon.background import start_logging
from spiderfs.linux import steady_clock


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = before
    root.setLevel(level)


def failed(number: int) -> None:
    logging.getLogger("test").warning("read %d failed", number)


def test_a_thousand_failed_reads_are_not_a_thousand_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = tmp_path / "log", 1000.0
    monkeypatch.setattr(steady_clock, "now", lambda: now)
    start_logging("info", log, tmp_path, False)
    for number in range(1000):
        failed(number)
    logging.getLogger("test").warning("another place")
    lines = log.read_text().splitlines()
    assert [line.partition(": ")[2] for line in lines[-3:]] == [
        "read 18 failed",
        "read 19 failed (further lines like this are left out and counted, for 60 s)",
        "another place",
    ]
    assert len(lines) == 21
    now += 61
    failed(1000)
    failed(1001)
    lines = log.read_text().splitlines()
    assert lines[-2].endswith("read 1000 failed (980 lines like this were left out)")
    assert lines[-1].endswith("read 1001 failed")


def test_a_log_of_several_processes_is_renamed_once_it_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LOG_MAX_BYTES", 20_000)
    log = tmp_path / "log"
    start_logging("info", log, tmp_path, False)
    children = []
    for child in range(3):
        pid = os.fork()
        if not pid:
            try:
                for line in range(300):
                    logging.getLogger("test").info("child %d, line %d", child, line)
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    assert sorted(os.listdir(tmp_path)) == ["log", "log.1"]
    assert all(path.stat().st_size <= 20_000 + 3 * 200 for path in tmp_path.iterdir())
    # Each line is whole, and the last ones of each process are there.
    kept = ((tmp_path / "log.1").read_text() + log.read_text()).splitlines()
    assert all(line.count("child") == line.count("line") == 1 for line in kept)
    assert len(kept) > 200


def test_a_log_whose_directory_may_not_be_written_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LOG_MAX_BYTES", 1000)
    (tmp_path / "log.1").mkdir()
    log = tmp_path / "log"
    start_logging("info", log, tmp_path, False)
    for number in range(100):
        logging.getLogger("test").info("line %d", number)
    assert log.stat().st_size <= 1000


def test_a_log_whose_directory_is_gone_costs_no_one_but_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "log"
    log.parent.mkdir()
    start_logging("info", log, tmp_path, False)
    logging.getLogger("test").info("before")
    log.unlink()
    log.parent.rmdir()
    for _ in range(3):
        logging.getLogger("test").info("lost")
    log.parent.mkdir()
    logging.getLogger("test").info("after")
    assert [line.rpartition(" ")[2] for line in log.read_text().splitlines()] == ["after"]
