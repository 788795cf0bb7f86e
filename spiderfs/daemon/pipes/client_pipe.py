"""The manager's end of the FIFO into which readers that go around FUSE write what they served.

The FIFO lives as long as the manager. A client that finds no manager at the other end reads through the mount until
there is a new FIFO. Clients never wait for the manager: a client counts the records that find the FIFO full, and tells
their number in the next record that fits.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets

from spiderfs.core.events import Access
from spiderfs.daemon.pipes.event_pipe import PIPE_BYTES, read_events
from spiderfs.metrics import Counters
from spiderfs.shared.bypass_terms import Terms, publish_terms
from spiderfs.shared.layout import RunLayout

log = logging.getLogger(__name__)


class ClientPipe:
    """The manager's end; only users who can read the store can reach the FIFO: the mount's user, and root."""

    def __init__(self, run: RunLayout, terms: Terms, counters: Counters) -> None:
        self._terms = run.client_terms
        self._counters = counters
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
            self.fd = _nobodys_pipe()
        with contextlib.suppress(PermissionError):
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


def _nobodys_pipe() -> int:
    """The reading end of a pipe that nobody writes to, and that never reaches its end."""
    name = f"/proc/self/fd/{(ends := os.pipe())[0]}"
    try:
        return os.open(name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        for end in ends:
            os.close(end)
