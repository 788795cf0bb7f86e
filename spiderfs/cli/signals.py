"""How commands that must clean up behind themselves end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have the signals that end a program end it as Ctrl-C does: with KeyboardInterrupt."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    ends = [number for number, handler in before.items() if handler is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in ends:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Have the signals that end a program wait for what is done meanwhile, which is short and must not be half done."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for caught in came[:1]:
            signal.raise_signal(caught)
