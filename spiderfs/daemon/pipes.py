"""The pipes by which workers, and readers around FUSE, report reads to the manager without waiting for it.

**Workers** share one pipe. Writes of up to PIPE_BUF bytes are atomic (pipe(7)), so records never mix. If the pipe is
full, a worker drops its batch and counts the events: events are hints, the store is the truth. The supervisor keeps
both ends open, so the events that are in the pipe outlive the manager.

**Readers around FUSE** write what they served into a FIFO, which lives as long as the manager. A client that finds no
manager at the other end reads through the mount until there is a new FIFO. A client counts the records that find the
FIFO full, and reports their number in the next record that fits.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import select
from operator import attrgetter

import trio

from spiderfs.core.events import ACCESS_RECORD, Access, unpacked
from spiderfs.linux import steady_clock
from spiderfs.metrics import Counters
from spiderfs.shared.layout import RunLayout
from spiderfs.shared.published import Terms, publish_terms

PIPE_BYTES = 1 << 20  # the limit for ordinary users, /proc/sys/fs/pipe-max-size; 26,000 events
# The events that fit into one atomic write.
BATCH_EVENTS = select.PIPE_BUF // ACCESS_RECORD.size
# The events that the manager acts on in one transaction of the store.
READ_EVENTS = 1024

# How late the manager may learn of an access, or `session.PASS_INTERVAL_S` more. A flush is a write of 48 bytes per
# access.
FLUSH_INTERVAL_S = 0.02

_time_s = attrgetter("time_s")


def open_pipe() -> tuple[int, int]:
    """Read end and write end, both non-blocking."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # For a user who has used up the share of pipe memory, the pipe keeps the 64 KiB that every pipe has.
    with contextlib.suppress(PermissionError):
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reader, writer


class EventWriter:
    """A worker's end: `note` passes a full batch on, and `flush_in_time` one that does not become full."""

    def __init__(self, fd: int, counters: Counters) -> None:
        self._fd, self._counters = fd, counters
        self._batch: list[bytes] = []
        self._noted = trio.Event()

    def record_access(
        self,
        inode: int,
        size: int,
        where: int,
        pid: int,
        block: int = 0,
        trainer: int = 0,
        wanted: int = 0,
        at_s: float = 0.0,
        waited_us: int = 0,
    ) -> None:
        at_s = at_s or steady_clock.now()
        self._batch.append(
            ACCESS_RECORD.pack(at_s, inode, wanted or inode, size, block, pid, trainer, where, waited_us)
        )
        waiting = len(self._batch)
        if waiting == 1:
            self._noted.set()
        elif waiting >= BATCH_EVENTS:
            self.flush()

    async def flush_in_time(self) -> None:
        """Pass events on FLUSH_INTERVAL_S after the first of them, until cancelled; without events no one is woken."""
        while True:
            await self._noted.wait()
            await trio.sleep(FLUSH_INTERVAL_S)
            self._noted = trio.Event()
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
    """The events that wait in the pipe, in the order of their times, at most READ_EVENTS."""
    try:
        # The pipe holds whole records, and this reads a whole number of them, so no record is ever torn.
        waiting = os.read(fd, READ_EVENTS * ACCESS_RECORD.size)
    except BlockingIOError:
        waiting = b""
    # Batches of several workers overlap in time; the policies need the order in which files were opened.
    return sorted(unpacked(waiting), key=_time_s)


log = logging.getLogger(__name__)


class ClientPipe:
    """The manager's end; only users who can read the store can reach the FIFO: the mount's user, and root."""

    def __init__(self, run: RunLayout, terms: Terms, counters: Counters) -> None:
        self._terms, self._counters = run.client_terms, counters
        path = run.client_pipe(secrets.token_hex(8))
        self._name = path.name
        try:
            for left_by_another in run.client_pipes():
                left_by_another.unlink()
            os.mkfifo(path, 0o600)
            # Open for writing as well, or the FIFO would be at its end whenever the last client leaves (fifo(7)).
            self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as exc:
            log.warning(
                "cannot make the FIFO of spiderfs.client (%s): it reads through the mount until cache_dir is writable",
                exc.strerror,
            )
            # It never has anything to read.
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.change(terms)

    def change(self, terms: Terms) -> None:
        """Publish the terms that clients go by from now on."""
        try:
            publish_terms(self._terms, terms, self._name)
        except OSError as exc:
            log.warning("readers around FUSE do not learn of the options (%s)", exc.strerror)
            # Clients must not go by old terms; without any terms they read through the mount.
            with contextlib.suppress(OSError):
                self._terms.unlink()

    def read(self) -> list[Access]:
        """The opens that clients served since the last call, as events like the workers'; all were hits."""
        records = read_events(self.fd)
        events = [record for record in records if record.inode]
        dropped = sum(record.size for record in records if not record.inode)
        opens = len(events) + dropped
        self._counters.add("opens", opens)
        self._counters.add("opens_hit", opens)
        self._counters.add("client_opens", opens)
        self._counters.add("events_dropped", dropped)
        self._counters.add("redirects", sum(event.inode != event.wanted for event in events))
        return events
