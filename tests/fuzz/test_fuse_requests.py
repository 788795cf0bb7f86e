"""FUSE requests of any kind, size and content: each is answered, no answer is longer than was asked for."""

from __future__ import annotations

import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import trio
from fuzzing import examples, integers, packed
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fakes import FakeKernel, MemoryContent, MemorySource, bare_filesystem, notes_of_sole_worker
from spiderfs.errors import ConfigError, SpiderfsError
from spiderfs.fuse import session, wire
from spiderfs.fuse.bindings import Operations
from spiderfs.fuse.kernel import Handles, error_number
from spiderfs.fuse.wire import Opcode
from spiderfs.metrics import Counters
from spiderfs.sources.client import SourceLimits
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES
from spiderfs.vfs.control_files import CONTROL_INODE
from spiderfs.vfs.filesystem import Filesystem
from spiderfs.vfs.rules import Settings

CONTENT = bytes(range(256)) * 40
PATIENCE_S = 20.0


class _Manager:
    async def render(self, name: str, take: Callable[[bytes], None]) -> None:
        take(CONTENT)

    async def apply(self, name: str, text: bytes) -> None:
        raise ConfigError(name)


def _source() -> MemorySource:
    source = MemorySource()
    source.add(b"small", CONTENT)
    source.add(b"empty")
    source.add(b"directory/one", b"one")
    source.add_symlink(b"link", b"small")
    return source


class Served(NamedTuple):
    operations: Operations
    filesystem: Filesystem
    counters: Counters
    inodes: list[int]
    """The inodes of all that there is."""


@asynccontextmanager
async def serving(place: Path) -> AsyncIterator[Served]:
    """All that answers requests, over a source and a store in memory."""
    content, records = MemoryContent(), MemoryRecords(TABLES)
    content.set_capacity(1 << 20)
    settings, limits = Settings(sample_max_bytes=1 << 16), SourceLimits(attempts=1)
    async with bare_filesystem(
        _source(), content, records, place, settings=settings, limits=limits, control=_Manager()
    ) as bare:
        inodes = [ROOT_INODE, CONTROL_INODE, CONTROL_INODE + 1, CONTROL_INODE + 4]
        for name in (b"small", b"empty", b"directory", b"link"):
            entry = await bare.filesystem.lookup(ROOT_INODE, name, Caller(0, 0, 1))
            inodes.append(entry.attributes.inode)
        yield Served(
            Operations(bare.filesystem, bare.counters, FakeKernel().push, Handles(sole=False)),
            bare.filesystem,
            bare.counters,
            inodes,
        )


# What a body begins with, as linux/fuse.h has it, and whether bytes of the caller's follow.
BODIES: dict[int, tuple[struct.Struct, bool]] = {
    Opcode.LOOKUP: (struct.Struct("<"), True),
    Opcode.FORGET: (struct.Struct("<Q"), False),
    Opcode.BATCH_FORGET: (struct.Struct("<II"), True),
    Opcode.GETATTR: (struct.Struct("<IIQ"), False),
    Opcode.SETATTR: (struct.Struct("<IIQQQQQQIIIIIIII"), False),
    Opcode.OPEN: (struct.Struct("<II"), False),
    Opcode.READ: (struct.Struct("<QQIIQII"), False),
    Opcode.WRITE: (struct.Struct("<QQIIQII"), True),
    Opcode.RELEASE: (struct.Struct("<QIIQ"), False),
    Opcode.GETXATTR: (struct.Struct("<II"), True),
    Opcode.LISTXATTR: (struct.Struct("<II"), False),
    Opcode.OPENDIR: (struct.Struct("<II"), False),
    Opcode.READDIRPLUS: (struct.Struct("<QQIIQII"), False),
    Opcode.RELEASEDIR: (struct.Struct("<QIIQ"), False),
    Opcode.ACCESS: (struct.Struct("<II"), False),
}
NAMES = st.sampled_from([b"small", b"directory", b".spiderfs", b"user.spiderfs.state", b"user.x", b"..", b""])
# The most bytes that may be answered, as a word of the body says; the kernel refuses more.
SIZE_AT = {Opcode.READ: 16, Opcode.READDIRPLUS: 16, Opcode.GETXATTR: 0, Opcode.LISTXATTR: 0}


