"""When a dead process starts again: at once if it had done some work, else after longer and longer pauses, or never."""

from __future__ import annotations

# A process that died before it had done anything is likely to die so again. The first pause comes before the second
# start in a row; each further pause is twice as long as the one before, up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0


class Restarts:
    """Decides on restarts of processes that share one task. `done` counts what they have done since the mount."""

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: after so many deaths in a row, with nothing done between them, `died` gives up."""
        self._limit = limit
        self._done = -1
        self.in_a_row = 0

    def died(self, done: int) -> float | None:
        """How many seconds to wait before the next start; None: give up."""
        self.in_a_row = self.in_a_row + 1 if done == self._done else 1
        self._done = done
        if self.in_a_row == self._limit:
            return None
        return min(FIRST_PAUSE_S * 2 ** (self.in_a_row - 2), LONGEST_PAUSE_S) if self.in_a_row > 1 else 0.0
