"""What the scorer asks of an index of embeddings; `graph` answers approximately, `exact` exactly.

Samples are numbered from 0 to capacity - 1, vectors are float32 of length 1 (or 0), distances are Euclidean. Both
answer with the k nearest at most, so that counts mean the same whichever is used.
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

# 4,096 columns of similarities to a batch of 128 are 2 MiB: they stay in the second-level cache.
BLOCK = 4096


class Neighbours(NamedTuple):
    """For each row of a query its neighbours, nearest first; short rows end in NOBODY at distance infinity."""

    ids: Ids
    distances: Vectors


class Index(Protocol):
    failures: int
    """Queries that had to be asked again for fewer neighbours."""

    def __len__(self) -> int:
        """Number of samples that have a vector."""

    def update(self, ids: Ids, vectors: Vectors) -> None:
        """Give these samples (each named once) their vectors, or new ones."""

    def nearest(self, ids: Ids, vectors: Vectors, k: int) -> Neighbours:
        """The k nearest, or as many as there are; a sample is never its own neighbour."""

    def present(self) -> Ids:
        """The samples that have a vector."""

    def vectors(self, ids: Ids) -> Vectors:
        """The vectors of samples that have one."""

    @property
    def bytes_per_sample(self) -> float:
        """Memory for one sample that has a vector."""

    def save(self, path: Path) -> None:
        """Write everything to a new file."""

    def restore(self, path: Path) -> None:
        """Read what `save` wrote, in place of everything; raises ValueError or OSError where that is not possible."""


def normalised(embeddings: NDArray[np.floating]) -> Vectors:
    """Rows of length 1 in float32; a row of zeros stays one."""
    vectors = embeddings.astype(np.float32)
    # A large float16 would overflow when squared in its own type, a large float32 does so here: scale first.
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0.0)
    np.divide(vectors, largest, out=vectors, where=largest > 0)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    np.divide(vectors, lengths, out=vectors, where=lengths > 0)
    return vectors


def blocks_of(index: Index) -> Iterator[tuple[Ids, Vectors]]:
    """All samples that have a vector, some thousand at a time."""
    present = index.present()
    for start in range(0, len(present), BLOCK):
        ids = present[start : start + BLOCK]
        yield ids, index.vectors(ids)


def exact_nearest(blocks: Iterable[tuple[Ids, Vectors]], ids: Ids, vectors: Vectors, k: int) -> Neighbours:
    """Neighbours by one matrix product per block of candidates (numbers and vectors)."""
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
    """The k nearest of each row so far; the farther of them bound what of the next block is looked at."""

    def __init__(self, rows: int, k: int) -> None:
        self._k = k
        self._rows = np.zeros(0, np.int64)
        self._ids = np.zeros(0, np.int64)
        self._squared = np.zeros(0, np.float32)
        self._bounds = np.full((rows, 1), np.inf, np.float32)
        self._unsorted = 0

    def consider(self, ids: Ids, squared: Vectors) -> None:
        """Take in a block of samples with the squares of their distances to each row."""
        count, width = squared.shape
        chosen = np.flatnonzero(squared < self._bounds)
        # Partitioning costs as much as sorting so many.
        if len(chosen) > 2 * count * self._k:
            nearest = np.argpartition(squared, self._k - 1, axis=1)[:, : self._k]
            chosen = (nearest + width * np.arange(count)[:, None]).ravel()
        rows, columns = np.divmod(chosen, width)
        self._rows = np.concatenate([self._rows, rows])
        self._ids = np.concatenate([self._ids, ids[columns]])
        self._squared = np.concatenate([self._squared, squared.ravel()[chosen]])
        self._unsorted += len(chosen)
        # With each of them the bounds fall, and fewer are chosen of the next blocks: all in all some log(n) times.
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
        """Sort, forget all but the k nearest of each row, and return their ranks."""
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
