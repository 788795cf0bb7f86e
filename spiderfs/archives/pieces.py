"""Reading an archive from its beginning to its end, in large pieces, a few of them ahead.

One pass over all bytes finds the headers of small members sooner than a question for each, which waits for each answer.
Only what lies far behind is asked for by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

Read = Callable[[int, int], bytes]
"""Bytes of an archive, at an offset and of a length that lie within it."""

PIECE_BYTES = 1 << 20
# Pieces that are asked for ahead of the one that is wanted.
AHEAD = 8
# Where the next header lies further behind than this, it is asked for alone: the source sends so many bytes in about
# the time of an answer. Some more bytes come along for a header that follows another (long names).
_HOP_BYTES, _HOPPED_BYTES = 2 << 20, 4096


class Pieces:
    """The bytes of an archive of `size` bytes, for a reader that goes forward; `read` is asked for what is not here."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self.size = read, size
        self._begin, self._held = 0, b""

    def at(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes at `offset`; fewer only at the end of the archive."""
        end = min(offset + length, self.size)
        begin = offset - self._begin
        if begin < 0 or end - self._begin > len(self._held):
            if end <= offset:
                return b""
            self._hold(offset, end)
            begin = offset - self._begin
        return self._held[begin : end - self._begin]

    def _hold(self, offset: int, end: int) -> None:
        if offset - self._begin - len(self._held) > _HOP_BYTES:
            self._begin, end = offset, min(max(end, offset + _HOPPED_BYTES), self.size)
        else:
            self._begin = offset // PIECE_BYTES * PIECE_BYTES
            end = min(-(-end // PIECE_BYTES) * PIECE_BYTES, self.size)
        self._held = self._read(self._begin, end - self._begin)


class PieceReadAhead:
    """`read` for a reader of whole pieces in a row: the next ones are asked for in threads. Close it at the end."""

    def __init__(self, read: Read, size: int, ahead: int = AHEAD) -> None:
        self._read, self._size, self._ahead = read, size, ahead
        self._threads = ThreadPoolExecutor(ahead)
        self._coming: dict[int, Future[bytes]] = {}

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the archive; raises what the source raises."""
        first, past = divmod(offset, PIECE_BYTES)
        last = -(-(offset + length) // PIECE_BYTES)
        if past or (length % PIECE_BYTES and offset + length < self._size):
            return self._read(offset, length)
        for number in [known for known in self._coming if known < first]:
            self._coming.pop(number).cancel()
        for number in range(first, min(last + self._ahead, -(-self._size // PIECE_BYTES))):
            if number not in self._coming:
                begin = number * PIECE_BYTES
                size = min(PIECE_BYTES, self._size - begin)
                self._coming[number] = self._threads.submit(self._read, begin, size)
        return b"".join(self._coming.pop(number).result() for number in range(first, last))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
