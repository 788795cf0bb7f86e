"""How many bytes a second are fetched that no reader waits for: for plans, and because a user asked for files.

All who fetch them share one rate, and what readers wait for is not counted. The bytes are those that the files have at
the source, whatever is shown of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

# What may be begun at once: to begin one file at a time would wake the manager for each.
_BURST_S = 0.1


class BackgroundRate:
    def __init__(self, bytes_per_s: int, clock: Callable[[], float] = trio.current_time) -> None:
        """No bytes a second: there is no limit."""
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        # When all that was begun would have come at this rate.
        self._done_s = -math.inf

    def change(self, bytes_per_s: int) -> None:
        """Follow another limit from now on."""
        if bytes_per_s != self.bytes_per_s:
            self.bytes_per_s, self._done_s = bytes_per_s, -math.inf

    def wait_s(self) -> float:
        """How long it is until the next file may be begun; 0: now."""
        return max(0.0, self._done_s - _BURST_S - self._clock()) if self.bytes_per_s else 0.0

    def begin(self, size: int) -> None:
        """Count a file of this size."""
        if self.bytes_per_s:
            self._done_s = max(self._done_s, self._clock()) + size / self.bytes_per_s

    async def turn(self, size: int) -> None:
        """Wait until a file of this size may be begun, and count it."""
        while (wait_s := self.wait_s()) > 0:
            await trio.sleep(wait_s)
        self.begin(size)
