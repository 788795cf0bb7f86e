"""The binding that leaves the protocol to pyfuse3: a socket stands for the kernel."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pyfuse3
import pytest
import trio
from mounting import eventually

from benchmarks.fakes import MemoryContent, MemorySource, bare_filesystem, notes_of_sole_worker
from spiderfs.errors import StoreCorrupt
from spiderfs.fuse import pyfuse3_binding, wire
from spiderfs.fuse.kernel import Handles, Serving
from spiderfs.fuse.pyfuse3_binding import Alarm, Pyfuse3Binding, looking_before_waiting
from spiderfs.fuse.wire import Opcode
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES
from spiderfs.vfs.filesystem import Filesystem

PATIENCE_S = 10.0


class Kernel:
    """The other end of the descriptor: messages are kept apart, as those of /dev/fuse are."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE_S)
        self.binding = Pyfuse3Binding(theirs.detach())
        self._asked = 0

    def ask(self, opcode: int, body: bytes = b"", inode: int = ROOT_INODE) -> tuple[int, bytes]:
        """Error number and what follows."""
        self._asked += 1
        header = wire.IN_HEADER.pack(wire.IN_HEADER.size + len(body), opcode, self._asked, inode, 0, 0, 1, 0)
        self.socket.send(header + body)
        message = self.socket.recv(1 << 21)
        length, error, number = wire.OUT_HEADER.unpack_from(message)
        assert (length, number) == (len(message), self._asked)
        return -error, message[wire.OUT_HEADER.size :]


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    yield made
    made.socket.close()
    made.binding.leave()


def serve_until(kernel: Kernel, ask: Callable[[], object], place: Path, ticks: list[float] | None = None) -> None:
    """Serve until `ask`, in a thread of its own, returns; meanwhile `ticks` gets the time every 5 ms."""
    source = MemorySource()
    source.add(b"file", b"content")
    content = MemoryContent()
    content.set_capacity(1 << 20)

    async def tick() -> None:
        while ticks is not None:
            ticks.append(trio.current_time())
            await trio.sleep(0.005)

    async def live() -> None:
        async with bare_filesystem(source, content, MemoryRecords(TABLES), place) as bare:
            held = notes_of_sole_worker(bare.counters)
            serving = Serving(bare.filesystem, bare.counters, content.end_read, Handles(sole=False), held)
            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(tick)
                    nursery.start_soon(kernel.binding.serve, serving)
                    await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
                    nursery.cancel_scope.cancel()

    trio.run(live)


def test_a_vanished_request_holds_no_one_up(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyfuse3 reads where nothing is, as when a reader was killed after the kernel had said that it waits."""
    lies = 0

    @contextlib.contextmanager
    def lying(descriptor: int, alarm: Alarm) -> Iterator[None]:
        module = pyfuse3_binding.pyfuse3
        wait = module._wait_fuse_readable

        async def lie_now_and_then() -> bool:
            nonlocal lies
            if lies < 5:
                lies += 1
                return True
            return bool(await wait())

        monkeypatch.setattr(module, "_wait_fuse_readable", lie_now_and_then)
        yield

    monkeypatch.setattr(pyfuse3_binding, "looking_before_waiting", lying)
    ticks: list[float] = []

    def ask() -> None:
        until = 10 * pyfuse3_binding._HELD_UP_S
        with contextlib.suppress(TimeoutError):
            kernel.socket.settimeout(until)
            kernel.socket.recv(1)
        kernel.socket.settimeout(PATIENCE_S)
        assert kernel.ask(Opcode.GETATTR, bytes(16))[0] == 0

    serve_until(kernel, ask, tmp_path, ticks)
    assert lies == 5
    # No one asked for anything while all five were held up, one after the other.
    assert len(ticks) > 20


def test_an_unreadable_answer_ends_the_worker(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyfuse3 has given the request up by then; its reader would wait for ever."""
    path = tmp_path / "mapped"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        file.truncate(0)

    async def gone(self: Filesystem, *arguments: int) -> memoryview:
        return memoryview(mapped)

    monkeypatch.setattr(Filesystem, "read", gone)

    def ask() -> None:
        kernel.ask(Opcode.READ, struct.pack("<QQIIQII", 5, 0, 100, 0, 0, 0, 0), 5)

    with pytest.RaisesGroup(pytest.RaisesExc(StoreCorrupt), flatten_subgroups=True):
        serve_until(kernel, ask, tmp_path / "place")


def test_a_wait_of_another_kind_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def of_a_later_version(descriptor: int) -> bool:
        return True

    ours, theirs = socket.socketpair()
    with ours, theirs:
        for wait in (of_a_later_version, lambda: True, None):
            monkeypatch.setattr(pyfuse3, "_wait_fuse_readable", wait)
            alarm = Alarm()
            with looking_before_waiting(ours.fileno(), alarm):
                assert pyfuse3._wait_fuse_readable is wait
                assert not alarm.may_rest, "no one announces a read"
            alarm.rest()


def test_the_alarm_rests_while_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyfuse3_binding, "_HELD_UP_S", 0.005)
    rings = 0

    class Counted(Alarm):
        def _rung(self, number: int, frame: object) -> None:
            nonlocal rings
            rings += 1
            super()._rung(number, frame)

    alarm = Counted()
    try:
        eventually(lambda: rings > 3, what="it rings for ever where reads are not announced")
        alarm.may_rest = True
        for _ in range(3):
            alarm.announced()
            before = rings
            eventually(lambda before=before: rings >= before + 1, what="a ring for what was announced")
            eventually(lambda: signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0))
    finally:
        alarm.rest()


def test_what_no_one_waits_for_any_more_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("pyfuse3")
    before = logger.filters[:]
    logger.addFilter(pyfuse3_binding._is_news)
    try:
        logger.error("fuse_read(): fuse_reply_* failed with %s", os.strerror(errno.ENOENT))
        logger.error("fuse_read(): fuse_reply_* failed with %s", os.strerror(errno.EINVAL))
    finally:
        logger.filters[:] = before
    assert [record.args for record in caplog.records] == [(os.strerror(errno.EINVAL),)]
