"""How many fetches to have under way: more while that brings more bytes, fewer when the source slows down.

Rates are compared between windows in which the fetches were never short of work; any other says nothing about the
source. Growth is by half, and taken back if it brought nothing; from time to time it is tried again, for the source's
other users come and go.
"""

from __future__ import annotations

# A window is long enough for some fetches of each of those under way.
WINDOW_S = 0.25
WINDOW_LATENCIES = 4
GREW, FELL = 1.05, 0.8
# Windows without a change after which a larger number is tried again: some 5 s.
TRY_AGAIN = 20
# Weight of one fetch in the latency that is remembered.
_WEIGHT = 1 / 16


class Concurrency:
    def __init__(self, most: int, first: int = 8) -> None:
        if most < 1:
            raise ValueError(f"at least 1 fetch at a time, not {most}")
        self.most = most
        self.limit = min(first, most)
        self.latency_s = 0.0
        """Of a fetch, a moving mean."""
        self.bytes_per_s = 0.0
        """In the last window that was judged."""
        self._best = 0.0
        self._grown_by = 0
        self._quiet = 0
        self._since_s = 0.0
        self._bytes = 0

    def short_of_work(self, now_s: float) -> None:
        """There was nothing to fetch though more could have been under way."""
        self._begin(now_s)

    def fetched(self, size: int, took_s: float, now_s: float) -> None:
        """A fetch has ended, with work left for another."""
        self.latency_s += (took_s - self.latency_s) * (_WEIGHT if self.latency_s else 1.0)
        self._bytes += size
        elapsed_s = now_s - self._since_s
        if elapsed_s >= max(WINDOW_S, WINDOW_LATENCIES * self.latency_s):
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
