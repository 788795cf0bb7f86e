"""The cost of each part of a cached request to a worker, without the kernel: microseconds, the best of many rounds.

    .venv-dev/bin/python -m benchmarks.serving.request_path             some seconds
    .venv-dev/bin/python -m benchmarks.serving.request_path --quick     a moment

The parts are measured one by one in one process, over 1,000 small files in random order. "Immutable" is where opens
are not asked for. There each open asks for its name while trainers may be given substitutes; half of these files have
one. The rest of the time that `benchmarks/serving/serve.py` shows is spent in the kernel, which wakes the daemon,
copies, and wakes the reader.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from rich.console import Console

from benchmarks.common.command import command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.results import plain_table
from benchmarks.common.sources import write
from benchmarks.fakes import Bare, FakeKernel, bare_filesystem
from spiderfs.daemon.pipes import EventWriter, open_pipe
from spiderfs.fuse import wire
from spiderfs.fuse.bindings import ImmutableOperations, Operations
from spiderfs.fuse.kernel import Handles, Kernel
from spiderfs.fuse.wire import Opcode
from spiderfs.linux.process_table import started_at
from spiderfs.metrics import SharedCounters
from spiderfs.shared.published import Attached
from spiderfs.sources.local import LocalSource
from spiderfs.sources.source import Source
from spiderfs.store.content import LmdbContent
from spiderfs.store.records import LmdbRecords
from spiderfs.store.store import Content, ContentKey
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES
from spiderfs.vfs.immutable_filesystem import ImmutableFilesystem
from spiderfs.vfs.redirects import redirect_row

FILES = 1000
FILE_BYTES = 2000
CAPACITY_BYTES = 4 << 30
ROUNDS, QUICK_ROUNDS = 15, 3
# The most microseconds that a part may take; the other parts have no target of their own.
TARGETS = {"store: is it there": 10.0, "catalogue: what is it": 10.0, "who asks, with no trainer": 2.0}


class Asked:
    """Times parts of the request path, each of which is a function of an inode."""

    def __init__(
        self, operations: Operations, content: Content, inodes: list[int], names: dict[int, bytes], rounds: int
    ) -> None:
        self.names = names
        self.handlers = operations.handlers()
        self.content = content
        self.inodes = inodes
        self.rounds = rounds
        self.caller = Caller(os.getuid(), os.getgid(), os.getpid())

    def answer(self, opcode: Opcode, inode: int, body: bytes) -> object:
        result = at_once(self.handlers[opcode](inode, memoryview(body), self.caller, 1))
        self.content.end_read()
        return result

    def look_up(self, inode: int) -> object:
        return self.answer(Opcode.LOOKUP, ROOT_INODE, self.names[inode] + b"\0")

    def read(self, inode: int) -> object:
        return self.answer(Opcode.READ, inode, wire.READ_IN.pack(inode, 0, 131072) + bytes(20))

    def microseconds(self, part: Callable[[int], object], before: Callable[[], None] = lambda: None) -> float:
        """The microseconds of processor time of a call, in the best round. (Load of others hardly changes it.)

        `before` is called before each round.
        """
        best = float("inf")
        for _ in range(self.rounds):
            before()
            begin = time.process_time()
            for inode in self.inodes:
                part(inode)
            best = min(best, time.process_time() - begin)
        return best / len(self.inodes) * 1e6


def at_once(coroutine: Coroutine[Any, Any, object]) -> object:
    """The result of a coroutine that waits for nothing, such as a cached request."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a cached request had to wait")


@asynccontextmanager
async def bare_on_disk(source: Source, place: Path, immutable: Kernel | None = None) -> AsyncIterator[Bare]:
    """Everything fits into the store, which is made in the directory `place`; `immutable`: see `bare_filesystem`."""
    for name in ("content", "names"):
        (place / name).mkdir(parents=True)
    content, records = LmdbContent(place / "content"), LmdbRecords(place / "names", TABLES)
    content.set_capacity(CAPACITY_BYTES)
    counters = SharedCounters(1).row(0)
    # No one reads the pipe: once it is full, a batch of events costs what it costs, and is dropped.
    events = EventWriter(open_pipe()[1], counters)
    async with bare_filesystem(
        source, content, records, place, events=events, counters=counters, alone=True, immutable=immutable
    ) as bare:
        yield bare


