"""An index that compares a query with every sample: it is exact, and for short lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from spiderfs.scorer.index import BLOCK, Ids, Near, Neighbours, Vectors, exact_nearest
from spiderfs.scorer.saved_files import saved_arrays


class ExactIndex:
    """An exact index of up to `capacity` samples; see `Index` for its methods."""

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

    def nearest(self, ids: Ids, vectors: Vectors, k: int) -> Neighbours:
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
        with path.open("wb") as file:
            np.savez(file, ids=self.present(), vectors=self._vectors[: self._count].astype(np.float16))

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
