"""The process that pushes files ahead, as the manager keeps it: one that dies, or does nothing, is replaced."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from planning import pusher_of
from waiting import eventually

from spiderfs.daemon.caching import push_ahead as module
from spiderfs.daemon.caching.push_ahead import ASK_S, ORDERS_AT_ONCE, Pusher
from spiderfs.daemon.caching.push_process import ANSWER, HERE, MOST_BYTES, orders_of, packed_order
from spiderfs.linux.mounts import Mount
from spiderfs.shared.shared_memory import SharedSlots

# A process that was killed is waited for later, as subprocess says.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")

PATIENCE_S = 2.0


class Kept:
    """A pusher for a directory in the place of a mount."""

    def __init__(self, directory: Path) -> None:
        self.answers: list[tuple[int, int]] = []
        self.lost = 0
        self.threads = SharedSlots(1024)
        self.pusher = Pusher(
            directory, 2, self.threads, PATIENCE_S, lambda *answer: self.answers.append(answer), self._lose
        )

    def _lose(self) -> None:
        self.lost += 1


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    device = tmp_path.stat().st_dev
    found = Mount("", tmp_path, "", f"{os.major(device)}:{os.minor(device)}")
    monkeypatch.setattr(module, "mounted_at", lambda path: found)
    return Kept(tmp_path)


async def stopped() -> int:
    """Stop the process, all of its threads; its pid."""
    pid = pusher_of(os.getpid())
    os.kill(pid, signal.SIGSTOP)
    states = Path(f"/proc/{pid}/task").glob
    await eventually(lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in states("*/stat")))
    return pid


@asynccontextmanager
async def running(kept: Kept) -> AsyncIterator[Kept]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kept.pusher.run)
        kept.pusher.need()
        await eventually(lambda: kept.pusher.ready)
        yield kept
        nursery.cancel_scope.cancel()


@pytest.fixture
def kept(idle: Kept) -> AbstractAsyncContextManager[Kept]:
    return running(idle)


@pytest.fixture
def clock() -> trio.abc.Clock:
    return trio.testing.MockClock(autojump_threshold=0.01)


async def test_a_process_that_does_nothing_is_replaced(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.1)
    first = await stopped()
    kept.pusher.order(1, b"none")
    assert kept.pusher.send() == []
    await eventually(lambda: kept.lost)
    monkeypatch.setattr(module, "ASK_S", 20.0)
    assert kept.pusher.broken, "meanwhile samples are fetched into the store"
    await eventually(lambda: kept.pusher.ready)
    assert pusher_of(os.getpid()) != first
    kept.pusher.order(2, b"none")
    assert kept.pusher.send() == []
    await eventually(lambda: kept.answers)
    assert (kept.answers, kept.lost) == ([(2, errno.ENOENT)], 1)
    assert caplog.text.count("does nothing") == 1


async def test_orders_go_some_at_a_time_and_those_that_are_not_taken_are_named(kept: Kept) -> None:
    paths = {number: b"%d" % number for number in range(ORDERS_AT_ONCE + 1)}

    for number, path in paths.items():
        kept.pusher.order(number, path)
    assert kept.pusher.send() == kept.pusher.send() == []
    await eventually(lambda: len(kept.answers) == len(paths))
    assert sorted(kept.answers) == [(number, errno.ENOENT) for number in paths]
    kept.pusher._orders = None
    for number, path in paths.items():
        kept.pusher.order(number, path)
    assert kept.pusher.send() == [*paths]


async def test_a_process_that_does_not_begin_is_replaced(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "BEGIN_S", 0.0)
    os.kill(pusher_of(os.getpid()), signal.SIGKILL)
    await eventually(lambda: kept.lost == 2)
    assert kept.pusher.broken
    monkeypatch.setattr(module, "BEGIN_S", 20.0)
    await eventually(lambda: kept.pusher.ready)
    assert not kept.pusher.broken
    assert "has not begun" in caplog.text


async def test_a_process_that_dies_with_orders_unread_has_ended_like_any_other(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    first = await stopped()
    for number in range(3):
        kept.pusher.order(number, b"none")
        assert kept.pusher.send() == []
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: kept.lost)
    assert not kept.pusher.broken
    await eventually(lambda: kept.pusher.ready)
    assert "has ended: another one starts" in caplog.text
    assert "cannot start" not in caplog.text


async def test_a_process_with_a_free_thread_is_kept_however_long_its_orders_wait(
    idle: Kept, caplog: pytest.LogCaptureFixture, clock: trio.abc.Clock
) -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    worked: list[bool] = []
    with trio.socket.from_stdlib_socket(ours) as answers, trio.socket.from_stdlib_socket(its) as orders:

        async def hear() -> None:
            worked.append(await idle.pusher._receive(answers))

        idle.pusher._orders = answers
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            idle.pusher.order(1, b"waits for the source")
            assert idle.pusher.send() == []
            ((number, path),) = orders_of(await orders.recv(MOST_BYTES))
            assert (number, path.rpartition(b"/")[2]) == (1, b"waits for the source")
            for _ in range(5):
                assert await orders.recv(MOST_BYTES) == packed_order(0, b"")
                await orders.send(ANSWER.pack(0, HERE))
            assert (worked, idle.answers) == ([], [])
            assert trio.current_time() >= 5 * ASK_S - 1
            assert await orders.recv(MOST_BYTES) == packed_order(0, b"")
            asked_at_s = trio.current_time()
        assert worked == [False]
        assert PATIENCE_S <= trio.current_time() - asked_at_s <= PATIENCE_S + 2 * ASK_S
    assert caplog.text.count("does nothing") == 1
