"""What each part of a cached request costs a worker, without kernel and FUSE: microseconds, the best of many rounds.

    .venv/bin/python benchmarks/request_path.py

The parts are measured one by one in one process, over 1,000 small files in the order of a random permutation. What the
kernel adds (waking the daemon, copying, waking the reader) is the rest of what `benchmarks/serve.py` shows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import trio
from rich import box
from rich.console import Console
from rich.table import Table

from spiderfs.catalogue import TABLES, Catalogue
from spiderfs.control import Control
from spiderfs.daemon.event_pipe import EventWriter, open_pipe
from spiderfs.fetcher import Episode, Fetcher, Interlock
from spiderfs.filesystem import Caller, Filesystem, Settings
from spiderfs.fuse import wire
from spiderfs.fuse.operations import Operations
from spiderfs.fuse.wire import Opcode
from spiderfs.lister import Lister
from spiderfs.metrics import SharedCounters
from spiderfs.read_ahead import ReadAhead
from spiderfs.redirects import Attached, PendingReads, Redirects, started_at
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.local import LocalSource
from spiderfs.store.content import LmdbContent
from spiderfs.store.records import LmdbRecords
from spiderfs.store.store import ContentKey

FILES = 1000
FILE_BYTES = 2000
ROUNDS = 15
# (part, the most microseconds it may take); what has no figure is part of what has one
TARGETS = {"store: is it there": 10.0, "catalogue: what is it": 10.0, "who asks, with no trainer": 2.0}


class Asked:
    """Parts of the request path, each a function of an inode."""

    def __init__(self, filesystem: Filesystem, operations: Operations, content: LmdbContent, inodes: list[int]) -> None:
        self.filesystem = filesystem
        self.handlers = operations.handlers()
        self.content = content
        self.inodes = inodes
        self.caller = Caller(os.getuid(), os.getgid(), os.getpid())

    def answer(self, opcode: Opcode, inode: int, body: bytes) -> object:
        result = at_once(self.handlers[opcode](inode, memoryview(body), self.caller))
        self.content.end_read()
        return result

    def microseconds(self, part: Callable[[int], object]) -> float:
        """Per call, in the best round."""
        best = float("inf")
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            for inode in self.inodes:
                part(inode)
            best = min(best, time.perf_counter() - begin)
        return best / len(self.inodes) * 1e6


def at_once(coroutine: Coroutine[Any, Any, object]) -> object:
    """The result of a coroutine that does not wait for anything, as a cached request does not."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a cached request had to wait")


async def measure(directory: Path) -> dict[str, float]:
    source_root = directory / "source"
    for place in (source_root, directory / "content", directory / "names"):
        place.mkdir()
    names = [b"%04d" % number for number in range(FILES)]
    for name in names:
        (source_root / os.fsdecode(name)).write_bytes(os.urandom(FILE_BYTES))
    counters = SharedCounters(1).row(0)
    content, records = LmdbContent(directory / "content"), LmdbRecords(directory / "names", TABLES)
    content.set_capacity(1 << 30)
    source = LocalSource(os.fspath(source_root))
    client = SourceClient(source, SourceLimits(), rng=random.Random(0), on_event=counters.add)
    catalogue = Catalogue(records)
    lister = Lister(catalogue, client)
    fetcher = Fetcher(
        source, client, content, Interlock(directory / "lock"), Episode(directory / "full"), counters, alone=True
    )
    # Nobody reads the pipe: once it is full a batch costs what it costs, and is dropped.
    events = EventWriter(open_pipe()[1], counters)
    redirects = Redirects(records, PendingReads())
    async with trio.open_nursery() as nursery:
        filesystem = Filesystem(
            catalogue=catalogue,
            content=content,
            client=client,
            lister=lister,
            fetcher=fetcher,
            read_ahead=ReadAhead(nursery, fetcher, counters, 8),
            redirects=redirects,
            control=Control(_NoManager(), directory, os.getuid()),
            events=events,
            counters=counters,
            settings=Settings(),
        )
        root = await lister.root()
        await lister.complete(root, 1.0)
        entries = {entry.name: entry.inode for entry in catalogue.entries(root.inode, 0, FILES)}
        inodes = random.Random(0).sample(list(entries.values()), FILES)
        asked = Asked(filesystem, Operations(filesystem, counters), content, inodes)
        for inode in inodes:
            await filesystem.open(inode, os.O_RDONLY, asked.caller)
        await fetcher.drain()
        return parts(asked, content, catalogue, counters, events, redirects, {v: k for k, v in entries.items()})


def parts(
    asked: Asked,
    content: LmdbContent,
    catalogue: Catalogue,
    counters: Any,
    events: EventWriter,
    redirects: Redirects,
    names: dict[int, bytes],
) -> dict[str, float]:
    open_in = bytes(8)
    request = bytearray(wire.IN_HEADER.pack(48, Opcode.OPEN, 1, 2, 0, 0, 1, 0))

    def store(inode: int) -> None:
        content.has(ContentKey(inode))
        content.end_read()

    def read(inode: int) -> None:
        content.read(ContentKey(inode))
        content.end_read()

    def read_in(inode: int) -> bytes:
        return wire.READ_IN.pack(inode, 0, 131072) + bytes(20)

    me = os.getpid()
    found = {
        "header of the request": asked.microseconds(lambda _: Caller(*wire.IN_HEADER.unpack_from(request)[4:7])),
        "catalogue: what is it": asked.microseconds(catalogue.node),
        "store: is it there": asked.microseconds(store),
        "store: its bytes, checksum verified": asked.microseconds(read),
        "who asks, with no trainer": asked.microseconds(lambda _: redirects.attended),
        "counters": asked.microseconds(lambda _: counters.add("opens")),
        "histogram": asked.microseconds(lambda _: counters.observe("open_hit_seconds", 30e-6)),
        "event": asked.microseconds(lambda inode: events.note(inode, FILE_BYTES, 0, me)),
        "OPEN, all of it": asked.microseconds(lambda inode: asked.answer(Opcode.OPEN, inode, open_in)),
        "READ, all of it": asked.microseconds(lambda inode: asked.answer(Opcode.READ, inode, read_in(inode))),
        "RELEASE, all of it": asked.microseconds(
            lambda inode: asked.answer(Opcode.RELEASE, inode, wire.HANDLE.pack(inode) + bytes(16))
        ),
        "LOOKUP, all of it": asked.microseconds(lambda inode: asked.answer(Opcode.LOOKUP, 1, names[inode] + b"\0")),
    }
    redirects.set_trainers([Attached(1, me, started_at(me), (1,))], "trainer")
    found["who asks, with a trainer"] = asked.microseconds(lambda _: redirects.trainer_of(me))
    return found


class _NoManager:
    async def render(self, name: str) -> bytes:
        raise AssertionError("no control file is asked for")

    async def apply(self, name: str, text: bytes) -> None:
        raise AssertionError("no control file is written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spiderfs-request-path.") as directory:
        found = trio.run(measure, Path(directory))
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for heading in ("part", "us", "target", ""):
        table.add_column(heading, justify="right" if heading in ("us", "target") else "left")
    for part, microseconds in found.items():
        target = TARGETS.get(part)
        word = "" if target is None else "reached" if microseconds < target else "missed"
        table.add_row(part, f"{microseconds:.2f}", "" if target is None else f"< {target:g}", word)
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