async def measured(directory: Path, rounds: int) -> dict[str, float]:
    source_root = directory / "source"
    source_root.mkdir()
    for number in range(FILES):
        write(source_root / f"{number:04d}", os.urandom(FILE_BYTES))
    source = LocalSource(os.fspath(source_root))
    async with bare_on_disk(source, directory / "cache") as bare:
        # As the one worker of a mount has them.
        operations = Operations(bare.filesystem, bare.counters, lambda inode, content: None, Handles(sole=True))
        asked = await asked_of(bare, operations, rounds)
        for inode in asked.inodes:
            await bare.filesystem.open(inode, os.O_RDONLY, asked.caller)
        await bare.fetcher.drain()
        found = parts(asked, bare)
    kernel = FakeKernel()
    async with bare_on_disk(source, directory / "immutable", immutable=kernel) as bare:
        filesystem = bare.filesystem
        assert isinstance(filesystem, ImmutableFilesystem)
        asked = await asked_of(
            bare, ImmutableOperations(filesystem, bare.counters, kernel.push, kernel.drop_pages), rounds
        )
        for inode in asked.inodes:
            await filesystem.read_immutable(inode, 0, FILE_BYTES + 1, asked.caller)
        await bare.fetcher.drain()
        return found | immutable_parts(asked, bare)


async def asked_of(bare: Bare, operations: Operations, rounds: int) -> Asked:
    """All names are known to the mount."""
    root = await bare.lister.root()
    await bare.lister.complete(root, 1.0)
    names = {entry.inode: entry.name for entry in bare.catalogue.entries(root.inode, 0, FILES)}
    return Asked(operations, bare.content, random.Random(0).sample(list(names), FILES), names, rounds)


def parts(asked: Asked, bare: Bare) -> dict[str, float]:
    content, catalogue, counters = bare.content, bare.catalogue, bare.counters
    events, redirects = bare.events, bare.redirects
    open_in = bytes(8)
    request = bytearray(wire.IN_HEADER.pack(48, Opcode.OPEN, 1, 2, 0, 0, 1, 0))

    def store(inode: int) -> None:
        content.has(ContentKey(inode))
        content.end_read()

    def read(inode: int) -> None:
        content.read(ContentKey(inode))
        content.end_read()

    me = os.getpid()
    found = {
        "header of the request": asked.microseconds(lambda _: Caller(*wire.IN_HEADER.unpack_from(request)[4:7])),
        "catalogue: what is it": asked.microseconds(catalogue.node),
        "store: is it there": asked.microseconds(store),
        "store: its bytes, checksum verified": asked.microseconds(read),
        "who asks, with no trainer": asked.microseconds(lambda _: redirects.attended),
        "counters": asked.microseconds(lambda _: counters.add("opens")),
        "histogram": asked.microseconds(lambda _: counters.observe("open_hit_seconds", 30e-6)),
        "event": asked.microseconds(lambda inode: events.record_access(inode, FILE_BYTES, 0, me)),
        "OPEN, all of it": asked.microseconds(lambda inode: asked.answer(Opcode.OPEN, inode, open_in)),
        "READ, all of it": asked.microseconds(asked.read),
        "RELEASE, all of it": asked.microseconds(
            lambda inode: asked.answer(Opcode.RELEASE, inode, wire.HANDLE.pack(inode) + bytes(16))
        ),
        "LOOKUP, all of it": asked.microseconds(asked.look_up),
    }
    redirects.set_trainers([Attached(1, me, started_at(me), (1,), True)], "trainer")
    found["who asks, with a trainer"] = asked.microseconds(lambda _: redirects.trainer_of(me))
    return found


def immutable_parts(asked: Asked, bare: Bare) -> dict[str, float]:
    found = {
        "immutable: READ, all of it": asked.microseconds(asked.read),
        "immutable: LOOKUP, all of it": asked.microseconds(asked.look_up),
    }
    me = os.getpid()
    halves = len(asked.inodes) // 2
    pairs = zip(asked.inodes[:halves], asked.inodes[halves:], strict=True)
    bare.records.put(redirect_row(1, wanted, substitute) for wanted, substitute in pairs)

    def meet() -> None:
        """No choice of an earlier round is to be remembered: a training looks each name up once in an epoch."""
        bare.redirects.set_trainers([Attached(1, me, started_at(me), (1,), True)], "trainer")

    return found | {
        "immutable: LOOKUP of a trainer": asked.microseconds(asked.look_up, before=meet),
        "immutable: READ of a trainer": asked.microseconds(asked.read, before=meet),
    }


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    with scratch_directory("request_path") as directory:
        found = trio.run(measured, directory, QUICK_ROUNDS if arguments.quick else ROUNDS)
    table = plain_table("Parts of a cached request", "", "us", "target", " ", words=("", " "))
    for part, microseconds in found.items():
        target = TARGETS.get(part)
        word = "" if target is None else "reached" if microseconds < target else "missed"
        table.add_row(part, f"{microseconds:.2f}", "" if target is None else f"< {target:g}", word)
    console.print(table)
    return {"us": found}


if __name__ == "__main__":
    main(measure, command_line(__doc__))
