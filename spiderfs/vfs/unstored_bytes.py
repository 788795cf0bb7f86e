"""Bytes that belong to a look-up or an open and not to the store: memory that all workers share.

READ, and the open that follows a look-up, may come to another worker than the one that has read the file; the source
may have another version by then. So the bytes of each open of a provisional version are kept here, by its handle,
until it is closed or newer ones take the room. What several workers fetched last lies in such memory too (`Fetcher`).

**Opens that are made again.** The kernel answers an open that gets ESTALE by two look-ups of the name and another open,
whose ESTALE is the reader's. So the thread is noted: its look-ups then read the file too, and if the file cannot be
read any more when it is opened, the open goes on with what the look-up has read. Any worker may get any of these, and
after the death of one, two workers may get the same one. So a note says which request has used it, and is there for
that request until the end. The notes lie beside the bytes, and none pushes out another.
"""

from __future__ import annotations

import math
import mmap
import random
import struct
import time

from spiderfs.core.memory import MemoryBounds
from spiderfs.shared.shared_memory import RecentRecords
from spiderfs.store.store import ContentKey
from spiderfs.vfs.answer_types import Caller

# How long after an open that got ESTALE look-ups of its thread read files, and an open may use what they have read.
_AGAIN_S = 10.0
# Handles with further bits are those of control files.
_HANDLE_BITS = 62
# Keys: handle and block, of bytes; a thread, of when its open has failed; a thread and an inode, of what it has read.
_KEY, _THREAD, _READ = struct.Struct("<QI"), struct.Struct("<Q"), struct.Struct("<QQ")
_FAILED_AT = struct.Struct("<d")
# The handle of what was read, the time, and the request that has used it: 0 for none yet.
_NOTE = struct.Struct("<QdQ")
# Used by a request whose number is not known.
_SOME_REQUEST = 1


class UnstoredBytes:
    """Make it before the workers are forked."""

    def __init__(self, limit_bytes: int = MemoryBounds().unstored) -> None:
        self._records = RecentRecords(limit_bytes)
        # Look-ups pass by here: it costs less than the thread's note to see that no one was noted lately.
        self._noted_at = memoryview(mmap.mmap(-1, 8)).cast("d")
        self._noted_at[0] = -math.inf

    def new_handle(self) -> int:
        return random.getrandbits(_HANDLE_BITS)

    def keep(self, key: ContentKey, payload: bytes) -> bool:
        """Keep bytes for whoever has their handle; False if they are too many."""
        return self._records.put(_KEY.pack(*key), payload)

    def piece(self, key: ContentKey, offset: int = 0, size: int | None = None) -> bytes | None:
        return self._records.get(_KEY.pack(*key), offset, size)

    def close(self, handle: int) -> None:
        self._records.remove(_KEY.pack(handle, 0))

    def open_failed(self, thread: int) -> None:
        """Note that the kernel is going to look up and open again for this thread."""
        now = self._noted_at[0] = time.monotonic()
        self._records.put(_THREAD.pack(thread), _FAILED_AT.pack(now))

    def opens_again(self, thread: int) -> bool:
        """Whether a look-up of this thread is to read the file too."""
        since = time.monotonic() - _AGAIN_S
        if self._noted_at[0] < since or (failed_at := self._records.get(_THREAD.pack(thread))) is None:
            return False
        return bool(_FAILED_AT.unpack(failed_at)[0] >= since)

    def open_succeeded(self, thread: int) -> None:
        """Forget that an open of this thread had failed: what it looks up next is another affair."""
        self._records.put(_THREAD.pack(thread), _FAILED_AT.pack(-math.inf))

    def remember_read(self, thread: int, inode: int, handle: int, request: int = 0) -> None:
        """Note that a look-up of the thread has read this version, and the handle of the bytes that it has read."""
        self._records.put(_READ.pack(thread, inode), _NOTE.pack(handle, time.monotonic(), request))

    def has_unused_read(self, thread: int, inode: int) -> bool:
        """Whether a look-up of the thread has read this version, and no open has followed."""
        noted = self._noted(thread, inode)
        return noted is not None and not noted[1]

    def take(self, caller: Caller, inode: int, instead: int = 0) -> int | None:
        """The handle of what the thread's look-up has read, for one open; `instead`: of what this open has read."""
        noted, request = self._noted(caller.pid, inode), caller.request or _SOME_REQUEST
        if noted is None or noted[1] not in (0, caller.request):
            return None
        if not noted[1]:
            self.remember_read(caller.pid, inode, instead or noted[0], request)
        return noted[0]

    def _noted(self, thread: int, inode: int) -> tuple[int, int] | None:
        """Handle, and the request that has used it."""
        if (note := self._records.get(_READ.pack(thread, inode))) is None:
            return None
        handle, noted_at, request = _NOTE.unpack(note)
        return (handle, request) if noted_at >= time.monotonic() - _AGAIN_S else None
