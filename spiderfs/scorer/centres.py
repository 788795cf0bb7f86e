"""The centres of cells, and which of them are nearest to a vector.

All centres are compared, by one matrix product, up to GRAPH_CENTRES cells, which is some five million samples. Among
more, a graph of the centres finds them in less time. Centres suit a graph well. They move little, so few of them have
to be linked again, and a centre that the graph overlooks costs a few neighbours, not a sample.
"""

from __future__ import annotations

import numpy as np

from spiderfs.scorer.graph import GraphIndex
from spiderfs.scorer.index import NOBODY, Ids, Vectors

GRAPH_CENTRES = 8192
# A centre is linked anew when it has moved by this share of the mean distance of its samples from it.
_LINKED_ANEW = 0.1
# The graph is asked for this many more cells than are wanted.
_SPARE = 8


class Centres:
    """The centres of up to `capacity` cells; each of `graph_centres` cells or fewer is compared with every vector."""

    def __init__(self, capacity: int, dimension: int, graph_centres: int = GRAPH_CENTRES) -> None:
        self._vectors = np.zeros((capacity, dimension), np.float32)
        # The square of each centre's length; infinity where there is no cell, so that it is never the nearest.
        self._squares = np.full(capacity, np.inf, np.float32)
        self._used = 0
        self._graph_centres = graph_centres
        self._graph: GraphIndex | None = None
        self._linked = np.zeros((0, dimension), np.float32)

    @property
    def bytes_per_cell(self) -> float:
        linked = 0.0 if self._graph is None else self._graph.bytes_per_sample + self._linked[0].nbytes
        return float(self._vectors[0].nbytes + self._squares.itemsize + linked)

    def put(self, cells: Ids, centres: Vectors) -> None:
        """Set the centres of these cells; `cells` names each once."""
        self._vectors[cells] = centres
        self._squares[cells] = np.einsum("ij,ij->i", centres, centres)
        self._used = max(self._used, int(cells.max(initial=-1)) + 1)
        if self._graph is not None:
            moved = self._vectors[cells] - self._linked[cells]
            far = np.einsum("ij,ij->i", moved, moved) > _LINKED_ANEW**2 * self.spread(cells)
            self._link(cells[far])
        elif self._used > self._graph_centres:
            self._graph = GraphIndex(*self._vectors.shape)
            self._linked = np.zeros_like(self._vectors)
            self._link(np.flatnonzero(np.isfinite(self._squares)))

    def remove(self, cell: int) -> None:
        self._squares[cell] = np.inf

    def spread(self, cells: Ids) -> Vectors:
        """The mean of the squares of the distances from each cell's centre to its samples, whose lengths are 1."""
        return np.maximum(1 - self._squares[cells], 0)

    def distances(self, vectors: Vectors, cells: Ids) -> Vectors:
        """The square of the distance from each vector to each of its `cells` (rows, cells); infinity for none."""
        lengths = np.einsum("ij,ij->i", vectors, vectors)[:, None]
        products = np.einsum("ij,ikj->ik", vectors, self._vectors[cells], optimize=True)
        squared: Vectors = lengths - 2 * products + self._squares[cells]
        squared[cells == NOBODY] = np.inf
        return squared

    def nearest(self, vectors: Vectors, count: int) -> tuple[Ids, Vectors]:
        """(rows, count) the nearest cells, nearest first, and the squares of the distances to their centres."""
        if self._graph is None:
            return _ordered(*self._compared(vectors, count), count)
        # The graph still knows cells that are no more; the number of such a cell is the next to be used again.
        cells = self._graph.nearest(np.full(len(vectors), NOBODY), vectors, count + _SPARE).ids
        cells, squared = _ordered(cells, self.distances(vectors, cells), count)
        missed = np.flatnonzero(np.isinf(squared[:, 0]))
        if len(missed):
            cells[missed], squared[missed] = _ordered(*self._compared(vectors[missed], count), count)
        return cells, squared

    def _compared(self, vectors: Vectors, count: int) -> tuple[Ids, Vectors]:
        """The `count` nearest cells by comparison with all of them, in any order."""
        squared = vectors @ self._vectors[: self._used].T
        squared *= -2
        squared += self._squares[: self._used]
        squared += np.einsum("ij,ij->i", vectors, vectors)[:, None]
        count = min(count, self._used)
        # Updates ask for one.
        some = np.argmin(squared, axis=1)[:, None] if count == 1 else np.argpartition(squared, count - 1, axis=1)
        cells = some[:, :count]
        return cells, np.take_along_axis(squared, cells, 1)

    def _link(self, cells: Ids) -> None:
        assert self._graph is not None
        if len(cells):
            self._graph.update(cells, self._vectors[cells])
            self._linked[cells] = self._vectors[cells]


def _ordered(cells: Ids, squared: Vectors, count: int) -> tuple[Ids, Vectors]:
    order = np.argsort(squared, axis=1)[:, :count]
    return np.take_along_axis(cells, order, 1), np.take_along_axis(squared, order, 1)
