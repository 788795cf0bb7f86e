"""The window: how many samples to fetch ahead of a reader when the cache is small, so that its opens hardly wait.

A sample that is fetched ahead takes the room of one that MIN would have kept, so every sample of the window costs
origin bytes. When a fifth of the samples is cached, a window of a quarter of the cache costs 6 %, and one of 64 samples
1.5 % (benchmarks/training/lookahead.py). How small a window is enough depends on how many samples the loader workers
take at once and on how steady the source is, so it is found by trying. An open that waited, although the source had
nothing to fetch a moment ago, makes the window larger; every open that did not wait makes it a little smaller. The two
are in balance when one open in LATE_EVERY waits.
"""

from __future__ import annotations

# In samples. The first size is two batches of 32, for two loader workers; the largest is for larger batches.
LEAST, FIRST, MOST = 32, 64, 256
LATE_EVERY = 256
_GROWTH = 1 / 8
# The most by which one call makes the window larger, however many opens waited.
_GROWTH_MOST = 1.5


class Window:
    """The window of one reader. `opens` are those that it has made before, and `late` how many of these waited."""

    def __init__(self, opens: int = 0, late: int = 0) -> None:
        self.samples = float(FIRST)
        self._opens, self._late = opens, late

    def opened(self, opens: int, late: int, idle: bool) -> None:
        """Note that the reader has made `opens` opens in all by now, and that `late` of them waited.

        `idle` says that a moment ago every sample of the window was fetched or being fetched. If it is False there was
        always another sample to fetch, or no room for it, and a larger window would not help.
        """
        timely, waited = opens - self._opens - (late - self._late), late - self._late
        self._opens, self._late = opens, late
        change = (1 - _GROWTH / LATE_EVERY) ** timely
        if idle:
            change *= min((1 + _GROWTH) ** waited, _GROWTH_MOST)
        self.samples = min(max(self.samples * change, LEAST), MOST)
