"""The interface of an index of embeddings: `exact.py` has an exact index, `cells.py` and `graph.py` approximate ones.

A sample is named by its number, from 0 to capacity - 1. Vectors are float32 of length 1 (or 0), and distances are
Euclidean. All indexes return at most the k nearest samples, so a count of neighbours means the same with each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]

NOBODY = -1
"""The number that stands where there is no neighbour."""

# The distances of 4,096 samples to 128 rows take 2 MiB. More would leave the processor's caches before they are used.
BLOCK, BLOCK_ROWS = 4096, 128


class Neighbours(NamedTuple):
    """For each row of a query its k neighbours, nearest first; if there are fewer, the row ends in NOBODY."""

    ids: Ids
    """(rows, k) numbers of samples."""
    distances: Vectors
    """(rows, k) distances; infinity for NOBODY."""


class Index(Protocol):
    """An index of the vectors of up to `capacity` samples."""

    failures: int
    """How many queries failed and were repeated for fewer neighbours."""

    def __len__(self) -> int:
        """The number of samples that have a vector."""

    def update(self, ids: Ids, vectors: Vectors) -> None:
        """Set the vectors of these samples; `ids` names each sample once."""

    def nearest(self, ids: Ids, vectors: Vectors, k: int) -> Neighbours:
        """The k samples nearest to each vector, or as many as there are; `ids[i]` is not among those of vector i."""

    def present(self) -> Ids:
        """The samples that have a vector."""

    def vectors(self, ids: Ids) -> Vectors:
        """The vectors of samples that have one."""

    @property
    def bytes_per_sample(self) -> float:
        """The bytes of memory for one sample that has a vector."""

    def save(self, path: Path) -> None:
        """Write the index to a new file."""

    def restore(self, path: Path) -> None:
        """Replace the index by what `save` wrote; raises ValueError or OSError if the file cannot be used."""


def normalised(embeddings: NDArray[np.floating]) -> Vectors:
    """The rows as float32, each scaled to length 1; a row of zeros stays a row of zeros."""
    vectors = embeddings.astype(np.float32)
    # Scale first: the square of a large float32 would overflow.
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0.0)
    np.divide(vectors, largest, out=vectors, where=largest > 0)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    np.divide(vectors, lengths, out=vectors, where=lengths > 0)
    return vectors


def blocks_of(index: Index) -> Iterator[tuple[Ids, Vectors]]:
    """All samples that have a vector, with their vectors, BLOCK samples at a time."""
    present = index.present()
    for start in range(0, len(present), BLOCK):
        ids = present[start : start + BLOCK]
        yield ids, index.vectors(ids)


def exact_nearest(blocks: Iterable[tuple[Ids, Vectors]], ids: Ids, vectors: Vectors, k: int) -> Neighbours:
    """The neighbours of each vector among all samples in `blocks`, by one matrix product per block."""
    lengths = np.einsum("ij,ij->i", vectors, vectors)[:, None]
    nearest = Nearest(ids, k)
    for block_ids, block in blocks:
        block_lengths = np.einsum("ij,ij->i", block, block)
        for start in range(0, len(ids), BLOCK_ROWS):
            rows = np.arange(start, min(start + BLOCK_ROWS, len(ids)))
            squared = vectors[rows] @ block.T
            squared *= -2
            squared += lengths[rows]
            squared += block_lengths
            nearest.consider(rows, block_ids, squared)
    return nearest.neighbours()


class Nearest:
    """The k samples nearest to each row of a query so far. Of what comes next, only nearer samples are looked at."""

    def __init__(self, ids: Ids, k: int) -> None:
        """`ids` has the sample of each row, which is not its own neighbour."""
        self._own = ids
        # One more than k is kept, because a sample usually finds itself.
        self._k = k + 1
        self._ids = np.full((len(ids), k + 1), NOBODY, np.int64)
        self._squared = np.full((len(ids), k + 1), np.inf, np.float32)
        self._bounds = np.full(len(ids), np.inf, np.float32)
        self._new: list[tuple[Ids, Ids, Vectors]] = []
        self._new_count = 0

    def consider(self, rows: Ids, ids: Ids, squared: Vectors) -> None:
        """Compare some rows of the query with some samples; `squared` (rows, ids) has the squares of the distances."""
        count, width = squared.shape
        chosen = np.flatnonzero(squared < self._bounds[rows, None])
        # With so many, partitioning costs less than to look at them all later.
        if len(chosen) > 2 * count * self._k and width > self._k:
            nearest = np.argpartition(squared, self._k - 1, axis=1)[:, : self._k]
            chosen = (nearest + width * np.arange(count)[:, None]).ravel()
        which, columns = np.divmod(chosen, width)
        self._new.append((rows[which], ids[columns], squared.ravel()[chosen]))
        self._new_count += len(chosen)
        # Each time the bounds fall, and fewer of the next samples are chosen: this happens some log(n) times.
        if self._new_count > len(self._own) * self._k // 2:
            self._shorten()

    def bounds(self) -> Vectors:
        """The squares of the distances beyond which a sample is too far to count, one for each row."""
        self._shorten()
        # Rounding can bring the square of a very small distance below zero.
        return np.maximum(self._bounds, 0)

    def neighbours(self) -> Neighbours:
        self._shorten()
        # The sample itself goes to the end, or else the farthest.
        self._squared[self._ids == self._own[:, None]] = np.inf
        order = np.argsort(self._squared, axis=1, kind="stable")[:, : self._k - 1]
        ids, squared = np.take_along_axis(self._ids, order, 1), np.take_along_axis(self._squared, order, 1)
        ids[np.isinf(squared)] = NOBODY
        # Rounding can bring the square of a very small distance below zero.
        return Neighbours(ids, np.sqrt(np.maximum(squared, 0)))

    def _shorten(self) -> None:
        """Forget all but the nearest samples of each row."""
        if not self._new_count:
            return
        rows, ids, squared = (np.concatenate(parts) for parts in zip(*self._new, strict=True))
        self._new, self._new_count = [], 0
        # The new samples of a row go behind its old ones. Numbers of 16 bits are sorted in a tenth of the time.
        order = np.argsort(rows.astype(np.min_scalar_type(len(self._own))), kind="stable")
        rows = rows[order]
        counts = np.bincount(rows, minlength=len(self._own))
        columns = self._k + np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        shape = len(self._own), self._k + int(counts.max())
        all_ids, all_squared = np.full(shape, NOBODY, np.int64), np.full(shape, np.inf, np.float32)
        all_ids[:, : self._k], all_squared[:, : self._k] = self._ids, self._squared
        all_ids[rows, columns], all_squared[rows, columns] = ids[order], squared[order]
        kept = np.argpartition(all_squared, self._k - 1, axis=1)[:, : self._k]
        self._ids, self._squared = np.take_along_axis(all_ids, kept, 1), np.take_along_axis(all_squared, kept, 1)
        self._bounds = self._squared.max(axis=1)
