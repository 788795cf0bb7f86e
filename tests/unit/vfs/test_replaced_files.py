"""What a reader gets of a file that is replaced again and again while it is opened."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.fakes import Bare, MemoryContent, MemorySource, bare_filesystem
from spiderfs.errors import Stale
from spiderfs.sources.source import SourceStat
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES, Catalogue
from spiderfs.vfs.rules import Settings
from spiderfs.vfs.unstored_bytes import UnstoredBytes

CALLER = Caller(0, 0, os.getpid())


class Replaced(MemorySource):
    """A source whose file `x` is another version after each question about it."""

    def __init__(self) -> None:
        super().__init__()
        self.generation = 0
        self.add(b"x", b"generation 0")
        self.catalogue: Catalogue | None = None

    def replace(self) -> None:
        self.generation += 1
        self.change(b"x", b"generation %d" % self.generation)

    def stat(self, path: bytes) -> SourceStat:
        found = super().stat(path)
        if path == b"x":
            self.replace()
        return found

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        found = super().read_present(path, most_bytes)
        self.replace()
        if self.catalogue is not None:
            # Another worker has asked later, and is answered sooner.
            self.catalogue.record(ROOT_INODE, path, super().stat(path), time.time())
        return found


async def open_as_linux_does(bare: Bare) -> bytes:
    """Open and read `x`. An open that gets ESTALE is followed by two look-ups and one more open."""
    inode = (await bare.filesystem.lookup(ROOT_INODE, b"x", CALLER)).attributes.inode
    try:
        handle = (await bare.filesystem.open(inode, os.O_RDONLY, CALLER)).handle
    except Stale:
        for _ in range(2):
            entry = await bare.filesystem.lookup(ROOT_INODE, b"x", CALLER)
        handle = (await bare.filesystem.open(inode := entry.attributes.inode, os.O_RDONLY, CALLER)).handle
    content = bytes(await bare.filesystem.read(handle, 0, 100, inode))
    await bare.filesystem.release(handle, inode)
    bare.content.end_read()
    return content


@pytest.mark.parametrize("another_is_sooner", [False, True])
async def test_a_file_that_is_never_the_same_twice_is_read(tmp_path: Path, another_is_sooner: bool) -> None:
    source, content = Replaced(), MemoryContent()
    content.set_capacity(1 << 20)
    async with bare_filesystem(source, content, MemoryRecords(TABLES), tmp_path, settings=Settings()) as bare:
        if another_is_sooner:
            source.catalogue = bare.catalogue
        for _ in range(5):
            assert await open_as_linux_does(bare) in {
                b"generation %d" % generation for generation in range(source.generation + 1)
            }


async def test_what_was_read_of_a_version_that_is_superseded_is_not_trusted(tmp_path: Path) -> None:
    """Another worker knows a newer version. The kernel must not come to trust the older one for an hour."""
    source, content = Replaced(), MemoryContent()
    content.set_capacity(1 << 20)
    async with bare_filesystem(source, content, MemoryRecords(TABLES), tmp_path, settings=Settings()) as bare:
        source.catalogue = bare.catalogue
        inode = (await bare.filesystem.lookup(ROOT_INODE, b"x", CALLER)).attributes.inode
        with pytest.raises(Stale):
            await bare.filesystem.open(inode, os.O_RDONLY, CALLER)
        entry = await bare.filesystem.lookup(ROOT_INODE, b"x", CALLER)
        assert bare.catalogue.find(ROOT_INODE, b"x").inode != entry.attributes.inode
        assert entry.timeout_s == 0.0


async def test_an_open_of_a_large_file_is_never_stale(tmp_path: Path) -> None:
    """Before each open another worker comes to know a newer version; the first READ may be of one that is gone."""
    source, content = MemorySource(), MemoryContent()
    versions = [bytes([number]) * 200 for number in range(4)]
    source.add(b"x", versions[0])
    settings = Settings(sample_max_bytes=100)
    async with bare_filesystem(source, content, MemoryRecords(TABLES), tmp_path, settings=settings) as bare:

        async def look_up(newer: bytes | None) -> int:
            """The version that is there; then another worker comes to know the newer one."""
            entry = await bare.filesystem.lookup(ROOT_INODE, b"x", CALLER)
            if newer is not None:
                bare.catalogue.record(ROOT_INODE, b"x", source.change(b"x", newer), time.time())
            return entry.attributes.inode

        inode = await look_up(versions[1])
        with pytest.raises(Stale):
            await bare.filesystem.open(inode, os.O_RDONLY, CALLER)
        inode = await look_up(versions[2])
        handle = (await bare.filesystem.open(inode, os.O_RDONLY, CALLER)).handle
        with pytest.raises(Stale):
            await bare.filesystem.read(handle, 0, 200, inode)
        # What the thread opens after that is another affair.
        inode = await look_up(versions[3])
        with pytest.raises(Stale):
            await bare.filesystem.open(inode, os.O_RDONLY, CALLER)
        inode = await look_up(None)
        handle = (await bare.filesystem.open(inode, os.O_RDONLY, CALLER)).handle
        assert bytes(await bare.filesystem.read(handle, 0, 200, inode)) == versions[3]


def test_no_thread_loses_its_note_to_others() -> None:
    unstored = UnstoredBytes()
    threads = range(1000, 2000)
    for thread in threads:
        unstored.open_failed(thread)
        unstored.remember_read(thread, inode=thread * 7919, handle=thread + 1)
    for thread in threads:
        assert unstored.opens_again(thread)
        assert unstored.has_unused_read(thread, thread * 7919)
        assert unstored.take(Caller(0, 0, thread), thread * 7919) == thread + 1


def test_a_note_is_there_for_one_request_even_if_two_workers_answer_it() -> None:
    """After the death of a worker the kernel hands out again what other workers hold, too."""
    unstored = UnstoredBytes()
    unstored.remember_read(1000, inode=7, handle=5)
    assert unstored.take(Caller(0, 0, 1000, 20), 7) == 5
    assert unstored.take(Caller(0, 0, 1000, 20), 7) == 5
    assert unstored.take(Caller(0, 0, 1000, 22), 7) is None
    assert not unstored.has_unused_read(1000, 7)
    # The first of both has read the file itself, and gives up what the look-up has read.
    unstored.remember_read(1000, inode=7, handle=5)
    assert unstored.take(Caller(0, 0, 1000, 22), 7, instead=11) == 5
    assert unstored.take(Caller(0, 0, 1000, 22), 7) == 11
    # A look-up that comes twice, and late, is another affair.
    unstored.remember_read(1000, inode=7, handle=6)
    unstored.remember_read(1000, inode=8, handle=9)
    assert unstored.take(Caller(0, 0, 1000, 24), 7) == 6
    for handle in (5, 6):
        unstored.remember_read(1001, inode=7, handle=handle)
        assert unstored.take(Caller(0, 0, 1001), 7) == handle
        assert unstored.take(Caller(0, 0, 1001), 7) is None


# -- on a machine that has just booted


THREAD, OTHER = 7, 8


@pytest.mark.clock
def test_no_open_has_failed_on_a_machine_that_has_just_booted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.5)
    unstored = UnstoredBytes()
    assert not unstored.opens_again(THREAD)
    unstored.open_failed(THREAD)
    assert unstored.opens_again(THREAD)
    assert not unstored.opens_again(OTHER)
    unstored.open_succeeded(THREAD)
    assert not unstored.opens_again(THREAD)
