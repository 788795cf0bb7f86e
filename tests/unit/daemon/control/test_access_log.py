"""Who read what, lately: remembered for nothing, written only while someone looks."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import trio

from spiderfs.core.events import FETCHED, HIT, REFUSED, WARMED, Access
from spiderfs.daemon.control import access_log as module
from spiderfs.daemon.control.access_log import REMEMBERED_ACCESSES, WANTED_S, AccessLog
from spiderfs.shared.layout import RunLayout

LINE = re.compile(
    rb"(?P<when>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) (?P<how>\w+) +(?P<size>\d+) thread=(?P<pid>\d+)"
    rb"( block=(?P<block>\d+))? (?P<path>.*)\n"
)
PATHS = {1: b"train/cat.png", 2: b"caf\xe9-\xff", 3: b"two\nlines"}
SHOWN = {1: b"train/cat.png", 2: rb"caf\xe9-\xff", 3: rb"two\x0alines"}


def event(inode: int, where: int = HIT, size: int = 100, block: int = 0) -> Access:
    return Access(1_700_000_000.25, inode, inode, size, block, 4321, 0, where)


class Harness:
    def __init__(self, directory: Path, enabled: bool = True) -> None:
        run = RunLayout(directory)
        self.file = run.access_log
        self.wanted = run.access_log_wanted
        self.log = AccessLog(
            run,
            enabled,
            path_of=lambda inode: PATHS.get(inode, b"?"),
        )

    def forget(self) -> None:
        """Make it long ago that someone looked."""
        then = time.time() - WANTED_S - 1
        os.utime(self.wanted, (then, then))

    def look(self) -> None:
        self.log.want()
        self.log.write()

    def paths(self) -> list[bytes]:
        return [found["path"] for found in LINE.finditer(self.file.read_bytes())]


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_who_looks_gets_what_is_remembered_and_then_what_comes(harness: Harness) -> None:
    harness.log.record_accesses([event(1), event(2, FETCHED)])
    harness.look()
    assert harness.paths() == [SHOWN[1], SHOWN[2]]
    harness.log.record_accesses([event(1, REFUSED)])
    harness.log.write()
    harness.log.write()
    assert harness.paths() == [SHOWN[1], SHOWN[2], SHOWN[1]]


@pytest.mark.usefixtures("jumping_clock")
async def test_it_writes_soon_after_accesses_were_recorded(harness: Harness) -> None:
    harness.log.render()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(harness.log.run)
        for written in range(3):
            await trio.sleep(10)
            assert harness.paths() == written * [SHOWN[1]], "there is nothing new"
            harness.log.record_accesses([event(1)])
            await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert harness.paths() == 3 * [SHOWN[1]]


def test_a_line_says_what_happened(harness: Harness) -> None:
    rows = [event(1, HIT), event(1, FETCHED, 1 << 33), event(2, REFUSED, 5, 7), event(3, WARMED), event(9)]
    harness.log.record_accesses(rows)
    harness.look()
    found = [match.groupdict() for match in LINE.finditer(harness.file.read_bytes())]
    assert [row["how"] for row in found] == [b"hit", b"fetched", b"uncached", b"warmed", b"hit"]
    assert [int(row["size"]) for row in found] == [100, 1 << 33, 5, 100, 100]
    assert [row["block"] for row in found] == [None, None, b"7", None, None]
    assert [row["path"] for row in found] == [SHOWN[1], SHOWN[1], SHOWN[2], SHOWN[3], b"?"]
    assert {row["pid"] for row in found} == {b"4321"}
    assert harness.file.read_bytes().count(b"\n") == 5


def test_it_remembers_a_bounded_number(harness: Harness) -> None:
    for _ in range(3):
        harness.log.record_accesses([event(1)] * REMEMBERED_ACCESSES)
    harness.log.record_accesses([event(2)])
    harness.look()
    assert len(harness.paths()) == REMEMBERED_ACCESSES
    assert harness.paths()[-1] == SHOWN[2]


def test_it_stops_when_no_one_has_looked_for_a_while(harness: Harness) -> None:
    harness.look()
    harness.log.record_accesses([event(1)])
    harness.forget()
    harness.log.write()
    assert harness.paths() == [SHOWN[1]], "what came while someone looked is still written"
    harness.log.record_accesses([event(2)])
    harness.log.write()
    assert harness.paths() == [SHOWN[1]]
    harness.look()
    assert harness.paths() == [SHOWN[1], SHOWN[2]]


def test_a_large_file_is_begun_again(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 500)
    harness.look()
    sizes = []
    for _ in range(40):
        harness.log.record_accesses([event(1)])
        harness.log.write()
        sizes.append(harness.file.stat().st_size)
    assert max(sizes) < 700
    assert sizes != sorted(sizes)


def test_a_disk_without_room_costs_lines_and_nothing_else(harness: Harness) -> None:
    harness.log.want()
    harness.log.record_accesses([event(1)])
    harness.file.mkdir()
    harness.log.write()
    harness.file.rmdir()
    harness.log.record_accesses([event(2)])
    harness.log.write()
    assert harness.paths() == [SHOWN[2]]
