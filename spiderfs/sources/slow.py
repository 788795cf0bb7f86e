"""Any source, made as slow and as unreliable as wanted: for trying settings out, for tests and for benchmarks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from spiderfs.errors import SourceUnavailable
from spiderfs.sources.faults import FaultState
from spiderfs.sources.source import Source, SourceStat, Version

P = ParamSpec("P")
T = TypeVar("T")

# Entries that one latency pays for in a scan: about what an NFS server packs into one READDIRPLUS exchange.
ENTRIES_PER_LATENCY = 1000
# How soon a call that waits notices a changed setting. 16 waiting threads cost some 800 wake-ups a second at most.
_POLL_S = 0.02
# A hanging call gives up after this long, so that a forgotten `hang` cannot hold a thread for ever.
_LONGEST_HANG_S = 3600.0


class SlowSource:
    """`inner`, with the faults that `faults` holds at the moment of each call.

    The random draws are the same for the same seed and order of calls; forked processes draw the same sequence.
    Bandwidth counts the bytes of files only. `clock` and `sleep` are those of the time module, and must go together.
    """

    def __init__(
        self,
        inner: Source,
        faults: FaultState,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.faults = faults
        self._inner = inner
        self._random = random.Random(seed)
        self._clock = clock
        self._sleep = sleep
        self._closed = False
        self.stat, self.statvfs = self._after_exchange(inner.stat), self._after_exchange(inner.statvfs)
        self.readlink, self.listxattr = self._after_exchange(inner.readlink), self._after_exchange(inner.listxattr)
        self.getxattr = self._after_exchange(inner.getxattr)

    def _after_exchange(self, ask: Callable[P, T]) -> Callable[P, T]:
        def asked(*args: P.args, **kwargs: P.kwargs) -> T:
            self._exchange()
            return ask(*args, **kwargs)

        return asked

    def scan(self, path: bytes) -> Iterator[tuple[bytes, SourceStat]]:
        self._exchange()
        for count, entry in enumerate(self._inner.scan(path)):
            if count and count % ENTRIES_PER_LATENCY == 0:
                self._exchange()
            yield entry

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        self._exchange()
        start = self._clock()
        data = self._inner.read(path, offset, length, version)
        self._transfer(len(data), start)
        return data

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        self._exchange()
        start = self._clock()
        found, data = self._inner.read_present(path, most_bytes)
        self._transfer(len(data), start)
        return found, data

    def close(self) -> None:
        """Close the inner source and end the calls that hang; the fault state stays with who made it."""
        self._closed = True
        self._inner.close()

    def _exchange(self) -> None:
        """Take the time, or raise the error, of one question to the server, before the inner source may answer."""
        latency_s = self.faults.get("latency_ms") / 1000
        jitter = self.faults.get("latency_jitter")
        if latency_s and jitter:
            latency_s *= self._random.lognormvariate(0, jitter)
        start = self._clock()
        self._wait(start + latency_s, while_same="latency_ms")
        while self.faults.get("hang") and not self.faults.get("gone"):
            if self._closed or self._clock() > start + _LONGEST_HANG_S:
                raise SourceUnavailable("the source hangs (source.hang is set)")
            self._sleep(_POLL_S)
        self._fail_if_gone()
        if self._random.random() < self.faults.get("error_rate"):
            raise SourceUnavailable("the source failed (drawn by source.error_rate)")

    def _transfer(self, size: int, start: float) -> None:
        """Wait until the shared line has carried so many bytes."""
        self._wait(self.faults.reserve_line(size, start), while_same="bandwidth")
        self._fail_if_gone()

    def _wait(self, until: float, *, while_same: str) -> None:
        """Sleep, but no longer once the setting that asked for it changes or the source goes away."""
        setting = self.faults.get(while_same)
        while (rest := until - self._clock()) > 0:
            if self._closed or self.faults.get("gone") or self.faults.get(while_same) != setting:
                return
            self._sleep(min(rest, _POLL_S))

    def _fail_if_gone(self) -> None:
        if self.faults.get("gone"):
            raise SourceUnavailable("the source is gone (source.gone is set)")
