"""How many fetches to run at once: more while more of them bring more bytes per second, fewer when the source slows.

Time is cut into windows, and the rates of two windows are compared. A window counts only if there was always a next
file to fetch: in any other window the rate says nothing about the source. The limit grows by half. If the higher limit
brings nothing, the growth is taken back; it is tried again from time to time, because other users of the source come
and go.
"""

from __future__ import annotations

# The least length of a window, in seconds and in latencies of a fetch: every fetch ends some times in it.
WINDOW_S = 0.25
WINDOW_LATENCIES = 4
# A window's rate has grown, or fallen, if it is this multiple of the best rate.
GREW, FELL = 1.05, 0.8
# Windows without a change, some 5 s, after which a higher limit is tried again.
TRY_AGAIN = 20
# Weight of one fetch in the moving mean of the latency.
_WEIGHT = 1 / 16


class Concurrency:
    """The limit on fetches that run at once; it starts at `first` and is never above `most`."""

    def __init__(self, most: int, first: int = 8, window_s: float = WINDOW_S) -> None:
        if most < 1:
            raise ValueError(f"the number of fetches at once must be at least 1, not {most}")
        self.most = most
        self.limit = min(first, most)
        self.latency_s = 0.0
        """How long a fetch takes, as a moving mean."""
        self.bytes_per_s = 0.0
        """The rate in the last window that was judged."""
        self._window_s = window_s
        self._best = 0.0
        self._grown_by = 0
        self._quiet = 0
        self._since_s = 0.0
        self._bytes = 0

    def short_of_work(self, now_s: float) -> None:
        """Note that there was nothing to fetch although the limit allowed another fetch: the window begins anew."""
        self._begin(now_s)

    def fetched(self, size: int, took_s: float, now_s: float) -> None:
        """Note that a fetch of `size` bytes has ended, and that there was another file to fetch."""
        self.latency_s += (took_s - self.latency_s) * (_WEIGHT if self.latency_s else 1.0)
        self._bytes += size
        elapsed_s = now_s - self._since_s
        if elapsed_s >= max(self._window_s, WINDOW_LATENCIES * self.latency_s):
            self._judge(self._bytes / elapsed_s)
            self._begin(now_s)

    def _judge(self, rate: float) -> None:
        self.bytes_per_s = rate
        if rate > self._best * GREW:
            self._best = rate
            self._grow()
        elif rate < self._best * FELL:
            self._best = rate
            self.limit = max(1, self.limit * 3 // 4)
            self._grown_by = self._quiet = 0
        elif self._grown_by:
            self.limit -= self._grown_by
            self._grown_by = self._quiet = 0
        else:
            self._quiet += 1
            if self._quiet == TRY_AGAIN:
                self._grow()

    def _grow(self) -> None:
        self._quiet = 0
        self._grown_by = min(self.most - self.limit, max(1, self.limit // 2))
        self.limit += self._grown_by

    def _begin(self, now_s: float) -> None:
        self._since_s = now_s
        self._bytes = 0
