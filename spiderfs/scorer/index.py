"""The interface of an index of embeddings, and an exact one; `cells.py` and `graph.py` have approximate ones.

A sample is named by its number, from 0 to capacity - 1. Vectors are float32 of length 1 (or 0), and distances are
Euclidean. All indexes return at most the k nearest samples, so a count of neighbours means the same with each.

**Files** in which scorings survive a remount are written whole or not at all, and read only if unchanged. hnswlib does
not check the file that it loads, and a changed byte can end the process (SIGSEGV). So each file has a file with its
checksum beside it. After a crash between the two writes the checksum does not match, and the file is lost.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]

NO_ID = -1
"""The number that stands where there is no neighbour."""

# The distances of 4,096 samples to 128 rows take 2 MiB. More would leave the processor's caches before they are used.
BLOCK, BLOCK_ROWS = 4096, 128


class NearestSamples(NamedTuple):
    """For each row of a query its k neighbours, nearest first; if there are fewer, the row ends in NO_ID."""

    ids: Ids
    """(rows, k) numbers of samples."""
    distances: Vectors
    """(rows, k) distances; infinity for NO_ID."""


class Near(NamedTuple):
    """The samples that lie nearer than a radius to the rows of a query: one entry for each pair, in any order."""

    rows: Ids
    ids: Ids
    distances: Vectors


class NeighbourIndex(Protocol):
    """An index of the vectors of up to `capacity` samples."""

    failures: int
    """How many queries failed and were repeated for fewer neighbours."""

    def __len__(self) -> int:
        """The number of samples that have a vector."""

    def update(self, ids: Ids, vectors: Vectors) -> None:
        """Set the vectors of these samples; `ids` names each sample once."""

    def nearest(self, ids: Ids, vectors: Vectors, k: int) -> NearestSamples:
        """The k samples nearest to each vector, or as many as there are; `ids[i]` is not among those of vector i."""

    def within(self, ids: Ids, vectors: Vectors, radius: float, most: int) -> Near:
        """The samples nearer than `radius` to each vector, of these the `most` nearest; `ids[i]` is not among them."""

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


def blocks_of(index: NeighbourIndex) -> Iterator[tuple[Ids, Vectors]]:
    """All samples that have a vector, with their vectors, BLOCK samples at a time."""
    present = index.present()
    for start in range(0, len(present), BLOCK):
        ids = present[start : start + BLOCK]
        yield ids, index.vectors(ids)


def exact_nearest(
    blocks: Iterable[tuple[Ids, Vectors]], ids: Ids, vectors: Vectors, k: int, radius: float = np.inf
) -> Nearest:
    """The neighbours of each vector among all samples in `blocks`, by one matrix product per block."""
    lengths = np.einsum("ij,ij->i", vectors, vectors)[:, None]
    nearest = Nearest(ids, k, radius)
    for block_ids, block in blocks:
        block_lengths = np.einsum("ij,ij->i", block, block)
        for start in range(0, len(ids), BLOCK_ROWS):
            rows = np.arange(start, min(start + BLOCK_ROWS, len(ids)))
            squared = vectors[rows] @ block.T
            squared *= -2
            squared += lengths[rows]
            squared += block_lengths
            nearest.consider(rows, block_ids, squared)
    return nearest


class Nearest:
    """The k samples nearest to each row of a query so far. Of what comes next, only nearer samples are looked at.

    Samples that are not nearer than `radius` are not looked at. Only rows with more than k that are get sorted.
    """

    def __init__(self, ids: Ids, k: int, radius: float = np.inf) -> None:
        """`ids` has the sample of each row, which is not its own neighbour."""
        self._own = ids
        # One more than k is kept, because a sample usually finds itself.
        self._k = k + 1
        self._limited = radius < np.inf
        self._bounds = np.full(len(ids), radius, np.float32) ** 2
        self._kept: list[tuple[Ids, Ids, Vectors]] = []
        self._count = self._count_sorted = 0

    def consider(self, rows: Ids, ids: Ids, squared: Vectors) -> None:
        """Compare some rows of the query with some samples; `squared` (rows, ids) has the squares of the distances."""
        count, width = squared.shape
        near = squared < self._bounds[rows, None]
        chosen = np.flatnonzero(near)
        # With this many, finding the k-th nearest costs less than to look at them all later.
        if len(chosen) > 2 * count * self._k and width > self._k:
            bounds = np.partition(squared, self._k - 1, axis=1)[:, self._k - 1]
            self._bounds[rows] = np.minimum(self._bounds[rows], bounds)
            np.less_equal(squared, self._bounds[rows, None], out=near)
            chosen = np.flatnonzero(near)
        which, columns = np.divmod(chosen, width)
        self._kept.append((rows[which], ids[columns], squared.ravel()[chosen]))
        self._count += len(chosen)
        # Each time the bounds fall, and fewer of the next samples are chosen: this happens some log(n) times.
        if self._count - self._count_sorted > 2 * len(self._own) * self._k:
            self._shorten()

    def bounds(self) -> Vectors:
        """The squares of the distances beyond which a sample is too far to count, one for each row."""
        if not self._limited:
            self._shorten()
        return np.maximum(self._bounds, 0)

    def within(self) -> Near:
        """What `NeighbourIndex.within` returns."""
        rows, ids, squared = self._entries()
        others = np.flatnonzero(ids != self._own[rows])
        rows, ids, squared = rows[others], ids[others], squared[others]
        counts = np.bincount(rows, minlength=len(self._own))
        full = counts >= self._k
        if full.any():
            few, many = (np.flatnonzero(which) for which in (~full[rows], full[rows]))
            many = many[_order(rows[many], squared[many], len(self._own))]
            many = many[_ranks(rows[many], len(self._own)) < self._k - 1]
            kept = np.concatenate([few, many])
            rows, ids, squared = rows[kept], ids[kept], squared[kept]
        return Near(rows, ids, np.sqrt(squared))

    def neighbours(self) -> NearestSamples:
        rows, ids, squared = self._shorten()
        # The sample itself leaves, or else the farthest.
        others = np.flatnonzero(ids != self._own[rows])
        rows, ids, squared = rows[others], ids[others], squared[others]
        ranks = _ranks(rows, len(self._own))
        near = np.flatnonzero(ranks < self._k - 1)
        shape = len(self._own), self._k - 1
        found = NearestSamples(np.full(shape, NO_ID, np.int64), np.full(shape, np.inf, np.float32))
        found.ids[rows[near], ranks[near]] = ids[near]
        found.distances[rows[near], ranks[near]] = np.sqrt(squared[near])
        return found

    def _entries(self) -> tuple[Ids, Ids, Vectors]:
        """Rows, samples and squares of all that is kept."""
        if not self._kept:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)
        rows, ids, squared = (np.concatenate(parts) for parts in zip(*self._kept, strict=True))
        # Rounding can bring the square of a very small distance below zero.
        return rows, ids, np.maximum(squared, 0, out=squared)

    def _shorten(self) -> tuple[Ids, Ids, Vectors]:
        """Forget all but the nearest samples of each row; returns rows, samples and squares, by row and distance."""
        rows, ids, squared = self._entries()
        if self._count > self._count_sorted:
            order = _order(rows, squared, len(self._own))
            rows = rows[order]
            ranks = _ranks(rows, len(self._own))
            kept = np.flatnonzero(ranks < self._k)
            order, rows = order[kept], rows[kept]
            ids, squared = ids[order], squared[order]
            last = np.flatnonzero(ranks[kept] == self._k - 1)
            self._bounds[rows[last]] = squared[last]
        self._kept, self._count, self._count_sorted = [(rows, ids, squared)], len(rows), len(rows)
        return rows, ids, squared


def _order(rows: Ids, squared: Vectors, count: int) -> Ids:
    """The order of these entries by their rows, which lie below `count`, and then by their squares, which are >= 0.

    Sorting numbers takes a small part of the time of sorting positions. So row, square and position become one number
    of 64 bits. The bits of a float that is not negative grow with it; of its 31 bits, those for which there is no room
    are left out, which are the least.
    """
    row_bits, place_bits = count.bit_length(), len(rows).bit_length()
    square_bits = min(31, 64 - row_bits - place_bits)
    assert square_bits > 16, "a query of this many rows has to be divided"
    numbers = rows.astype(np.uint64) << np.uint64(square_bits + place_bits)
    numbers |= (squared.view(np.uint32) >> np.uint32(31 - square_bits)).astype(np.uint64) << np.uint64(place_bits)
    numbers |= np.arange(len(rows), dtype=np.uint64)
    numbers.sort()
    numbers &= np.uint64((1 << place_bits) - 1)
    return numbers.view(np.int64)


def _ranks(rows: Ids, count: int) -> Ids:
    """The place of each entry among those of its row; `rows` is in order, and all lie below `count`."""
    counts = np.bincount(rows, minlength=count)
    ranks: Ids = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks


class ExactIndex:
    """An exact index of up to `capacity` samples; see `NeighbourIndex` for its methods."""

    def __init__(self, capacity: int, dimension: int) -> None:
        self.failures = 0
        # The kernel gives memory only to rows that were written, so an index costs what it holds. Rows are in the order
        # of their first updates, so a query need not look at samples without a vector.
        self._vectors = np.zeros((capacity, dimension), np.float32)
        self._ids = np.zeros(capacity, np.int64)
        self._row_of = np.full(capacity, -1, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def update(self, ids: Ids, vectors: Vectors) -> None:
        new = ids[self._row_of[ids] < 0]
        rows = np.arange(self._count, self._count + len(new))
        self._row_of[new] = rows
        self._ids[rows] = new
        self._count += len(new)
        self._vectors[self._row_of[ids]] = vectors

    def nearest(self, ids: Ids, vectors: Vectors, k: int) -> NearestSamples:
        return exact_nearest(self._blocks(), ids, vectors, k).neighbours()

    def within(self, ids: Ids, vectors: Vectors, radius: float, most: int) -> Near:
        return exact_nearest(self._blocks(), ids, vectors, most, radius).within()

    def present(self) -> Ids:
        return self._ids[: self._count]

    def vectors(self, ids: Ids) -> Vectors:
        return self._vectors[self._row_of[ids]]

    @property
    def bytes_per_sample(self) -> float:
        return float(self._vectors.itemsize * self._vectors.shape[1] + self._ids.itemsize + self._row_of.itemsize)

    def save(self, path: Path) -> None:
        # The trainer sent half precision; to round a scaled vector to it again moves it by 0.0005 at most.
        save_arrays(path, {"ids": self.present(), "vectors": self._vectors[: self._count].astype(np.float16)})

    def restore(self, path: Path) -> None:
        saved = saved_arrays(path)
        if saved.keys() != {"ids", "vectors"}:
            raise ValueError(f"{path} does not hold vectors")
        ids, vectors = saved["ids"], saved["vectors"].astype(np.float32)
        if vectors.shape != (len(ids), self._vectors.shape[1]) or (len(ids) and ids.max() >= len(self._ids)):
            raise ValueError(f"{path} holds vectors of another list, or of another dimension")
        self._row_of[:] = -1
        self._count = 0
        self.update(ids, vectors)

    def _blocks(self) -> Iterator[tuple[Ids, Vectors]]:
        for start in range(0, self._count, BLOCK):
            rows = slice(start, min(start + BLOCK, self._count))
            yield self._ids[rows], self._vectors[rows]


_SUFFIX = ".crc32"
_PIECE_BYTES = 1 << 20


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make a file, and rename it to `path` when it is complete; also writes its checksum."""
    unfinished, checksum = path.with_name(f".{path.name}"), path.with_name(path.name + _SUFFIX)
    write(unfinished)
    unfinished_checksum = checksum.with_name(f".{checksum.name}")
    unfinished_checksum.write_text(f"{_crc32(unfinished):08x}\n")
    os.replace(unfinished_checksum, checksum)
    os.replace(unfinished, path)


def check_whole(path: Path) -> None:
    """Raise ValueError or OSError unless the file is as `write_whole` wrote it."""
    if path.with_name(path.name + _SUFFIX).read_bytes() != f"{_crc32(path):08x}\n".encode():
        raise ValueError(f"{path} does not have the checksum with which it was written")


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write a file from which `saved_arrays` reads these arrays."""
    with path.open("wb") as file:
        np.savez(file, **arrays)


def saved_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays that `save_arrays` wrote; raises ValueError or OSError for any other file.

    The caller must have called `check_whole` for the file.
    """
    try:
        with np.load(path) as saved:
            return {name: saved[name] for name in saved.files}
    except (EOFError, BadZipFile, zlib.error) as exc:
        raise ValueError(f"{path} was cut short: {exc}") from exc


def _crc32(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            found = zlib.crc32(piece, found)
    return found
