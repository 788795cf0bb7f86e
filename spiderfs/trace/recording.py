"""The trace that a mount records (`-o trace=FILE`): it ends with a warning where the disk takes no more of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from spiderfs.core.hints import Hint, RankNews
from spiderfs.errors import SpiderfsError
from spiderfs.linux import steady_clock
from spiderfs.trace.format import TraceWriter

log = logging.getLogger(__name__)


class Recording(TraceWriter):
    """Nothing else depends on a trace, so no method raises once the recording has begun."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._ended = False

    def flush(self) -> None:
        """Write down what was recorded so far; the process may then die without a loss."""
        if self._ended:
            return
        try:
            super().flush()
        except SpiderfsError as exc:
            log.warning("%s: the trace ends here", exc)
            self._ended = True
            self._buffer.clear()

    def _put(self, records: bytes) -> None:
        if not self._ended:
            super()._put(records)


def noted_in(recording: Recording | None, number_of: Callable[[str], int] = int) -> Callable[[Hint], None]:
    """A function that records hints as of now, if there is a recording; `number_of` a course is its number."""
    if recording is None:
        return lambda hint: None
    return lambda hint: recording.hint(steady_clock.now(), hint, number_of)


def news_noted_in(recording: Recording | None, number_of: Callable[[str], int]) -> Callable[[RankNews], None] | None:
    """The same for what ranks tell of their plans; None without a recording, for plans are long."""
    if recording is None:
        return None
    return lambda news: recording.rank_news(steady_clock.now(), news, number_of)


def recording_to(path: Path | None) -> Recording | None:
    """A recording that goes on with the file; None without a file, or where the file cannot be written any more."""
    if path is None:
        return None
    try:
        return Recording(path)
    except SpiderfsError as exc:
        # The file was writable when the mount began, and what has happened since must not stop a new manager.
        log.warning("%s: no more accesses are recorded", exc)
        return None
