"""The adapter where the kernel opens files without asking: which requests it answers, and what it tells the kernel."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import trio

from benchmarks.fakes import FakeKernel, MemoryContent, MemorySource, bare_filesystem
from spiderfs.errors import NoAttribute, ReadOnly
from spiderfs.fuse import wire
from spiderfs.fuse.bindings import ImmutableOperations, ReadDelivery
from spiderfs.fuse.wire import InitFlag, Opcode
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES
from spiderfs.vfs.control_files import CONTROL_INODE
from spiderfs.vfs.immutable_filesystem import ImmutableFilesystem

CALLER = Caller(0, 0, 1)


def test_an_open_that_truncates_is_a_request_of_its_own() -> None:
    body = memoryview(struct.pack("<IIII", 7, 40, 1 << 17, 0xFFFFFFFF) + bytes(48))
    for immutable in (True, False):
        (flags,) = struct.unpack_from("<12xI", wire.init_out(body, immutable))
        assert bool(flags & InitFlag.ATOMIC_O_TRUNC) != immutable
        assert flags & InitFlag.DO_READDIRPLUS


def test_the_reading_process_answers_a_read_of_the_whole_file() -> None:
    delivery = ReadDelivery(4096, 12)
    assert delivery.messages(4096) == (wire.answered(12, bytes(4096))[:16], b"")
    assert delivery.messages(4097) is None
    assert not delivery.done


async def test_opens_are_not_answered_and_spoilt_pages_are_dropped(tmp_path: Path) -> None:
    source, content, kernel = MemorySource(), MemoryContent(), FakeKernel()
    source.add(b"file", b"content")
    content.set_capacity(1 << 20)
    async with bare_filesystem(source, content, MemoryRecords(TABLES), tmp_path, immutable=kernel) as bare:
        assert isinstance(bare.filesystem, ImmutableFilesystem)
        operations = ImmutableOperations(bare.filesystem, bare.counters, kernel.push, kernel.drop_pages)
        handlers = operations.handlers()
        assert Opcode.OPEN not in handlers
        assert Opcode.RELEASE not in handlers
        inode = (await bare.filesystem.lookup(ROOT_INODE, b"file", CALLER)).attributes.inode
        request = memoryview(struct.pack("<QQIIQII", 0, 3, 100, 0, 0, 0, 0))
        assert await handlers[Opcode.READ](inode, request, CALLER, 1) == b"tent"
        with pytest.raises(ReadOnly):
            await handlers[Opcode.WRITE](inode, request, CALLER, 2)
        with trio.fail_after(20):
            while kernel.dropped != [(inode, 3, 100)]:
                await trio.sleep(0.001)
        forgotten = memoryview(struct.pack("<II", 2, 0) + struct.pack("<QQ", inode, 1) * 2)
        assert wire.forgotten(forgotten) == [inode, inode]
        assert wire.forgotten(forgotten[:-1]) == [inode], "as much as there is"
        assert await handlers[Opcode.BATCH_FORGET](0, forgotten, CALLER, 3) is None
        length = memoryview(struct.pack("<II", 0, 0) + b"security.capability\0")
        assert await handlers[Opcode.GETXATTR](inode, length, CALLER, 4) == struct.pack("<II", 1, 0)
        value = memoryview(struct.pack("<II", 9, 0) + b"security.capability\0")
        for who, asked in ((inode, value), (CONTROL_INODE, length)):
            with pytest.raises(NoAttribute):
                await handlers[Opcode.GETXATTR](who, asked, CALLER, 5)
        with pytest.raises(ReadOnly):
            await handlers[Opcode.REMOVEXATTR](inode, length, CALLER, 6)
