"""The troubles of a mount and their times, and therefore which errors and which old answers its readers may get."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.soak.contents import History, Seen
from benchmarks.soak.schedule import TIMEOUT_S, TTL_S

# Everything may take so much longer than promised, because eight processes share two cores.
SLACK_S = 4.0
# The mount asks an unreachable source again after 2 s (probe_interval_s in sources/client.py), and gives up a call that
# hangs after its own time limit.
AFTER_FAULT_S = TIMEOUT_S + 2.0 + SLACK_S
NEGATIVE_TTL_S = 0.5
# A reader's open is two requests, a look-up and an open, and each may wait for the source for TIMEOUT_S.
LIMIT_S = 2 * TIMEOUT_S + SLACK_S

_UNMOUNTED = (errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT, errno.EIO, errno.ENODEV)
_UNREACHABLE = (errno.EIO, errno.ETIMEDOUT)


class Weather:
    """Spans of time and their kind: "source" (slow, failing, unreachable) or "unmounted". Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[str, float, float]] = []

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        with self._lock:
            index = len(self._spans)
            began_s = time.monotonic()
            self._spans.append((what, began_s, math.inf))
        try:
            yield
        finally:
            with self._lock:
                self._spans[index] = (what, began_s, time.monotonic())

    def was(self, what: str, began_s: float, ended_s: float) -> bool:
        with self._lock:
            return any(kind == what and a <= ended_s and b >= began_s for kind, a, b in self._spans)

    def source_was_bad(self, began_s: float, ended_s: float) -> bool:
        return self.was("source", began_s - AFTER_FAULT_S, ended_s)

    def allows(self, seen: Seen, history: History) -> bool:
        """Whether docs/reference/semantics.md allows the error at that time."""
        if seen.error in _UNMOUNTED and self.was("unmounted", seen.began_s - SLACK_S, seen.ended_s):
            return True
        bad = self.source_was_bad(seen.began_s, seen.ended_s)
        if seen.error in _UNREACHABLE and bad:
            return True
        if seen.error == errno.ENOENT:
            return history.was_there(seen.file, seen.began_s - NEGATIVE_TTL_S - SLACK_S, seen.ended_s)[1]
        # A mapping that cannot be read causes a SIGBUS, whatever the reason.
        if seen.error == errno.ESTALE or (seen.error == errno.EIO and seen.way == "mmap"):
            return bad or history.changed(seen.file, seen.began_s - TTL_S - SLACK_S, seen.ended_s)
        return False

    def allows_late(self, began_s: float, late_s: float) -> bool:
        """Whether a reader may still get an answer that was right so many seconds earlier."""
        return late_s <= TTL_S + SLACK_S or self.source_was_bad(began_s, began_s)
