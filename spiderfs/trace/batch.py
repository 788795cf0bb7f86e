"""One batch as a trace keeps it: all that any scoring asks for, in the precision in which the trainer sent it.

A trace is made of records of one size, each of which names its kind in one byte. A batch is longer, so its bytes are
carried by as many records as they need, around that byte: readers that do not know the kind skip them like any other,
and a crash in the middle leaves whole records. A sample of 64 dimensions with its loss takes 158 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RECORD_BYTES = 32
# Where in a record its kind is.
KIND_AT = 28
# Bytes that a record carries: those before its kind.
CARRIED = KIND_AT


@dataclass(frozen=True, slots=True, eq=False)
class TracedBatch:
    """The samples whose bytes were served, by inode, and what the model made of them; one row each."""

    list_id: str
    keys: NDArray[np.uint64]
    embeddings: NDArray[np.float16]
    losses: NDArray[np.float16] | None

    @property
    def dimension(self) -> int:
        return int(self.embeddings.shape[1])

    @classmethod
    def from_bytes(cls, list_id: str, rows: int, dimension: int, with_losses: bool, content: bytes) -> TracedBatch:
        """From what `packed` gave, or more than that."""
        keys = np.frombuffer(content, "<u8", rows)
        losses = np.frombuffer(content, "<f2", rows, keys.nbytes) if with_losses else None
        before = keys.nbytes + (0 if losses is None else losses.nbytes)
        embeddings = np.frombuffer(content, "<f2", rows * dimension, before).reshape(rows, dimension)
        return cls(list_id, keys, embeddings, losses)


def packed(keys: NDArray[np.uint64], embeddings: NDArray[np.floating], losses: NDArray[np.floating] | None) -> bytes:
    """A batch as bytes, `byte_count` of them."""
    of_losses = b"" if losses is None else losses.astype("<f2").tobytes()
    return keys.astype("<u8").tobytes() + of_losses + embeddings.astype("<f2").tobytes()


def byte_count(rows: int, dimension: int, with_losses: bool) -> int:
    """The length of a batch as bytes."""
    return rows * (8 + 2 * dimension + 2 * with_losses)


def records_for(length: int) -> int:
    """How many records carry so many bytes."""
    return -(-length // CARRIED)


def to_records(content: bytes, kind: int) -> bytes:
    """Records of a kind that carry these bytes."""
    count = records_for(len(content))
    records = np.zeros((count, RECORD_BYTES), np.uint8)
    records[:, :CARRIED] = np.frombuffer(content.ljust(count * CARRIED, b"\0"), np.uint8).reshape(count, CARRIED)
    records[:, KIND_AT] = kind
    return records.tobytes()


def from_records(records: NDArray[np.void]) -> bytes:
    """The bytes that records carry, and what fills the last of them."""
    rows = np.frombuffer(records.tobytes(), np.uint8).reshape(len(records), RECORD_BYTES)
    return rows[:, :CARRIED].tobytes()
