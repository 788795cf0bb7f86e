"""What the scorer asks of an index of embeddings; `graph` answers approximately, `exact` exactly.

Samples are numbered from 0 to capacity - 1, vectors are float32 of length 1 (or 0), distances are Euclidean. Both
answer with the k nearest at most, so that counts mean the same whichever is used.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from zipfile import BadZipFile

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

    def nearest(self, ids: Ids, vectors: Vectors, k: int, within: float = np.inf) -> Neighbours:
        """The k nearest at most that lie closer than `within`; a sample is never its own neighbour."""

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


def saved_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """What `numpy.savez` wrote; raises ValueError or OSError where it is not that."""
    try:
        with np.load(path) as saved:
            return {name: saved[name] for name in saved.files}
    except (EOFError, BadZipFile, zlib.error) as exc:
        raise ValueError(f"{path} was cut short: {exc}") from exc


def blocks_of(index: Index) -> Iterator[tuple[Ids, Vectors]]:
    """All samples that have a vector, some thousand at a time."""
    present = index.present()
    for start in range(0, len(present), BLOCK):
        ids = present[start : start + BLOCK]
        yield ids, index.vectors(ids)


def exact_nearest(
    blocks: Iterable[tuple[Ids, Vectors]], ids: Ids, vectors: Vectors, k: int, within: float
) -> Neighbours:
    """Neighbours by one matrix product per block of candidates (numbers and vectors)."""
    found: list[tuple[Ids, Ids, Vectors]] = []
    lengths = np.einsum("ij,ij->i", vectors, vectors)[:, None]
    for block_ids, block in blocks:
        squared = vectors @ block.T
        squared *= -2
        squared += lengths
        squared += np.einsum("ij,ij->i", block, block)
        squared[ids[:, None] == block_ids] = np.inf
        rows, columns = _candidates(squared, k, within)
        found.append((rows, block_ids[columns], squared[rows, columns]))
    return _gathered(found, len(ids), k)


def _candidates(squared: Vectors, k: int, within: float) -> tuple[Ids, Ids]:
    """Rows and columns of all that may be among the k nearest of their row."""
    count, width = squared.shape
    if np.isfinite(within):
        rows, columns = np.nonzero(squared < within * within)
        # Sorting so many would cost more than partitioning the block.
        if len(rows) <= count * k:
            return rows, columns
    if width <= k:
        rows, columns = np.divmod(np.arange(count * width), width)
    else:
        columns = np.argpartition(squared, k - 1, axis=1)[:, :k].ravel()
        rows = np.repeat(np.arange(count), k)
    near = squared[rows, columns] < within * within
    return rows[near], columns[near]


def _gathered(found: list[tuple[Ids, Ids, Vectors]], count: int, k: int) -> Neighbours:
    ids = np.full((count, k), NOBODY, np.int64)
    distances = np.full((count, k), np.inf, np.float32)
    if found:
        rows, candidates, squared = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.lexsort((squared, rows))
        rows, candidates, squared = rows[order], candidates[order], squared[order]
        ranks = np.arange(len(rows)) - np.searchsorted(rows, rows)
        kept = ranks < k
        ids[rows[kept], ranks[kept]] = candidates[kept]
        # Rounding can bring the square of a very small distance below zero.
        distances[rows[kept], ranks[kept]] = np.sqrt(np.maximum(squared[kept], 0))
    return Neighbours(ids, distances)
