"""Work in a forked child, which shows to its parent only whether the work succeeded."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a child and return its pid; if it raises, the child prints that and ends with exit status 1."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def exit_status(child: int) -> int:
    """Wait for a child; returns its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
