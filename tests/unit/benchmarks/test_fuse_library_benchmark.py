"""Where benchmarks/serving/fuse_library.py could silently be wrong: ratios and turns."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def library() -> ModuleType:
    return importlib.import_module("benchmarks.serving.fuse_library")


def test_a_ratio_is_of_one_round(library: ModuleType) -> None:
    row = library.Row(
        "warm", "files/s", False, {"kernel": [10.0, 40.0], "pyfuse3": [5.0, 10.0], "pyfuse3-plain": [20, 20]}
    )
    assert row.ratios("pyfuse3") == [2.0, 4.0]
    kernel, other, _ = library.lines(row)
    assert kernel == ("files/s ↑", "kernel", "25.0", "10.0-40.0", "", "")
    assert other == ("", "pyfuse3", "7.5", "5.0-10.0", "3.00", "2.00-4.00")


def test_nothing_is_divided_by_nothing(library: ModuleType) -> None:
    row = library.Row("scan", "us", True, {"kernel": [0.0], "pyfuse3": [0.0], "pyfuse3-plain": [5.0]})
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


def test_every_system_has_a_server(library: ModuleType) -> None:
    servers = importlib.import_module("benchmarks.serving.fuse_servers")
    assert tuple(servers.SERVERS) == library.SYSTEMS
