"""Which questions the source has just left unanswered: known to all processes of a mount, in memory that they share.

Readers of one page, or of one name, wait for each other in the kernel: it sends the question of the second one when the
first has failed. If each were asked anew for the whole time limit, the last of ten readers would wait ten times as long
as it may. So whoever asks what somebody has just waited for in vain is told so at once.
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
    """Make it before the fork, for only processes with the same hash seed find each other's notes.

    Two questions may share a slot, and then only the later one is known.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._map = mmap.mmap(-1, _SLOTS * _SLOT.size)
        self._clock = clock

    def note(self, question: Hashable) -> None:
        """Note that somebody has waited in vain for the answer."""
        hashed = hash(question)
        _SLOT.pack_into(self._map, self._at(hashed), hashed, self._clock())

    def has(self, question: Hashable) -> bool:
        """Whether somebody has just waited for it in vain."""
        hashed = hash(question)
        noted, at = _SLOT.unpack_from(self._map, self._at(hashed))
        return bool(noted == hashed and self._clock() - at < SHARED_S)

    def _at(self, hashed: int) -> int:
        return hashed % _SLOTS * _SLOT.size
