"""The latest accesses, as `.spiderfs/log` shows them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime

import trio

from spiderfs.core.events import FETCHED, HIT, OPENED, REFUSED, UNSTORED, WARMED, Access
from spiderfs.linux import steady_clock
from spiderfs.shared.escapes import escaped_path
from spiderfs.shared.layout import RunLayout

log = logging.getLogger(__name__)

# The number of earlier accesses with which the log begins for a reader who opens it now.
REMEMBERED_ACCESSES = 1000
# The log is written as long as someone has looked at it within this time; a log that is forgotten costs nothing. At
# this size the file begins again, and a reader who follows it with `tail -f` reads on.
WANTED_S = 60.0
MAX_BYTES = 8 << 20
WRITE_INTERVAL_S = 0.25

WORDS = {HIT: "hit", FETCHED: "fetched", REFUSED: "uncached", UNSTORED: "uncached", WARMED: "warmed"}


class AccessLog:
    def __init__(self, run: RunLayout, enabled: bool, path_of: Callable[[int], bytes]) -> None:
        self._file, self._wanted, self._enabled = run.access_log, run.access_log_wanted, enabled
        self._path_of = path_of
        self._recent: deque[Access] = deque(maxlen=REMEMBERED_ACCESSES)
        self._unwritten: deque[Access] = deque(maxlen=100 * REMEMBERED_ACCESSES)
        self._following = False
        self._recorded = trio.Event()

    def record_accesses(self, events: list[Access]) -> None:
        if self._enabled:
            noted = (access for access in events if access.where != OPENED)
            (self._unwritten if self._following else self._recent).extend(noted)
            self._recorded.set()

    async def run(self) -> None:
        """For ever: write soon after accesses were recorded."""
        while True:
            await self._recorded.wait()
            await trio.sleep(WRITE_INTERVAL_S)
            self.write()

    def write(self) -> None:
        """Bring the file up to date if anybody reads it; what was remembered comes first."""
        if self._recorded.is_set():
            self._recorded = trio.Event()
        following = self._is_wanted()
        if following and not self._following:
            self._unwritten.extend(self._recent)
            self._recent.clear()
            if not self._unwritten:
                with contextlib.suppress(OSError):
                    self._file.touch()
        self._following = following
        if not self._unwritten:
            return
        lines = [self._line(access) for access in self._unwritten]
        self._unwritten.clear()
        mode = "ab" if self._file.exists() and self._file.stat().st_size < MAX_BYTES else "wb"
        try:
            with open(self._file, mode) as file:
                file.writelines(lines)
        except OSError as exc:
            # A full disk costs the lines of these accesses, and nothing else depends on them.
            log.debug("the access log could not be written: %s", exc)

    def _is_wanted(self) -> bool:
        try:
            return time.time() - self._wanted.stat().st_mtime < WANTED_S
        except FileNotFoundError:
            return False

    def render(self) -> bytes:
        """Bring the file up to date for whoever opens `.spiderfs/log`, who reads the text from that file."""
        self.want()
        self.write()
        return b""

    def want(self) -> None:
        with contextlib.suppress(OSError):
            self._wanted.touch()

    def _line(self, access: Access) -> bytes:
        when = datetime.fromtimestamp(access.time_s - steady_clock.ahead_s()).isoformat(
            sep=" ", timespec="milliseconds"
        )
        block = f" block={access.block}" if access.block else ""
        head = f"{when} {WORDS[access.where]:8} {access.size:>9} thread={access.pid}{block} "
        served = b"" if access.wanted == access.inode else b" served by " + escaped_path(self._path_of(access.inode))
        return head.encode() + escaped_path(self._path_of(access.wanted)) + served + b"\n"
