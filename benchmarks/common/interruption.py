"""How a benchmark ends: after an interrupt, with its mounts and processes, or after a slice, to be continued."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# The exit status when the time of a slice is over and something is left to do.
LEFT = 3


class TimeIsOver(Exception):
    """This slice has ended, and something is left to do; the message says what."""


class Slice:
    """How long this call may measure. A slice has time for one piece of work at least, however long that takes."""

    def __init__(self, minutes: float) -> None:
        self._ends_at = time.monotonic() + 60 * minutes
        self._longest_s = 0.0

    def took(self, seconds: float) -> None:
        """Note how long a piece of work took."""
        self._longest_s = max(self._longest_s, seconds)

    @property
    def over(self) -> bool:
        """Whether no further piece of work fits, if it takes as long as the longest one so far."""
        return self._longest_s > 0 and time.monotonic() + self._longest_s > self._ends_at


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
