"""The life of a worker or manager, from the fork to its exit status.

The facts about deaths are for the rules in `restarts.py`; they lie in memory that all processes share.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

import trio

from spiderfs.daemon.context import FIRST_WORKER_ROW, MANAGER_ROW, SUPERVISOR_ROW
from spiderfs.daemon.restarts import DEATHS, Restarts, Suspects
from spiderfs.errors import StoreCorrupt
from spiderfs.fuse.resent_requests import ResentRequests
from spiderfs.metrics import SharedCounters
from spiderfs.store import environment


def live(main: Callable[[], Awaitable[None]]) -> NoReturn:
    """Live the whole life of a child, and end without unwinding: a thread that hangs in the source cannot be joined."""
    status = 1
    try:
        # Only the supervisor acts on Ctrl-C in the terminal.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        # What was imported is never garbage, so no collection has to look at it.
        gc.freeze()
        trio.run(main)
        status = 0
    except BaseException as exc:
        status = 1
        if (damage := _damage_in(exc)) is not None:
            log.error("%s: it is rebuilt", damage)
            status = environment.EXIT_STORE_CORRUPT
        else:
            log.exception("the process ends")
    finally:
        logging.shutdown()
        os._exit(status)


def _damage_in(exc: BaseException) -> StoreCorrupt | None:
    """The damage to the store that ends the process; None if something else ends it."""
    if isinstance(exc, BaseExceptionGroup):
        return next((damage for inner in exc.exceptions if (damage := _damage_in(inner))), None)
    return exc if isinstance(exc, StoreCorrupt) else None


log = logging.getLogger(__name__)

MANAGER = -1  # where a worker has its index
# A manager that dies at once must not keep the processor busy. Readers wait for workers, so these pause less.
MANAGER_PAUSE_S = 0.5


class Deaths:
    """Decides what the supervisor does after a death; it is given each start and each death."""

    def __init__(
        self,
        counters: SharedCounters,
        resent: ResentRequests,
        workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters = counters
        self._resent = resent
        self._workers = range(workers)
        self._clock = clock
        self._restarts = Restarts(workers, DEATHS)
        self._manager_restarts = Restarts(1)
        self._suspects = Suspects(sole=workers == 1)
        self._since: dict[int, float] = {}  # worker index, or MANAGER -> when the present one was started

    def started(self, index: int, again: bool) -> None:
        """Note that a worker, or the manager, is about to be forked; `again`: in the place of one that has ended."""
        self._since[index] = self._clock()
        if index != MANAGER:
            self._resent.forget(index)
        if again:
            self._counters.row(SUPERVISOR_ROW).add(_counter(index))

    def lived_s(self, index: int) -> float:
        """How long this process has lived, until `pause_s` is asked for it; 0 if it is not there."""
        now = self._clock()
        return now - self._since.get(index, now)

    def pause_s(self, index: int) -> float | None:
        """Note that this process has died: how many seconds to wait before the next one; None: end the mount.

        Call this before the kernel hands out its requests again.
        """
        pause_s: float | None
        if index == MANAGER:
            applied = self._counters.row(MANAGER_ROW).value("events_folded")
            pause_s = self._manager_restarts.died(0, [applied], [self.lived_s(MANAGER)])
            pause_s = max(pause_s or 0.0, MANAGER_PAUSE_S)
        else:
            self._suspects.died(*self._resent.held_by(index))
            self._resent.publish(self._suspects.alone())
            answered = [self._answered(worker) for worker in self._workers]
            pause_s = self._restarts.died(index, answered, [self.lived_s(worker) for worker in self._workers])
        del self._since[index]
        if pause_s is not None:
            so_often = self._counters.row(SUPERVISOR_ROW).value(_counter(index)) + 1
            log.info("%s starts again in %g s (%s: %d)", name_of(index), pause_s, _counter(index), so_often)
        return pause_s

    def _answered(self, worker: int) -> int:
        """How many requests this worker has answered; to refuse a request is no progress."""
        row = self._counters.row(FIRST_WORKER_ROW + worker)
        return row.value("answers") - row.value("deadly_requests")


def name_of(index: int) -> str:
    return "the manager" if index == MANAGER else f"worker {index}"


def _counter(index: int) -> str:
    """The metric that counts restarts of this kind of process."""
    return "manager_restarts" if index == MANAGER else "worker_restarts"
