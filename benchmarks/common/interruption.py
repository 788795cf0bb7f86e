"""Interrupts that unwind: whatever ends a benchmark, what it mounted and started goes with it."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def exit_status(
    name: str,
    measure: Callable[[], None],
    when_interrupted: str,
    expected: tuple[type[Exception], ...] = (RuntimeError,),
) -> int:
    """Run a benchmark's measurement: 0, or 130 when it was interrupted, or 1 for an expected error, told in a line."""
    unwind_on_signals()
    try:
        measure()
    except KeyboardInterrupt:
        print(when_interrupted)
        return 130
    except expected as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def scratch_directory(name: str) -> Iterator[Path]:
    """A directory of the benchmark of that name, that goes when the context ends."""
    path = Path(tempfile.mkdtemp(prefix=f"spiderfs-{name}."))
    try:
        yield path
    finally:
        # Should anything still be mounted below it, that survives: every mount is read-only.
        shutil.rmtree(path, ignore_errors=True)


def unwind_on_signals() -> None:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM, through every context that is open."""
    # SIGINT too: a shell that starts this in the background has it ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _terminated)


def _terminated(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
