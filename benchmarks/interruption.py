"""Interrupts that unwind: whatever ends a benchmark, what it mounted and started goes with it."""

from __future__ import annotations

import signal


def unwind_on_signals() -> None:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM, through every context that is open."""
    # SIGINT too: a shell that starts this in the background has it ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _terminated)


def _terminated(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
