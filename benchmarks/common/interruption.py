"""Interrupts that clean up: whatever ends a benchmark, its mounts and its processes end too."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.slices import LEFT, TimeIsOver


def exit_status(
    name: str,
    measure: Callable[[], None],
    when_interrupted: str,
    expected: tuple[type[Exception], ...] = (RuntimeError,),
) -> int:
    """Run a measurement and return the exit status: 0, 130 after an interrupt, or 1 after an expected error.

    LEFT is the status if the time of a slice is over. The message of that, and of an expected error, is printed; any
    other exception is raised.
    """
    unwind_on_signals()
    try:
        measure()
    except KeyboardInterrupt:
        print(when_interrupted)
        return 130
    except TimeIsOver as over:
        print(over)
        return LEFT
    except expected as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def scratch_directory(name: str) -> Iterator[Path]:
    """A temporary directory for the benchmark of that name, deleted when the context ends."""
    path = Path(tempfile.mkdtemp(prefix=f"spiderfs-{name}."))
    try:
        yield path
    finally:
        # Every mount is read-only, so even files of a mount that is still there cannot be deleted.
        shutil.rmtree(path, ignore_errors=True)


def unwind_on_signals() -> None:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM, through every context that is open."""
    # SIGINT is set too, because a shell makes the programs that it starts in the background ignore it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _terminated)


def _terminated(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
