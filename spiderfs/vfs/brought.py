"""Bytes that belong to a look-up or an open and not to the store: memory that all workers share.

READ, and the open that follows a look-up, may come to another worker than the one that has read the file, when the
source has another version by then. So the bytes of each open of a provisional version are kept here, by its handle,
until it is closed or newer ones take the room.

**Opens that are made again.** The kernel answers an open that gets ESTALE by two look-ups of the name and another open,
whose ESTALE is the reader's. So the thread is noted: its look-ups then read the file too, and if the file cannot be
read any more when it is opened, the open goes on with what the look-up has read. Any worker may get any of these.
"""

from __future__ import annotations

import mmap
import random
import struct
import time

from spiderfs.shared.recent_records import RecentRecords
from spiderfs.store.store import ContentKey
from spiderfs.vfs.pending_reads import PendingReads

# Readers that have this much open at a time, of files that have just been written, keep their bytes.
_LIMIT_BYTES = 256 << 20
# How long after an open that got ESTALE look-ups of its thread read files, and an open may use what they have read.
_AGAIN_S = 10.0
# Handles with further bits are those of control files.
_HANDLE_BITS = 62
_KEY = struct.Struct("<QI")


class Brought:
    """Make it before the workers are forked."""

    def __init__(self) -> None:
        self._bytes = RecentRecords(_LIMIT_BYTES)
        # A table for each kind of note, with a slot for each thread: no note may push out another one.
        self._failed, self._read = PendingReads(), PendingReads()
        # Look-ups pass by here: it costs less than the thread's note to see that nobody was noted lately.
        self._noted_at = memoryview(mmap.mmap(-1, 8)).cast("d")

    def new_handle(self) -> int:
        return random.getrandbits(_HANDLE_BITS)

    def keep(self, key: ContentKey, payload: bytes) -> bool:
        """Keep bytes for whoever has their handle; False if they are too many."""
        return self._bytes.put(_KEY.pack(*key), payload)

    def piece(self, key: ContentKey, offset: int = 0, size: int | None = None) -> bytes | None:
        return self._bytes.get(_KEY.pack(*key), offset, size)

    def close(self, handle: int) -> None:
        self._bytes.remove(_KEY.pack(handle, 0))

    def open_failed(self, thread: int) -> None:
        """Note that the kernel is going to look up and open again for this thread."""
        now = self._noted_at[0] = time.monotonic()
        self._failed.put(thread, 0, 0, now)

    def opens_again(self, thread: int) -> bool:
        """Whether a look-up of this thread is to read the file too."""
        if not (noted_at := self._noted_at[0]):
            return False
        since = time.monotonic() - _AGAIN_S
        return noted_at >= since and self._failed.look(thread, since) is not None

    def open_succeeded(self, thread: int) -> None:
        """Forget that an open of this thread had failed: what it looks up next is another affair."""
        if self.opens_again(thread):
            self._failed.take(thread, 0, 0.0)

    def note(self, thread: int, inode: int, handle: int) -> None:
        """Note that a look-up of the thread has read this version, and under which handle its bytes are kept."""
        self._read.put(thread, handle, inode, time.monotonic())

    def noted(self, thread: int, inode: int) -> bool:
        """Whether a look-up of the thread has read this version, and no open has followed."""
        noted = self._read.look(thread, time.monotonic() - _AGAIN_S)
        return noted is not None and noted[1] == inode

    def take(self, thread: int, inode: int) -> int | None:
        """The handle of what a look-up of the thread has read of this version, for one open."""
        return self._read.take(thread, inode, time.monotonic() - _AGAIN_S)
