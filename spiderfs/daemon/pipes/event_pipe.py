"""The one-way road from the workers to the manager: a pipe that never makes a worker wait.

Writes of up to PIPE_BUF bytes are atomic (pipe(7)), so many workers share one pipe and records never mix. A full pipe
drops the batch and counts it: events are hints, the store is the truth. The supervisor keeps both ends open, so that a
manager's death loses nothing that still fits into the pipe.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import time
from operator import attrgetter

from spiderfs.core.events import ACCESS_RECORD, Access, unpacked
from spiderfs.metrics import Counters

PIPE_BYTES = 1 << 20  # the limit for ordinary users, /proc/sys/fs/pipe-max-size; 26,000 events
# As many as fit into one atomic write.
BATCH_EVENTS = select.PIPE_BUF // ACCESS_RECORD.size
# As many as the manager acts on in one transaction of the store.
READ_EVENTS = 1024

_time_s = attrgetter("time_s")


def open_pipe() -> tuple[int, int]:
    """Read end and write end, both non-blocking."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # An ordinary user who has used up his share of pipe memory keeps the 64 KiB that every pipe has.
    with contextlib.suppress(PermissionError):
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reader, writer


class EventWriter:
    """A worker's end; the caller flushes now and then, and `note` does so when a batch is full."""

    def __init__(self, fd: int, counters: Counters) -> None:
        self._fd = fd
        self._counters = counters
        self._batch: list[bytes] = []

    def note(
        self, inode: int, size: int, where: int, pid: int, block: int = 0, trainer: int = 0, wanted: int = 0
    ) -> None:
        self._batch.append(ACCESS_RECORD.pack(time.time(), inode, wanted or inode, size, block, pid, trainer, where))
        if len(self._batch) >= BATCH_EVENTS:
            self.flush()

    def flush(self) -> None:
        if not self._batch:
            return
        batch, self._batch = self._batch, []
        try:
            os.write(self._fd, b"".join(batch))
        except BlockingIOError:
            self._counters.add("events_dropped", len(batch))


def read_events(fd: int) -> list[Access]:
    """The events that wait, at most READ_EVENTS; empty if there are none."""
    try:
        # A whole number of records: what the pipe holds is one too, so none is ever torn.
        waiting = os.read(fd, READ_EVENTS * ACCESS_RECORD.size)
    except BlockingIOError:
        waiting = b""
    # Workers send batches; in the order of time, recency is what it was.
    return sorted(unpacked(waiting), key=_time_s)
