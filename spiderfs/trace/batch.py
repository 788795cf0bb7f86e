"""One batch in a trace: all that any scoring needs, in the precision in which the trainer sent it.

All records of a trace have the same size, and one byte of each record names its kind. A batch is longer than a record,
so its bytes are spread over as many records as they need, around that byte. A program that does not know the kind skips
these records like any others, and a crash in the middle leaves whole records. A sample with an embedding of 64 numbers
and a loss takes 158 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RECORD_BYTES = 32
# The offset of the byte that names the kind of a record.
KIND_AT = 28
# The bytes of a batch that a record carries: those before its kind.
CARRIED = KIND_AT


@dataclass(frozen=True, slots=True, eq=False)
class TracedBatch:
    """A batch: the inodes of the samples whose bytes were served, with their embeddings and losses; one row each.

    `goes_on` means that it was scored together with the batch before it.
    """

    course_id: str
    keys: NDArray[np.uint64]
    embeddings: NDArray[np.float16]
    losses: NDArray[np.float16] | None
    goes_on: bool = False

    @classmethod
    def from_bytes(
        cls, course_id: str, rows: int, dimension: int, with_losses: bool, goes_on: bool, content: bytes
    ) -> TracedBatch:
        """The batch in what `packed` returned; bytes after its end are ignored."""
        keys = np.frombuffer(content, "<u8", rows)
        losses = np.frombuffer(content, "<f2", rows, keys.nbytes) if with_losses else None
        before = keys.nbytes + (0 if losses is None else losses.nbytes)
        embeddings = np.frombuffer(content, "<f2", rows * dimension, before).reshape(rows, dimension)
        return cls(course_id, keys, embeddings, losses, goes_on)


def packed(keys: NDArray[np.uint64], embeddings: NDArray[np.floating], losses: NDArray[np.floating] | None) -> bytes:
    """A batch as bytes; there are `byte_count` of them."""
    of_losses = b"" if losses is None else losses.astype("<f2").tobytes()
    return keys.astype("<u8").tobytes() + of_losses + embeddings.astype("<f2").tobytes()


def byte_count(rows: int, dimension: int, with_losses: bool) -> int:
    """The length of a batch as bytes."""
    return rows * (8 + 2 * dimension + 2 * with_losses)


def records_for(length: int) -> int:
    """The number of records that carry `length` bytes."""
    return -(-length // CARRIED)


def to_records(content: bytes, kind: int) -> bytes:
    """Records of a kind that carry these bytes."""
    count = records_for(len(content))
    records = np.zeros((count, RECORD_BYTES), np.uint8)
    records[:, :CARRIED] = np.frombuffer(content.ljust(count * CARRIED, b"\0"), np.uint8).reshape(count, CARRIED)
    records[:, KIND_AT] = kind
    return records.tobytes()


def from_records(records: NDArray[np.void]) -> bytes:
    """The bytes that these records carry, and the zeros that fill up the last record."""
    rows = np.frombuffer(records.tobytes(), np.uint8).reshape(len(records), RECORD_BYTES)
    return rows[:, :CARRIED].tobytes()
