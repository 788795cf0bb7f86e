"""The result of each thread's latest look-up, kept for the open that follows it: memory that all workers share.

The kernel sends a look-up and then an open, perhaps to another worker, and the open only says which inode it opens. So
the look-up leaves a note under the number of the thread: which file the thread had asked for, and which one it got.
"""

from __future__ import annotations

import mmap
import struct


class PendingReads:
    """A table with one slot for each thread, by the thread's number.

    A thread does one thing at a time, so a slot has one writer. Where two threads share a slot, the earlier note can
    only get lost, and the open is then taken at face value.

    No open need follow a look-up: stat(2) makes a look-up too. Its note is void once the thread looks another name up,
    opens something, or lets time pass. One mistake remains possible: a thread calls stat on X, is given H, and as its
    very next open opens H by H's own name, which the kernel still knew. That open is taken for an open of X.
    """

    _SLOTS = 8192
    _SLOT = struct.Struct("<QQQd")  # thread, wanted inode, given inode, time

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, self._SLOTS * self._SLOT.size)

    def put(self, thread: int, wanted: int, given: int, now: float) -> None:
        self._SLOT.pack_into(self._map, self._at(thread), thread, wanted, given, now)

    def look(self, thread: int, since: float) -> tuple[int, int] | None:
        """The thread's note, which stays: the inode that it had asked for, and the one that it was given.

        None if it has none, or one from before `since`.
        """
        noted, wanted, given, when = self._SLOT.unpack_from(self._map, self._at(thread))
        return (int(wanted), int(given)) if noted == thread and when >= since else None

    def take(self, thread: int, given: int, since: float) -> int | None:
        """Take the thread's note: the inode that it had asked for when it was given `given`.

        None if the note says something else, or is from before `since`. The note is gone afterwards in any case.
        """
        at = self._at(thread)
        noted, wanted, was_given, when = self._SLOT.unpack_from(self._map, at)
        if noted != thread:
            return None
        self._SLOT.pack_into(self._map, at, 0, 0, 0, 0.0)
        return int(wanted) if was_given == given and when >= since else None

    def _at(self, thread: int) -> int:
        return thread % self._SLOTS * self._SLOT.size
