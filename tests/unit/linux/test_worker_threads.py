"""Threads for calls that may block: bounded, kept by the call, and gone when nothing is to do."""

from __future__ import annotations

import threading

import pytest
import trio
from mounting import eventually

from spiderfs.linux import worker_threads as module
from spiderfs.linux.worker_threads import WorkerThreads

PATIENCE_S = 20.0


async def test_a_call_returns_or_raises_in_another_thread() -> None:
    threads = WorkerThreads(2)
    assert await threads.run(threading.get_ident) != threading.get_ident()
    assert await threads.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 7, 0)


async def test_there_are_no_more_calls_than_allowed() -> None:
    at_once, most = [0], [0]
    lock = threading.Lock()
    full = threading.Barrier(3)

    def call() -> None:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        full.wait(PATIENCE_S)
        with lock:
            at_once[0] -= 1

    threads = WorkerThreads(3)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(threads.run, call)
    assert most == [3]


async def test_a_call_that_was_given_up_keeps_its_thread_until_it_returns() -> None:
    go_on = threading.Event()
    threads = WorkerThreads(1)
    with trio.move_on_after(0.01) as gave_up:
        await threads.run(go_on.wait, PATIENCE_S)
    assert gave_up.cancelled_caught
    with trio.move_on_after(0.01) as waited:
        await threads.run(int)
    assert waited.cancelled_caught
    go_on.set()
    with trio.fail_after(PATIENCE_S):
        assert await threads.run(int) == 0


def test_a_call_that_returns_after_the_loop_has_ended_is_forgotten() -> None:
    go_on, ended = threading.Event(), threading.Event()

    def call() -> None:
        go_on.wait(PATIENCE_S)
        ended.set()

    async def main() -> None:
        with trio.move_on_after(0.01):
            await WorkerThreads(1).run(call)

    trio.run(main)
    go_on.set()
    assert ended.wait(PATIENCE_S)


async def test_idle_threads_end_and_others_take_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.01)
    before = set(threading.enumerate())
    threads = WorkerThreads(4)
    for _ in range(20):
        await threads.run(int)
    # Those of earlier tests may end meanwhile.
    eventually(lambda: set(threading.enumerate()) <= before)
    assert await threads.run(int) == 0
