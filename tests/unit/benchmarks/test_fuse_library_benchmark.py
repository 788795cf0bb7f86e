"""Where benchmarks/serving/fuse_library.py could silently be wrong: ratios, turns, and what both libraries are told."""

from __future__ import annotations

import importlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from spiderfs.vfs.filesystem import Attributes, Entry


@pytest.fixture(scope="module")
def library() -> ModuleType:
    return importlib.import_module("benchmarks.serving.fuse_library")


@pytest.fixture
def servers(library: ModuleType) -> Iterator[ModuleType]:
    """The daemons' module over a pyfuse3 that has attributes alone; the real one is not installed here."""
    fake: Any = ModuleType("pyfuse3")
    fake.Operations, fake.EntryAttributes = object, SimpleNamespace
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pyfuse3", fake)
        yield importlib.import_module("benchmarks.serving.fuse_servers")
        del sys.modules["benchmarks.serving.fuse_servers"]


def test_a_ratio_is_of_one_round(library: ModuleType) -> None:
    row = library.Row(
        "warm", "files/s", False, {"own": [10.0, 40.0], "pyfuse3": [5.0, 10.0], "pyfuse3-polled": [20, 20]}
    )
    assert row.ratios("pyfuse3") == [2.0, 4.0]
    own, other, _ = library.lines(row)
    assert own == ("files/s ↑", "own", "25.0", "10.0-40.0", "", "")
    assert other == ("", "pyfuse3", "7.5", "5.0-10.0", "3.00", "2.00-4.00")


def test_nothing_is_divided_by_nothing(library: ModuleType) -> None:
    row = library.Row("scan", "us", True, {"own": [0.0], "pyfuse3": [0.0], "pyfuse3-polled": [5.0]})
    assert [line[4] for line in library.lines(row)] == ["", "", "0.00"]


def test_each_system_begins_a_round_in_turn(library: ModuleType) -> None:
    rounds = [library.turns(number) for number in range(3)]
    assert {order[0] for order in rounds} == set(library.SYSTEMS)
    assert all(sorted(order) == sorted(library.SYSTEMS) for order in rounds)


def test_bytes_are_counted_as_often_as_they_are_read(library: ModuleType) -> None:
    files = library.FileSet("2 x 3 B", Path("/"), [b"a", b"b"], 6)
    assert library.repeated(files, 2) == library.FileSet("2 x 3 B", Path("/"), [b"a", b"b", b"a", b"b"], 12)


def test_a_system_that_shows_something_else_is_not_measured(library: ModuleType, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    for root in (source, copy):
        (root / "below").mkdir(parents=True)
        (root / "below" / "file").write_bytes(b"text")
        os.utime(root / "below" / "file", ns=(1, 1))
    library.check_alike(source, [library.Mounted("same", copy, None)])
    os.utime(copy / "below" / "file", ns=(2, 2))
    with pytest.raises(RuntimeError, match="other does not show"):
        library.check_alike(source, [library.Mounted("other", copy, None)])


def test_no_rounds_are_refused(library: ModuleType) -> None:
    with pytest.raises(SystemExit):
        library.parse_arguments(["--rounds", "0"])


def test_every_system_has_a_server(library: ModuleType, servers: ModuleType) -> None:
    assert tuple(servers.SERVERS) == library.SYSTEMS


def test_pyfuse3_is_told_what_the_kernel_is_told(servers: ModuleType) -> None:
    found = servers._entry(Entry(Attributes(7, stat.S_IFREG | 0o444, 1, 2, 1000, 3_000_000_004, 60.0), 30.0))
    assert (found.st_ino, found.st_mode, found.st_uid, found.st_gid) == (7, stat.S_IFREG | 0o444, 1, 2)
    assert (found.st_size, found.st_blocks, found.st_nlink) == (1000, 2, 1)
    assert found.st_mtime_ns == found.st_atime_ns == found.st_ctime_ns == 3_000_000_004
    assert (found.entry_timeout, found.attr_timeout) == (30.0, 60.0)
    nothing = servers._entry(Entry(Attributes(0, 0, 0, 0, 0, 0, 0.0), 2.0))
    assert (nothing.st_ino, nothing.entry_timeout) == (0, 2.0)
