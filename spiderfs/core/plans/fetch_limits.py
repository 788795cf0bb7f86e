"""How much is fetched ahead: how many files at once, and in a small cache how far ahead of a reader.

**How many at once**: the rates of two slices of time are compared; a slice counts only if there was always a next file
to fetch. The limit begins high, and falls at once where the first fetches end one after the other: a narrow line
carries no more, and readers' own fetches would wait behind them. Else it doubles until that brings nothing for the
first time; later it grows by half. A growth that brings nothing is taken back, and tried again from time to time,
because other users of the source come and go.

**How far ahead**: a reader has a window of samples, so that its opens hardly wait. A sample that is fetched ahead takes
the room of one that MIN would have kept: with a fifth cached, a window of a quarter of the cache costs 6 % of origin
bytes, and one of 64 samples 1.5 % (benchmarks/training/lookahead.py). How small is enough depends on the loader workers
and on the source, so it is found by trying. An open that waited, although the source had nothing to fetch a moment ago,
makes the window larger; every open that did not wait makes it a little smaller. They balance when one open in
LATE_EVERY waits.
"""

from __future__ import annotations

import math

# The limit at first: at a source 20 ms away, 1,600 files a second. An object store is farther away, and wider.
FIRST_FETCHES, FIRST_OF_STORES = 32, 64
# By how many fetches it is seen how many at a time the source needs (Little's law: rate x least latency), and the least
# limit that follows from it.
FIRST_ENDED, LEAST_FETCHES = 8, 8
# The least length of a slice, in seconds and in latencies of a fetch: every fetch ends some times in it. A first epoch
# of a few thousand files takes a few seconds.
SLICE_S = 0.05
SLICE_LATENCIES = 4
# A slice's rate has grown, or fallen, if it is this multiple of the best rate; after a growth of the limit the rate has
# to grow by this share of that, too: at a source that is nearly full each further fetch only waits for the others.
GREW, FELL, GREW_SHARE = 1.05, 0.7, 1 / 4
# Slices without a change, 2 s or more, after which a higher limit is tried again.
TRY_AGAIN = 40
# Weight of one fetch in the moving mean of the latency.
_WEIGHT = 1 / 16
# Weight of one slice in the best rate, while the limit stays as it is.
_SLICE_WEIGHT = 1 / 4
# The size of a window in samples. The first is two batches of 32, for two loader workers; the largest is for larger
# batches.
LEAST, FIRST, MOST = 32, 64, 256
LATE_EVERY = 256
AHEAD_SHARE = 0.02
"""The share of the cache that a window may take in any case."""
_GROWTH = 1 / 8
# The most by which one call makes the window larger, however many opens waited.
_GROWTH_MOST = 1.5


class Concurrency:
    """The limit on fetches that run at once; it starts at `first` and is never above `most`."""

    def __init__(self, most: int, first: int = FIRST_FETCHES) -> None:
        self.most = most
        self.limit = min(first, most)
        self.latency_s = 0.0
        """How long a fetch takes, as a moving mean."""
        self.bytes_per_s = 0.0
        """The rate in the last slice that was judged."""
        self._best = 0.0
        self._doubles = True
        # Of the first fetches: when they ended, and how long the fastest took; None once they have been judged.
        self._first: list[float] | None = []
        self._least_s = math.inf
        self._grown_by = 0
        self._fell = False
        self._quiet = 0
        self._since_s: float | None = None
        self._bytes = 0

    @property
    def is_highest(self) -> bool:
        """Whether the limit is as high as it may be, and has brought as much as any lower one for a while."""
        return self.limit == self.most and self._best > 0

    def short_of_work(self) -> None:
        """Note that there was nothing to fetch although the limit allowed another fetch: the slice begins again."""
        self._since_s = None
        if self._first:
            self._first = []

    def fetched(self, size: int, took_s: float, now_s: float) -> None:
        """Note that a fetch of `size` bytes has ended, and that there was another file to fetch."""
        self.latency_s += (took_s - self.latency_s) * (_WEIGHT if self.latency_s else 1.0)
        if self._first is not None:
            self._judge_first(took_s, now_s)
        if self._since_s is None:
            # What came before was on its way for a latency, in which nothing else could come.
            self._begin(now_s)
            return
        self._bytes += size
        elapsed_s = now_s - self._since_s
        if elapsed_s >= max(SLICE_S, SLICE_LATENCIES * self.latency_s):
            self._judge(self._bytes / elapsed_s)
            self._begin(now_s)

    def _judge_first(self, took_s: float, now_s: float) -> None:
        """Let the limit fall if the first fetches have ended one after the other."""
        assert self._first is not None
        self._first.append(now_s)
        self._least_s = min(self._least_s, took_s)
        if len(self._first) < FIRST_ENDED:
            return
        spread_s = self._first[-1] - self._first[0]
        self._first = None
        needed = (FIRST_ENDED - 1) * self._least_s / spread_s if spread_s > 0 else math.inf
        if 2 * needed < self.limit:
            self.limit = min(self.most, max(LEAST_FETCHES, math.ceil(2 * needed)))
            # A slice may have ended before, and the limit may have grown.
            self._grown_by, self._doubles = 0, False

    def _judge(self, rate: float) -> None:
        self.bytes_per_s = rate
        before = self.limit - self._grown_by
        if rate > self._best * max(GREW, 1 + GREW_SHARE * self._grown_by / before):
            self._best = rate
            self._grow()
        elif rate < self._best * FELL and not self._fell:
            # Files differ in size, and one slice may have had small ones: the next one decides.
            self._fell = True
            return
        elif rate < self._best * FELL:
            self._best = rate
            self.limit = max(1, self.limit * 3 // 4)
            self._grown_by = self._quiet = 0
            self._doubles = False
        elif self._grown_by:
            self.limit -= self._grown_by
            self._grown_by = self._quiet = 0
            self._doubles = False
        else:
            # The best of many slices had large files.
            self._best += (rate - self._best) * _SLICE_WEIGHT
            self._quiet += 1
            if self._quiet == TRY_AGAIN:
                self._grow()
        self._fell = False

    def _grow(self) -> None:
        self._quiet = 0
        self._grown_by = min(self.most - self.limit, self.limit if self._doubles else max(1, self.limit // 2))
        self.limit += self._grown_by

    def _begin(self, now_s: float) -> None:
        self._since_s = now_s
        self._bytes = 0


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
