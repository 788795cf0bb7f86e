"""The life of a worker or manager, from the fork to its exit status."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import NoReturn

import trio

from spiderfs.errors import StoreCorrupt
from spiderfs.store import environment

log = logging.getLogger(__name__)


def live(main: Callable[[], Awaitable[None]]) -> NoReturn:
    """Live the whole life of a child, and end without unwinding: a thread that hangs in the source cannot be joined."""
    status = 1
    try:
        # Only the supervisor acts on Ctrl-C in the terminal.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
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
