"""Reading in another process: what the source says, for many at a time, and no longer than that process lives."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from mounting import eventually, is_running

from benchmarks.fakes import MemorySource
from benchmarks.fakes.faulty_source import HANG, Faults, FaultySource
from spiderfs.errors import SourceNotFound, SourceUnavailable
from spiderfs.linux.memory import keep_freed_memory
from spiderfs.sources.in_flight import InFlight
from spiderfs.sources.local import LocalSource
from spiderfs.sources.read_process import ReadProcess
from spiderfs.sources.source import Source, Version

PATIENCE_S = 20.0
LONGEST = 3 << 20


@asynccontextmanager
async def reading(source: Source, limit: int = 4, **more: Any) -> AsyncIterator[ReadProcess]:
    process = ReadProcess(source, limit, LONGEST, **{"before": lambda: None, **more})
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.attend)
            yield process
            nursery.cancel_scope.cancel()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        process.close()


async def test_many_read_at_once_with_few_slots(tmp_path: Path) -> None:
    source = LocalSource(os.fspath(tmp_path))
    contents = {b"%03d" % number: os.urandom(number * 1000) for number in range(60)}
    for name, content in contents.items():
        (tmp_path / os.fsdecode(name)).write_bytes(content)
    found: dict[bytes, bytes] = {}
    async with reading(source) as process:

        async def read(name: bytes) -> None:
            version = source.stat(name).version
            found[name] = await process.read(name, 0, version.size, version)

        async with trio.open_nursery() as nursery:
            for name in contents:
                nursery.start_soon(read, name)
    assert found == contents
    source.close()


async def test_who_waits_for_the_next_read_keeps_no_bytes() -> None:
    source, limit = MemorySource(), 8
    version = source.add(b"file", bytes(LONGEST)).version

    def taken_bytes() -> int:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) << 10

    async with reading(source, limit, before=lambda: keep_freed_memory(1 << 20)) as process:
        await process.read(b"file", 0, 1, version)
        before = taken_bytes()
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for _ in range(limit):
                    nursery.start_soon(process.read, b"file", 1, LONGEST - 1, version)
        assert taken_bytes() < before + 2 * LONGEST


async def test_so_many_bytes_are_in_flight() -> None:
    source, noted = MemorySource(), [0]
    versions = {b"%d" % number: source.add(b"%d" % number, bytes(400_000)).version for number in range(12)}
    large = source.add(b"large", bytes(LONGEST)).version

    async def read(name: bytes) -> None:
        assert len(await process.read(name, 0, 400_000, versions[name])) == 400_000

    async with reading(source, 8, in_flight=InFlight(1_000_000, noted.append)) as process:
        async with trio.open_nursery() as nursery:
            for name in versions:
                nursery.start_soon(read, name)
        assert (max(noted), noted[-1]) == (800_000, 0)
        # One that is larger goes alone.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, b"1")
            nursery.start_soon(process.read, b"large", 0, LONGEST, large)
            nursery.start_soon(read, b"2")
        assert (max(noted), noted[-1]) == (LONGEST, 0)


async def test_a_read_that_was_given_up_holds_up_no_other() -> None:
    faults, memory = Faults.made(), MemorySource()
    version = memory.add(b"x", b"content").version
    async with reading(FaultySource(memory, faults), in_flight=InFlight(7)) as process:
        faults.set(HANG, 1)
        with trio.move_on_after(0.05):
            await process.read(b"x", 0, 7, version)
        with trio.move_on_after(0.05):
            # Its turn has come, and this one hangs too.
            await process.read(b"x", 0, 7, version)
        assert len(process._tasks) == 2
        faults.set(HANG, 0)
        assert await process.read(b"x", 0, 7, version) == b"content"
        while process._tasks:
            await trio.sleep(0.001)
        assert process.in_flight.held_bytes == 0


async def test_what_no_slot_can_hold_is_refused() -> None:
    async with reading(MemorySource()) as process:
        for path, length in ((b"file", LONGEST + 1), (b"x" * LONGEST, 1)):
            with pytest.raises(SourceUnavailable, match="more than"):
                await process.read(path, 0, length, Version(1, 1))


async def test_who_gives_up_leaves_the_slot_to_the_read(tmp_path: Path) -> None:
    memory = MemorySource()
    version = memory.add(b"file", b"content").version
    faults = Faults.made({HANG: 1})
    async with reading(FaultySource(memory, faults), 2) as process:
        for _ in range(2):
            with trio.move_on_after(0.01) as scope:
                await process.read(b"file", 0, 7, version)
            assert scope.cancelled_caught
        with trio.move_on_after(0.01) as scope:
            # There is no slot left; nor does one who gives up here keep any.
            await process.read(b"file", 0, 7, version)
        assert scope.cancelled_caught
        faults.set(HANG, 0)
        assert await process.read(b"file", 0, 7, version) == b"content"


class Deliver:
    def __init__(self, head: bytes, answer: bytes) -> None:
        self._texts, self.done = (head, answer), False

    def messages(self, size: int) -> tuple[bytes, bytes]:
        return self._texts


@asynccontextmanager
async def delivering(source: Source) -> AsyncIterator[tuple[ReadProcess, socket.socket, socket.socket]]:
    """The process, where its deliveries come out, and what it writes them to."""
    there, descriptor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there, descriptor:
        async with reading(source, deliver_to=descriptor.fileno()) as process:
            yield process, there, descriptor


class Held(MemorySource):
    """A source that reads when it is told to, by whichever process."""

    def __init__(self) -> None:
        super().__init__()
        self._told, self._tell = os.pipe()

    def go(self) -> None:
        os.write(self._tell, b"!")

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        os.read(self._told, 1)
        return super().read(path, offset, length, version)

    def close(self) -> None:
        os.close(self._told)
        os.close(self._tell)


async def test_who_waits_in_another_place_is_given_the_bytes_first() -> None:
    source = Held()
    content = os.urandom(100_000)
    version = source.add(b"file", content).version
    async with delivering(source) as (process, there, _):
        delivery = Deliver(b"head", b"answer")
        heard: list[str] = []

        async def read() -> None:
            assert await process.read(b"file", 0, len(content), version, delivery) == content
            heard.append("read")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            # From here on the loop stands still: nothing is heard here meanwhile.
            source.go()
            assert there.recv(1 << 20) == b"head" + content
            assert there.recv(1 << 20) == b"answer"
            assert process.behind
            await process.caught_up()
            assert heard == ["read"]
            assert not process.behind
        assert delivery.done
    source.close()


async def test_an_answer_may_be_all_that_is_written() -> None:
    source = MemorySource()
    version = source.add(b"file", b"content").version
    async with delivering(source) as (process, there, _):
        delivery = Deliver(b"head", b"")
        assert await process.read(b"file", 0, 7, version, delivery) == b"content"
        assert delivery.done
        assert there.recv(1 << 20) == b"headcontent"
        there.setblocking(False)
        with pytest.raises(BlockingIOError):
            there.recv(1 << 20)
        await process.caught_up()
        assert not process.behind


async def test_what_cannot_be_delivered_is_left_to_the_caller() -> None:
    source = MemorySource()
    version = source.add(b"file", b"content").version
    async with delivering(source) as (process, there, _):
        short, failed = Deliver(b"head", b"answer"), Deliver(b"head", b"answer")
        assert await process.read(b"file", 3, 7, version, short) == b"tent"
        with pytest.raises(SourceNotFound):
            await process.read(b"nothing", 0, 7, version, failed)
        there.setblocking(False)
        with pytest.raises(BlockingIOError):
            there.recv(1 << 20)
        assert [short.done, failed.done] == [False, False]
        await process.caught_up()
        assert not process.behind


async def test_what_the_descriptor_refuses_is_left_to_the_caller() -> None:
    source = MemorySource()
    version = source.add(b"file", b"content").version
    with open(os.devnull) as read_only:
        async with reading(source, deliver_to=read_only.fileno()) as process:
            refused = Deliver(b"head", b"answer")
            assert await process.read(b"file", 0, 7, version, refused) == b"content"
            assert not refused.done


async def test_a_delivery_that_is_held_up_holds_up_no_one_else() -> None:
    source = MemorySource()
    version = source.add(b"file", b"x" * 4096).version
    async with delivering(source) as (process, _, descriptor):

        async def read() -> None:
            await process.read(b"file", 0, 4096, version, Deliver(b"head", b"answer"))

        descriptor.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                descriptor.send(b"x" * 4096)  # until there is no room
        descriptor.setblocking(True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            while not process.behind:
                await trio.sleep(0.001)
            await process.caught_up()
            assert process.behind
            assert await process.read(b"file", 0, 1, version) == b"x"
            nursery.cancel_scope.cancel()


async def test_its_end_is_reported() -> None:
    source = MemorySource()
    version = source.add(b"file", b"content").version
    with pytest.RaisesGroup(pytest.RaisesExc(SourceUnavailable, match="has ended")):
        async with reading(source) as process:
            assert await process.read(b"file", 0, 7, version) == b"content"
            os.kill(process.pid, signal.SIGKILL)
            await process.read(b"file", 0, 7, version)


def test_it_ends_with_whoever_made_it() -> None:
    told, tell = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            process = ReadProcess(MemorySource(), 2, LONGEST, before=lambda: None)
            os.write(tell, process.pid.to_bytes(4, "little"))
            signal.pause()
        finally:
            os._exit(1)
    pid = int.from_bytes(os.read(told, 4), "little")
    for descriptor in (told, tell):
        os.close(descriptor)
    assert is_running(pid)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    eventually(lambda: not is_running(pid), what="its end")
