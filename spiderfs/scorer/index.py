"""The interface of an index of embeddings; `graph.py` has an approximate index, and `exact.py` an exact one.

A sample is named by its number, from 0 to capacity - 1. Vectors are float32 of length 1 (or 0), and distances are
Euclidean. Both indexes return at most the k nearest samples, so a count of neighbours means the same with either.
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

# The similarities of 4,096 samples to a batch of 128 take 2 MiB, and stay in the second-level cache.
BLOCK = 4096


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
    best = _Best(len(ids), k)
    for block_ids, block in blocks:
        squared = vectors @ block.T
        squared *= -2
        squared += lengths
        squared += np.einsum("ij,ij->i", block, block)
        squared[ids[:, None] == block_ids] = np.inf
        best.consider(block_ids, squared)
    return best.neighbours()


class _Best:
    """The k nearest samples of each row so far. Of the next block, only samples nearer than the k-th are looked at."""

    def __init__(self, rows: int, k: int) -> None:
        self._k = k
        self._rows = np.zeros(0, np.int64)
        self._ids = np.zeros(0, np.int64)
        self._squared = np.zeros(0, np.float32)
        self._bounds = np.full((rows, 1), np.inf, np.float32)
        self._unsorted = 0

    def consider(self, ids: Ids, squared: Vectors) -> None:
        """Note a block of samples; `squared` has the squares of their distances, one row for each row of the query."""
        count, width = squared.shape
        chosen = np.flatnonzero(squared < self._bounds)
        # With so many, partitioning costs less than sorting.
        if len(chosen) > 2 * count * self._k:
            nearest = np.argpartition(squared, self._k - 1, axis=1)[:, : self._k]
            chosen = (nearest + width * np.arange(count)[:, None]).ravel()
        rows, columns = np.divmod(chosen, width)
        self._rows = np.concatenate([self._rows, rows])
        self._ids = np.concatenate([self._ids, ids[columns]])
        self._squared = np.concatenate([self._squared, squared.ravel()[chosen]])
        self._unsorted += len(chosen)
        # Each time the bounds fall, and fewer samples of the next blocks are chosen: this happens some log(n) times.
        if self._unsorted > count * self._k // 2:
            self._shorten()

    def neighbours(self) -> Neighbours:
        ranks = self._shorten()
        ids = np.full((len(self._bounds), self._k), NOBODY, np.int64)
        distances = np.full(ids.shape, np.inf, np.float32)
        ids[self._rows, ranks] = self._ids
        # Rounding can bring the square of a very small distance below zero.
        distances[self._rows, ranks] = np.sqrt(np.maximum(self._squared, 0))
        ids[np.isinf(distances)] = NOBODY
        return Neighbours(ids, distances)

    def _shorten(self) -> Ids:
        """Sort, forget all but the k nearest samples of each row, and return the rank of each in its row."""
        order = np.lexsort((self._squared, self._rows))
        rows = self._rows[order]
        ranks = np.arange(len(rows)) - np.searchsorted(rows, rows)
        kept = ranks < self._k
        self._rows, ranks = rows[kept], ranks[kept]
        self._ids, self._squared = self._ids[order][kept], self._squared[order][kept]
        full = ranks == self._k - 1
        self._bounds[self._rows[full], 0] = self._squared[full]
        self._unsorted = 0
        return ranks