@st.composite
def bodies(draw: st.DrawFn, opcode: int) -> bytes:
    form, more = BODIES.get(opcode, (struct.Struct("<QQ"), True))
    body = draw(packed(form)) if form.size else b""
    if more:
        body += draw(NAMES | st.binary(max_size=300)) + draw(st.sampled_from([b"\0", b""]))
    if draw(st.booleans()):
        return body
    return draw(st.sampled_from([body[: draw(st.integers(0, len(body)))], body + bytes(draw(st.integers(1, 100)))]))


REQUESTS = st.sampled_from(sorted({int(opcode) for opcode in Opcode} - {Opcode.INIT})).flatmap(
    lambda opcode: st.tuples(st.just(opcode), st.integers(0, 7) | integers(64), bodies(opcode))
)


@examples(40)
@given(requests=st.lists(REQUESTS, min_size=10, max_size=40))
def test_any_request_is_answered(requests: list[tuple[int, int, bytes]], tmp_path: Path) -> None:
    async def live() -> None:
        async with serving(tmp_path) as served:
            inodes, handlers = served.inodes, served.operations.handlers()
            for opcode, inode, body in requests:
                given = inodes[inode] if inode < len(inodes) else inode
                try:
                    answer = await handlers[opcode](given, memoryview(body), Caller(0, 0, 1), 1)
                except SpiderfsError:
                    continue
                if answer is not None and opcode in SIZE_AT and (size := _word(body, SIZE_AT[Opcode(opcode)])):
                    assert len(answer) <= size
            assert await served.filesystem.read(inodes[4], 0, 1 << 20) == CONTENT

    trio.run(live)


def _word(body: bytes, at: int) -> int:
    return int.from_bytes(body[at : at + 4], "little")


MESSAGES = st.binary(max_size=200) | st.builds(
    lambda request, length, unique: (
        wire.IN_HEADER.pack(length, request[0], unique, request[1], 0, 0, 1, 0) + request[2]
    ),
    REQUESTS,
    integers(32),
    integers(64),
)


@examples(10)
@given(messages=st.lists(MESSAGES.filter(bool), min_size=1, max_size=30))
def test_any_message_leaves_a_worker_that_answers(messages: list[bytes], tmp_path: Path) -> None:
    """Whatever was said before, a good request is answered."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    ours.settimeout(PATIENCE_S)
    last = 77

    def ask() -> None:
        for message in messages:
            ours.send(message)
        ours.send(wire.IN_HEADER.pack(40, Opcode.GETATTR, last, ROOT_INODE, 0, 0, 1, 0) + bytes(16))
        while True:
            answer = ours.recv(1 << 21)
            length, error, unique = wire.OUT_HEADER.unpack_from(answer)
            assert length == len(answer)
            if unique == last and not error and len(answer) == wire.OUT_HEADER.size + 104:
                found = struct.unpack_from("<I", answer, wire.OUT_HEADER.size + 16 + 60)[0]
                assert stat.S_ISDIR(found)
                return

    async def live() -> None:
        async with serving(tmp_path) as served, trio.open_nursery() as nursery:
            loop = session.RequestLoop(
                theirs.fileno(),
                served.operations.handlers(),
                lambda exc: error_number(exc, served.counters),
                served.counters,
                lambda: None,
                lambda: False,
                notes_of_sole_worker(served.counters),
            )
            nursery.start_soon(loop.serve)
            with trio.fail_after(PATIENCE_S):
                await trio.to_thread.run_sync(ask)
            assert served.counters.value("internal_errors") == 0
            nursery.cancel_scope.cancel()

    with ours, theirs:
        trio.run(live)
