"""Questions that the source has just left unanswered; all processes of a mount know them, by memory that they share.

Readers of one page, or of one name, wait for each other in the kernel: it sends the second reader's question when the
first reader's has failed. If the source were asked each of these questions for the whole time limit, the last of ten
readers would wait ten times as long as allowed. So if a question has just been asked in vain, the next one who asks it
gets the error at once.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Hashable

# The next reader's question follows one reader's error within microseconds, or 0.1 s on a busy machine. The source is
# asked the same thing no more often than this, too.
SHARED_S = 1.0
_SLOTS = 4096
_SLOT = struct.Struct("<qd")


class RecentTimeouts:
    """Make this before the fork: only processes with the same hash seed find each other's notes.

    Two questions may share a slot; then only the later one is known.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._map = mmap.mmap(-1, _SLOTS * _SLOT.size)
        self._clock = clock

    def note(self, question: Hashable) -> None:
        """Note that somebody has waited in vain for the answer to this question."""
        hashed = hash(question)
        _SLOT.pack_into(self._map, self._at(hashed), hashed, self._clock())

    def has(self, question: Hashable) -> bool:
        """Whether somebody has just waited in vain for the answer to this question."""
        hashed = hash(question)
        noted, at = _SLOT.unpack_from(self._map, self._at(hashed))
        return bool(noted == hashed and self._clock() - at < SHARED_S)

    def _at(self, hashed: int) -> int:
        return hashed % _SLOTS * _SLOT.size
