"""A source like an object store: directories have no mtime, files have tags, and names are learned by listings."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from benchmarks.fakes import Bare, MemoryContent, MemorySource, bare_filesystem
from spiderfs.errors import SourceUnavailable
from spiderfs.linux import steady_clock
from spiderfs.sources.client import SourceLimits
from spiderfs.sources.source import SourceStat
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs import lister
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES
from spiderfs.vfs.rules import Settings

ABC = (b"a", b"b", b"c")
CALLER = Caller(0, 0, os.getpid())
SETTINGS = Settings(ttl_s=3600.0, dir_ttl_s=3600.0, negative_ttl_s=3600.0)
LIMITS = SourceLimits(timeout_s=20.0, attempts=1)


class Harness:
    def __init__(self, bare: Bare, source: MemorySource) -> None:
        self.bare, self.source = bare, source

    def calls(self) -> dict[str, int]:
        """The calls to the source since this was asked last."""
        calls = dict(self.source.calls)
        self.source.calls.clear()
        return calls

    async def lookup(self, path: bytes) -> int:
        """The inode of a path, each of whose names is looked up; 0 if the last one does not exist."""
        inode = ROOT_INODE
        for name in path.split(b"/"):
            inode = (await self.bare.filesystem.lookup(inode, name, CALLER)).attributes.inode
        return inode

    async def read(self, inode: int) -> bytes:
        handle = (await self.bare.filesystem.open(inode, os.O_RDONLY, CALLER)).handle
        content = bytes(await self.bare.filesystem.read(handle, 0, 100, inode))
        self.bare.content.end_read()
        return content

    def settings(self, **changed: float) -> None:
        self.bare.filesystem.settings = SETTINGS._replace(**changed)


@pytest.fixture
@contextlib.asynccontextmanager
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    source, content = MemorySource(tagged=True), MemoryContent()
    content.set_capacity(1 << 20)
    for name in (b"d/a", b"d/b", b"d/below/c"):
        source.add(name, name)
    async with bare_filesystem(
        source, content, MemoryRecords(TABLES), tmp_path, settings=SETTINGS, limits=LIMITS
    ) as bare:
        harness = Harness(bare, source)
        assert harness.calls() == {"stat": 1}, "the root"
        yield harness


async def test_an_unknown_name_has_its_directory_listed(harness: Harness) -> None:
    assert await harness.lookup(b"d/a")
    assert harness.calls() == {"scan": 2}
    assert await harness.lookup(b"d/b")
    assert not await harness.lookup(b"d/none")
    assert harness.calls() == {}


async def test_a_name_that_is_not_in_the_listing_is_asked_for_after_a_while(harness: Harness) -> None:
    await harness.lookup(b"d/a")
    harness.settings(negative_ttl_s=0.0)
    harness.source.add(b"d/new", b"new")
    harness.calls()
    assert await harness.lookup(b"d/new")
    assert harness.calls() == {"stat": 1}
    assert not await harness.lookup(b"d/none")
    assert harness.calls() == {"stat": 1}


async def test_a_name_that_has_expired_is_asked_for_alone(harness: Harness) -> None:
    first = await harness.lookup(b"d/a")
    assert await harness.read(first) == b"d/a"
    harness.source.change(b"d/a", b"new")
    harness.source.remove(b"d/b")
    harness.calls()
    directory = harness.bare.catalogue.directory_inode(b"d")
    harness.settings(ttl_s=0.0, dir_ttl_s=0.0)
    changed = (await harness.bare.filesystem.lookup(directory, b"a", CALLER)).attributes.inode
    assert harness.calls() == {"stat": 1}
    assert changed != first
    assert await harness.read(changed) == b"new"
    assert not (await harness.bare.filesystem.lookup(directory, b"b", CALLER)).attributes.inode


async def test_names_of_an_earlier_mount_are_listed_and_not_asked_for_one_by_one(harness: Harness) -> None:
    """In an immutable mount: files may have changed before it."""
    directory = harness.bare.catalogue.directory_inode(b"d")
    first = [await harness.lookup(name) for name in (b"d/a", b"d/b")]
    harness.source.change(b"d/b", b"new")
    harness.source.add(b"d/c", b"c")
    harness.calls()
    since_s = steady_clock.now()
    harness.settings(checked_since_s=since_s)
    harness.bare.lister._since_s = since_s
    found = [(await harness.bare.filesystem.lookup(directory, name, CALLER)).attributes.inode for name in ABC]
    assert harness.calls() == {"scan": 1}
    assert found[0] == first[0]
    assert found[1] != first[1]
    assert found[2]


async def test_no_one_waits_long_for_a_large_directory(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = (await harness.bare.filesystem.lookup(ROOT_INODE, b"d", CALLER)).attributes.inode
    harness.calls()
    monkeypatch.setattr(lister, "MOMENT_S", 0.0)
    listed, scan = threading.Event(), harness.source.scan

    def slow(path: bytes, known: object = ()) -> Iterator[tuple[bytes, SourceStat]]:
        assert listed.wait(20)
        return scan(path)

    monkeypatch.setattr(harness.source, "scan", slow)
    for name in (b"a", b"b"):
        assert (await harness.bare.filesystem.lookup(directory, name, CALLER)).attributes.inode
    assert not (await harness.bare.filesystem.lookup(directory, b"none", CALLER)).attributes.inode
    assert harness.calls() == {"stat": 3}
    listed.set()
    while not harness.bare.filesystem.at_rest:
        await trio.sleep(0.001)
    assert harness.calls() == {"scan": 1}
    assert (await harness.bare.filesystem.lookup(directory, b"below", CALLER)).attributes.inode
    assert harness.calls() == {}


async def test_a_listing_is_made_again_once_it_is_old(harness: Harness) -> None:
    await harness.lookup(b"d/a")
    directory = harness.bare.catalogue.directory_inode(b"d")
    harness.calls()
    await harness.bare.filesystem.opendir(directory)
    await harness.bare.filesystem.getattr(directory)
    assert harness.calls() == {}
    harness.settings(dir_ttl_s=0.0)
    harness.source.add(b"d/new")
    await harness.bare.filesystem.opendir(directory)
    assert harness.calls() == {"scan": 1}
    assert b"new" in {name for name, _, _ in await harness.bare.filesystem.readdir(directory, 0, 100)}
    assert harness.calls() == {}, "nor are the attributes of a directory asked for"


async def test_a_young_version_is_kept_at_once(harness: Harness) -> None:
    harness.source.add(b"d/young", b"bytes", mtime_ns=1 << 62)
    inode = await harness.lookup(b"d/young")
    assert await harness.read(inode) == b"bytes"
    assert await harness.read(inode) == b"bytes"
    assert harness.calls()["read"] == 1
    again = harness.bare.catalogue.node(inode)
    assert again.version == harness.source.stat(b"d/young").version
    assert (again.version.mtime_ns, again.stat.mtime_ns) == (0, 1 << 62)


async def test_known_names_are_answered_while_the_source_is_away(harness: Harness) -> None:
    first = await harness.lookup(b"d/a")
    directory = harness.bare.catalogue.directory_inode(b"d")
    harness.settings(dir_ttl_s=0.0, ttl_s=0.0, negative_ttl_s=0.0)
    harness.source.fail_next(*[SourceUnavailable("no route")] * 20)
    await harness.bare.filesystem.opendir(directory)
    assert (await harness.bare.filesystem.lookup(directory, b"a", CALLER)).attributes.inode == first
    with pytest.raises(SourceUnavailable):
        await harness.bare.filesystem.lookup(directory, b"unknown", CALLER)


async def test_a_known_listing_waits_no_longer_for_a_source_that_hangs_than_any_other_question(tmp_path: Path) -> None:
    """To list again may take many times as long, and is allowed to: that is known to be of no use."""
    hanging = threading.Event()
    source, content, records = MemorySource(tagged=True), MemoryContent(), MemoryRecords(TABLES)
    content.set_capacity(1 << 20)
    for name in (b"d/a", b"d/b", b"e/c"):
        source.add(name, name)
    limits = SourceLimits(timeout_s=0.3, scan_timeout_s=60.0, attempts=1)
    async with bare_filesystem(source, content, records, tmp_path, settings=SETTINGS, limits=limits) as bare:
        harness = Harness(bare, source)
        directories = [await harness.lookup(name) for name in (b"d", b"e")]
        for inode in directories:
            await bare.filesystem.opendir(inode)
        harness.settings(dir_ttl_s=0.0)
        bare.lister._client._answered_at_s = -100.0
        stat, scan = source.stat, source.scan
        source.stat = lambda path: hanging.wait(20) and stat(path)  # type: ignore[method-assign]
        source.scan = lambda *args: hanging.wait(20) and scan(*args)  # type: ignore[method-assign]
        began_s = trio.current_time()
        for inode in directories:
            await bare.filesystem.opendir(inode)
            assert len(await bare.filesystem.readdir(inode, 0, 10)) >= 1
        assert trio.current_time() - began_s < 15
        assert not bare.lister._client.reachable
        hanging.set()
