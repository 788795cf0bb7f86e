"""The clock of a mount: seconds since 1970 by the system's clock when the mount began, counted on without a jump.

How long a name is trusted, when a version has settled, what was read before what: all of that is about time that has
passed, and someone may set the system's clock while files are mounted. Rows of an earlier mount have times too, so the
count begins with the system's clock and not with zero. Time in which the machine is suspended counts. Forked processes
have the clock of their parent, and readers around FUSE learn when it began.
"""

from __future__ import annotations

import time

# What the system's clock would have said when the machine was booted.
BEGAN_S = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def now(began_s: float = BEGAN_S) -> float:
    """The time by this process's clock, or by one that began somewhere else."""
    return began_s + time.clock_gettime(time.CLOCK_BOOTTIME)


def ahead_s() -> float:
    """How many seconds this clock is ahead of the system's, because that one was set back meanwhile."""
    return now() - time.time()
