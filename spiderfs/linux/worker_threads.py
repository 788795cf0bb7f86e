"""Threads for calls that may block, a bounded number of them; each call keeps its thread until it returns.

Does what trio.to_thread does, for less: that names the thread and copies the context at every call. Where eight calls
of 5 ms run side by side on two busy cores, one costs 250 us of processor time there and 90 here; every fetch is one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import outcome
import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# How long a thread waits for its next call before it ends.
_IDLE_S = 10.0


class _Call:
    """`task` is None once nobody waits for it any more."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.task: trio.lowlevel.Task | None = trio.lowlevel.current_task()
        self.token = trio.lowlevel.current_trio_token()


class Threads:
    """At most `limit` calls at a time; belongs to one trio run, and is to be made after the fork."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._waiting = trio.lowlevel.ParkingLot()
        # Guards both numbers: there is always a thread for every call.
        self._lock = threading.Lock()
        self._busy = 0
        self._threads = 0

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """What the function returns or raises. When the caller is cancelled, the call goes on and keeps its thread."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._busy >= self._limit:
            await self._waiting.park()
        call = _Call(function, args)
        with self._lock:
            self._busy += 1
            missing = self._busy > self._threads
            self._threads += missing
        self._calls.put(call)
        if missing:
            threading.Thread(target=self._live, name="source", daemon=True).start()

        def abandon(_: object) -> trio.lowlevel.Abort:
            call.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        value: T = await trio.lowlevel.wait_task_rescheduled(abandon)
        return value

    def _live(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._threads > self._busy:
                        self._threads -= 1
                        return
                continue
            result = outcome.capture(call.function, *call.args)
            # Else the loop has ended, and with it whoever has asked.
            with contextlib.suppress(trio.RunFinishedError):
                call.token.run_sync_soon(self._done, call, result)
            del call, result

    def _done(self, call: _Call, result: outcome.Outcome[Any]) -> None:
        with self._lock:
            self._busy -= 1
        self._waiting.unpark()
        if call.task is not None:
            trio.lowlevel.reschedule(call.task, result)
