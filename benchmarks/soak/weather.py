"""What has befallen a mount and when, and so which errors and which old answers its readers may be given."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.soak.contents import History, Seen
from benchmarks.soak.schedule import TIMEOUT_S, TTL_S

# How much longer than promised something may take where eight processes share two cores.
SLACK_S = 4.0
# A source that has been away is asked again after 2 s (probe_interval_s of sources/client.py), and calls that hang have
# their own time until they are given up.
AFTER_FAULT_S = TIMEOUT_S + 2.0 + SLACK_S
NEGATIVE_TTL_S = 0.5
# An open is a look-up and an open, each of which may wait for the source; a worker that is killed is started anew.
LIMIT_S = 2 * TIMEOUT_S + SLACK_S

_UNMOUNTED = (errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT, errno.EIO, errno.ENODEV)
_UNREACHABLE = (errno.EIO, errno.ETIMEDOUT)


class Weather:
    """Spans of time, by what was then: "source" (slow, erring, away) and "unmounted". For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[str, float, float]] = []

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        with self._lock:
            place = len(self._spans)
            began_s = time.monotonic()
            self._spans.append((what, began_s, math.inf))
        try:
            yield
        finally:
            with self._lock:
                self._spans[place] = (what, began_s, time.monotonic())

    def was(self, what: str, began_s: float, ended_s: float) -> bool:
        with self._lock:
            return any(kind == what and a <= ended_s and b >= began_s for kind, a, b in self._spans)

    def source_was_bad(self, began_s: float, ended_s: float) -> bool:
        return self.was("source", began_s - AFTER_FAULT_S, ended_s)

    def allows(self, seen: Seen, history: History) -> bool:
        """Whether the error is one that SEMANTICS names for such a moment."""
        if seen.error in _UNMOUNTED and self.was("unmounted", seen.began_s - SLACK_S, seen.ended_s):
            return True
        bad = self.source_was_bad(seen.began_s, seen.ended_s)
        if seen.error in _UNREACHABLE and bad:
            return True
        if seen.error == errno.ENOENT:
            return history.was_there(seen.file, seen.began_s - NEGATIVE_TTL_S - SLACK_S, seen.ended_s)[1]
        # What a mapping cannot read is a SIGBUS, whatever the reason.
        if seen.error == errno.ESTALE or (seen.error == errno.EIO and seen.way == "mmap"):
            return bad or history.changed(seen.file, seen.began_s - TTL_S - SLACK_S, seen.ended_s)
        return False

    def allows_late(self, began_s: float, late_s: float) -> bool:
        """Whether an answer that was right so long before may still be given."""
        return late_s <= TTL_S + SLACK_S or self.source_was_bad(began_s, began_s)
