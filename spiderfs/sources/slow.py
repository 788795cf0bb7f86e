"""Any source with added latency and a bandwidth limit: for experiments, tests and benchmarks.

The settings are shared by every process of a mount and changed while it runs. They lie in a small mapped file, which
for a mount has no name and lies on no disk: one double per setting, and the time at which the simulated line is free
again. Reading one is a memory access; a write is one aligned 8-byte store, so a reader never sees half of it.

The line's time is read and advanced under a thread lock (within a process) and an fcntl record lock (between
processes). The kernel drops a record lock when its holder dies, however it dies, so a killed worker cannot leave the
line locked. Neither lock is ever held while someone sleeps.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from spiderfs.sources.source import Source, SourceStat, Version, streamed

P = ParamSpec("P")
T = TypeVar("T")

# Entries that one latency pays for in a scan: about what an NFS server packs into one READDIRPLUS exchange.
ENTRIES_PER_LATENCY = 1000
# How soon a call that waits notices a changed setting. 16 waiting threads cost some 800 wake-ups a second at most.
_POLL_S = 0.02
SLOW_SETTINGS = ("latency_ms", "bandwidth")
"""Milliseconds before every call is answered (a scan: per 1,000 entries); and bytes per second for all processes
together, 0 for no limit."""
_SLOTS = {name: slot for slot, name in enumerate(SLOW_SETTINGS)}
_LINE_FREE = len(SLOW_SETTINGS)  # the slot behind the settings
_FILE_BYTES = 8 * (len(SLOW_SETTINGS) + 1)


class SlowSettings:
    """The live settings, 0 at first. Thread-safe, and usable on both sides of a fork."""

    def __init__(self, fd: int) -> None:
        """`fd`: a file of `_FILE_BYTES`; `create`, `in_memory` and `open` have one."""
        self._fd = fd
        self._map = mmap.mmap(fd, _FILE_BYTES)
        self._values = memoryview(self._map).cast("d")
        self._lock = threading.Lock()

    @classmethod
    def create(cls, path: str | os.PathLike[str], **settings: float) -> SlowSettings:
        """A new file, in place of any older one, which those who have mapped it keep."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return cls._made(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), settings)

    @classmethod
    def in_memory(cls, **settings: float) -> SlowSettings:
        """The same for this process and its forks alone: no damage to a disk or a file can end them (SIGBUS)."""
        return cls._made(os.memfd_create("spiderfs-slow"), settings)

    @classmethod
    def _made(cls, fd: int, settings: Mapping[str, float]) -> SlowSettings:
        os.ftruncate(fd, _FILE_BYTES)
        state = cls(fd)
        state.change(settings)
        return state

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> SlowSettings:
        """The state that another process has created."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def get(self, name: str) -> float:
        return self._values[_SLOTS[name]]

    def set(self, name: str, value: float) -> None:
        """Change one setting in all processes at once; who gives it has checked its range (`options/model.py`)."""
        with self._locked():
            self._values[_SLOTS[name]] = value
            if name == "bandwidth":
                self._values[_LINE_FREE] = 0.0

    def change(self, settings: Mapping[str, float]) -> None:
        """Set every one of these settings whose value differs from the present one."""
        for name, value in settings.items():
            if value != self.get(name):
                self.set(name, value)

    def reserve_line(self, size: int, start: float) -> float:
        """When `size` bytes asked for at `start` have come through the line of all, in seconds of time.monotonic()."""
        bandwidth = self.get("bandwidth")
        if bandwidth == 0:
            return start
        with self._locked():
            done = max(start, self._values[_LINE_FREE]) + size / bandwidth
            self._values[_LINE_FREE] = done
            return done

    def close(self) -> None:
        """Let go of the file; idempotent."""
        if self._fd >= 0:
            self._values.release()
            self._map.close()
            os.close(self._fd)
            self._fd = -1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # A record lock belongs to the process, not to the descriptor, as flock's does: forked workers, which share the
        # descriptor, exclude each other. Threads of one process do not, hence the second lock.
        with self._lock:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)


class SlowSource:
    """`inner`, as slow as `settings` say at each call; `clock` and `sleep` are those of time, and go together."""

    def __init__(
        self,
        inner: Source,
        settings: SlowSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.settings = settings
        self._inner = inner
        self._clock = clock
        self._sleep = sleep
        self._closed = False
        self.stat, self.statvfs = self._after_exchange(inner.stat), self._after_exchange(inner.statvfs)
        self.readlink, self.listxattr = self._after_exchange(inner.readlink), self._after_exchange(inner.listxattr)
        self.getxattr = self._after_exchange(inner.getxattr)
        self.undated_directories = inner.undated_directories

    def _after_exchange(self, ask: Callable[P, T]) -> Callable[P, T]:
        def asked(*args: P.args, **kwargs: P.kwargs) -> T:
            self._exchange()
            return ask(*args, **kwargs)

        return asked

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        self._exchange()
        for count, entry in enumerate(self._inner.scan(path, known)):
            if count and count % ENTRIES_PER_LATENCY == 0:
                self._exchange()
            yield entry

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        start = self._exchange()
        data = self._inner.read(path, offset, length, version)
        self._transfer(len(data), start)
        return data

    def stream(self, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
        start = self._exchange()
        for data in streamed(self._inner, path, offset, length, version):
            self._transfer(len(data), start)
            yield data

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        start = self._exchange()
        found, data = self._inner.read_present(path, most_bytes)
        self._transfer(len(data), start)
        return found, data

    def close(self) -> None:
        """Close the inner source and end what waits; the settings stay with who made them."""
        self._closed = True
        self._inner.close()

    def _exchange(self) -> float:
        """Take the time of one question to the server; returns when that ended."""
        self._wait(self._clock() + self.settings.get("latency_ms") / 1000, while_same="latency_ms")
        return self._clock()

    def _transfer(self, size: int, start: float) -> None:
        self._wait(self.settings.reserve_line(size, start), while_same="bandwidth")

    def _wait(self, until: float, *, while_same: str) -> None:
        """Sleep, but no longer once the setting that asked for it changes or the source is closed."""
        setting = self.settings.get(while_same)
        while (rest := until - self._clock()) > 0:
            if self._closed or self.settings.get(while_same) != setting:
                return
            self._sleep(min(rest, _POLL_S))
