"""Extents of a file as files of their own, and the grids that processes share."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fakes.memory_source import MemorySource
from spiderfs.errors import SourceChanged, SourceNotFound
from spiderfs.protocol.extents import Extent, extent_of
from spiderfs.sources.ranges import Grid, Grids, RangeSource

CONTENT = os.urandom(20_000)


@pytest.fixture
def inner() -> MemorySource:
    source = MemorySource()
    source.add(b"a/b.bin", CONTENT)
    return source


def test_an_extent_is_a_file_with_the_bytes_of_its_place(inner: MemorySource) -> None:
    source = RangeSource(inner)
    path = Extent(b"a/b.bin", 4096, 12288).path
    found = source.stat(path)
    assert found == source.stat(b"a/b.bin")._replace(size=8192)
    assert source.read(path, 0, 8192, found.version) == CONTENT[4096:12288]
    assert source.read(path, 8000, 8192, found.version) == CONTENT[12096:12288]
    assert [name for name, _ in source.scan(b"a")] == [name for name, _ in inner.scan(b"a")]


@pytest.mark.parametrize(("begin", "end"), [(0, 20_001), (4096, 4096), (8192, 4096)])
def test_no_extent_lies_behind_the_end(inner: MemorySource, begin: int, end: int) -> None:
    with pytest.raises(SourceNotFound):
        RangeSource(inner).stat(Extent(b"a/b.bin", begin, end).path)


def test_an_extent_of_another_version_is_not_read(inner: MemorySource) -> None:
    source = RangeSource(inner)
    path = Extent(b"a/b.bin", 0, 4096).path
    before = source.stat(path).version
    assert source.read(path, 0, 4096, before) == CONTENT[:4096]
    inner.add(b"a/b.bin", CONTENT[::-1], mtime_ns=inner.stat(b"a/b.bin").mtime_ns + 1)
    with pytest.raises(SourceChanged):
        source.read(path, 0, 4096, before)
    assert source.read(path, 0, 4096, source.stat(path).version) == CONTENT[::-1][:4096]


@pytest.mark.parametrize("path", [b"a/b.bin", b"a.@ranges/1", b".@ranges/0-1", b"a.@ranges/0-1/c", b"a.@ranges/-1-2"])
def test_other_paths_name_no_extent(path: bytes) -> None:
    assert extent_of(path) is None


def test_a_read_is_covered_by_extents_without_a_gap() -> None:
    grid = Grid(np.array([(0, 4096), (4096, 8192), (16384, 20000)]))
    assert grid.covering(100, 8192) == [(0, 4096), (4096, 8192)]
    assert grid.covering(17000, 20000) == [(16384, 20000)]
    assert grid.covering(4096, 8193) is None
    assert grid.covering(9000, 9001) is None
    assert grid.covering(19999, 20001) is None


def test_other_processes_find_the_grids_of_a_file(tmp_path: Path) -> None:
    own, other = Grids(tmp_path.joinpath), Grids(tmp_path.joinpath)
    assert other.of(b"a") == ()
    for number in range(12):
        own.publish(b"a", np.array([(0, 4096 + number)]))
        own.publish(b"a", np.array([(0, 4096 + number)]))
    ends = [int(grid.extents[0, 1]) - 4096 for grid in other.of(b"a")]
    assert ends == list(range(4, 12)), "the newest, each once"
    assert other.of(b"b") == () == Grids().of(b"a")


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_torn_file_of_grids_is_none(tmp_path: Path, kept: float) -> None:
    grids, extents = Grids(tmp_path.joinpath), np.array([(0, 4096)])
    grids.publish(b"a", extents)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: int(kept * len(content))])
    assert grids.of(b"a") == ()
    grids.publish(b"a", extents)
    assert [grid.extents.tolist() for grid in grids.of(b"a")] == [[[0, 4096]]]
