"""Taking requests: everything else in the process gets on beside them, whoever waits for the next one."""

from __future__ import annotations

import errno
import os
import resource
import socket
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import trio
from mounting import eventually

from spiderfs.daemon.restarts import REFUSED_AFTER
from spiderfs.errors import Busy, DeadlyRequest, ReadOnly
from spiderfs.fuse import session, wire
from spiderfs.fuse.resent_requests import ResentRequests
from spiderfs.fuse.session import BURST, Body, Handler
from spiderfs.fuse.wire import Opcode
from spiderfs.metrics import SharedCounters
from spiderfs.sources.source import FIRST_INODE
from spiderfs.vfs.answer_types import Caller

pytestmark = pytest.mark.clock

PATIENCE_S = 10.0


class Kernel:
    """The other end of the descriptor: messages are kept apart, as those of /dev/fuse are."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        ours.settimeout(PATIENCE_S)
        self.socket, self.descriptor = ours, theirs.detach()
        self.asked = 0

    def ask(self, opcode: int = Opcode.OPEN, again: bool = False, body: bytes = b"", inode: int = 1) -> None:
        """`again`: as if a worker had died with this request."""
        self.asked += 1
        number = self.asked | wire.RESENT if again else self.asked
        self.socket.send(wire.IN_HEADER.pack(wire.IN_HEADER.size + len(body), opcode, number, inode, 0, 0, 1, 0) + body)

    def answer(self) -> tuple[int, int, bytes]:
        """Error number, number of the request, and what follows."""
        message = self.socket.recv(1 << 16)
        _, error, unique = wire.OUT_HEADER.unpack_from(message)
        return -error, unique, message[wire.OUT_HEADER.size :]

    def ask_and_wait(self, times: int) -> None:
        for _ in range(times):
            self.ask()
            assert self.answer() == (0, self.asked, b"yes")


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.socket.close()
    os.close(kernel.descriptor)


async def yes(inode: int, body: memoryview, caller: Caller, number: int) -> Body:
    return b"yes"


class Served:
    """Serves what a kernel asks, with one handler for OPEN."""

    def __init__(self, kernel: Kernel, handler: Handler = yes, at_rest: Callable[[], bool] = lambda: True) -> None:
        self.kernel = kernel
        self.counters = SharedCounters(1)
        self.resent = ResentRequests(1, session.MAX_WAITING, REFUSED_AFTER)
        self.handlers = {int(Opcode.OPEN): handler}
        self.at_rest = at_rest
        self.looked = 0

    def look(self) -> None:
        self.looked += 1

    def error_number(self, exc: Exception) -> int:
        assert isinstance(exc, ReadOnly | DeadlyRequest | Busy)
        return exc.errno

    def until(self, ask: Callable[[], object]) -> None:
        """Serve until `ask`, in a thread of its own, returns."""
        trio.run(self._until, ask)

    async def _until(self, ask: Callable[[], object]) -> None:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                row = self.counters.row(0)
                held = self.resent.of_worker(0, row)
                loop = session.RequestLoop(
                    self.kernel.descriptor, self.handlers, self.error_number, row, self.look, self.at_rest, held
                )
                nursery.start_soon(loop.serve)
                await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
                nursery.cancel_scope.cancel()


def test_requests_are_answered_in_turn(kernel: Kernel) -> None:
    served = Served(kernel)
    served.until(lambda: kernel.ask_and_wait(3 * BURST))
    assert served.looked > 3 * BURST


class Payload(bytearray):
    """Bytes of which it can be seen whether someone holds them."""


def test_a_task_that_rests_keeps_no_answer(kernel: Kernel) -> None:
    """A READ's answer is a view of all bytes of its file: hundreds of resting tasks would hold hundreds of files."""
    answers: list[weakref.ref[Payload]] = []

    async def after_a_wait(inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        await trio.sleep(0)
        payload = Payload(b"yes")
        answers.append(weakref.ref(payload))
        return memoryview(payload)

    def ask() -> None:
        kernel.ask_and_wait(1)
        eventually(lambda: answers[0]() is None, PATIENCE_S / 2, "the end of the answer")

    Served(kernel, after_a_wait).until(ask)


def test_errors_and_unknown_requests_are_answered(kernel: Kernel) -> None:
    async def refuse(inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        if number == 2:
            await trio.sleep(0)
        raise ReadOnly("no")

    def ask() -> None:
        for opcode in (Opcode.OPEN, Opcode.OPEN, Opcode.READLINK):
            kernel.ask(opcode)
        answers = [kernel.answer()[:2] for _ in range(3)]
        assert sorted(answers) == [(errno.EROFS, 1), (errno.EROFS, 2), (errno.ENOSYS, 3)]

    Served(kernel, refuse).until(ask)


def test_timers_get_on_while_the_next_request_is_waited_for(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "STANDBY_S", 4.0)
    late_s: list[float] = []

    def ask() -> None:
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            kernel.ask_and_wait(1)
            # So seldom that it is always waited for, and so often that the process never is idle.
            time.sleep(session.STANDBY_S / 4)

    async def tick() -> None:
        while True:
            due = trio.current_time() + 0.001
            await trio.sleep_until(due)
            late_s.append(trio.current_time() - due)

    async def both(served: Served) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick)
            await served._until(ask)
            nursery.cancel_scope.cancel()

    trio.run(both, Served(kernel))
    # The median, for other things that the machine does make some of them later. If they waited for the next request,
    # it would be half a second.
    assert statistics.median(late_s) < 0.1


def test_nothing_that_is_under_way_waits_for_the_next_request(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "PASS_INTERVAL_S", 4 * PATIENCE_S)
    monkeypatch.setattr(session, "STANDBY_S", 4 * PATIENCE_S)
    done = threading.Event()
    begun = False

    async def fetch() -> None:
        await trio.sleep(0)
        done.set()

    async def begin(inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        nonlocal begun
        begun = True
        trio.lowlevel.spawn_system_task(fetch)
        return b"yes"

    def ask() -> None:
        kernel.ask_and_wait(1)
        assert done.wait(PATIENCE_S / 2)

    Served(kernel, begin, lambda: not begun).until(ask)


def test_a_request_that_waits_does_not_hold_up_those_behind_it(kernel: Kernel) -> None:
    released = trio.Event()

    async def second_lets_first_go(inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        if number == 1:
            await released.wait()
        else:
            released.set()
        return b"yes"

    def ask() -> None:
        kernel.ask()
        kernel.ask()
        assert {kernel.answer()[1], kernel.answer()[1]} == {1, 2}

    Served(kernel, second_lets_first_go).until(ask)


def test_what_would_wait_beside_too_many_is_refused(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_WAITING", 3)
    monkeypatch.setattr(session, "_MOST_RESTING", 2)
    released = trio.Event()

    async def wait(inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        if body == b"let go":
            released.set()
        elif body != b"cached":
            # As the source's client does, which has a scope of its own around what it waits for.
            with trio.CancelScope():
                await released.wait()
        return b"yes"

    def ask() -> None:
        for _ in range(4):
            for _ in range(3):
                kernel.ask(inode=FIRST_INODE)
            for inode in (1, FIRST_INODE):
                kernel.ask(inode=inode)
                assert kernel.answer()[:2] == (errno.EBUSY, kernel.asked)
            kernel.ask(inode=FIRST_INODE, body=b"cached")
            assert kernel.answer() == (0, kernel.asked, b"yes")
            kernel.ask(inode=FIRST_INODE - 1)
            kernel.ask(inode=FIRST_INODE, body=b"let go")
            assert [kernel.answer()[::2] for _ in range(5)] == [(0, b"yes")] * 5
            trio.from_thread.run_sync(hold_again)

    def hold_again() -> None:
        nonlocal released
        released = trio.Event()

    Served(kernel, wait).until(ask)


def test_of_several_workers_that_wait_one_is_woken(kernel: Kernel) -> None:
    over, requests, waits = threading.Event(), 400, []

    def work(served: Served) -> None:
        served.until(lambda: over.wait(PATIENCE_S))
        waits.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw)

    threads = [threading.Thread(target=work, args=(Served(kernel),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    try:
        for _ in range(requests):
            kernel.ask_and_wait(1)
            time.sleep(0.001)
    finally:
        passes = (time.monotonic() - begin) / session.PASS_INTERVAL_S
        over.set()
        for thread in threads:
            thread.join()
    *others, _ = sorted(waits)
    # Beside their timers; were all of them woken each time, it would be three times the requests.
    assert sum(others) < 2 * 3 * passes + requests / 2


def test_who_has_nothing_to_do_leaves_the_processor_alone(kernel: Kernel) -> None:
    served = Served(kernel)

    def ask() -> None:
        kernel.ask_and_wait(1)

        def rests() -> bool:
            looked = served.looked
            time.sleep(2 * session.STANDBY_S)
            return served.looked == looked

        eventually(rests, PATIENCE_S / 2, "a rest")

    served.until(ask)


def test_a_request_that_comes_again_is_noted_while_it_is_held(kernel: Kernel) -> None:
    served = Served(kernel)
    held: list[tuple[set[int], set[int]]] = []
    bodies: list[bytes] = []

    async def look(inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        await trio.sleep(0)
        held.append(served.resent.held_by(0))
        bodies.append(bytes(body))
        return b"yes"

    def ask() -> None:
        kernel.ask()
        kernel.answer()
        kernel.ask(again=True, body=b"what follows")
        assert kernel.answer()[:2] == (0, 2 | wire.RESENT)
        kernel.ask_and_wait(1)

    served.handlers[Opcode.OPEN] = look
    served.until(ask)
    assert held == [(set(), set()), ({2 | wire.RESENT}, set()), (set(), set())]
    assert bodies[1] == b"what follows"


def test_a_deadly_request_is_answered_with_an_error(kernel: Kernel) -> None:
    served = Served(kernel)
    served.resent.publish({1 | wire.RESENT: REFUSED_AFTER})

    def ask() -> None:
        kernel.ask(again=True)
        assert kernel.answer()[:2] == (errno.EIO, 1 | wire.RESENT)
        kernel.ask_and_wait(1)

    served.until(ask)
    assert served.counters.totals()["deadly_requests"] == 1
