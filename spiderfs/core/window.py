"""How many samples ahead of a reader to fetch in a small cache: as few as keep its opens from waiting.

What is fetched ahead of its use takes the room of what MIN would have kept, so every sample of the window costs bytes:
at a fifth cached, a window of a quarter of the cache 6 %, one of 64 samples 1.5 % (benchmarks/training/lookahead.py).
How few are enough depends on how many a loader's workers take at once and on how steady the source is, so it is found
out. An open that waited, although a moment ago the source was idle for want of work, makes it larger; each that did not
wait makes it smaller by little. Where both balance, one open in LATE_EVERY waits.
"""

from __future__ import annotations

# A reader's batch and the next one, of two workers; and the most, for workers with larger ones.
LEAST, FIRST, MOST = 32, 64, 256
LATE_EVERY = 256
_GROWTH = 1 / 8
# However many wait in one burst.
_GROWTH_MOST = 1.5


class Window:
    """Of one reader, that has made so many opens before, of which some waited."""

    def __init__(self, opens: int = 0, late: int = 0) -> None:
        self.samples = float(FIRST)
        self._opens, self._late = opens, late

    def opened(self, opens: int, late: int, idle: bool) -> None:
        """The reader has made so many opens by now, of which some waited.

        `idle` says that lately everything in the window had been fetched or was being fetched. If there was always more
        to fetch, or no room for it, a larger window is of no use.
        """
        timely, waited = opens - self._opens - (late - self._late), late - self._late
        self._opens, self._late = opens, late
        change = (1 - _GROWTH / LATE_EVERY) ** timely
        if idle:
            change *= min((1 + _GROWTH) ** waited, _GROWTH_MOST)
        self.samples = min(max(self.samples * change, LEAST), MOST)
