"""An index that keeps near samples together in cells, and compares a query with those near it: for long lists.

A cell holds up to CELL_ROWS samples, and its centre is their mean. An update moves a sample to the cell whose centre is
nearest. A full cell is cut in half, and a cell that has lost most of its samples is dissolved. A query compares each
vector first with the samples of the nearest cells, and then with those of other cells whose samples may be nearer than
the k-th nearest so far. Rows that look at the same cell share one matrix product. Cells know no labels, on purpose: a
sample that lies among another class would be far from the cells of its own, and x_other poor.

Invariants, whenever no method runs: a present sample has one place, and `_ids` at that place names the sample; the rows
of a cell fill its pages from the front, so only its last page has empty rows; `_sums` of a cell is the sum of its rows,
and its centre is their mean.

A vector is stored in whole numbers of 1/32767, an error of at most 0.000015 in each of its numbers, with half the
square of its length behind them, so that one matrix product yields distances. (numpy needs far longer to convert half
precision.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spiderfs.scorer.graph import GraphIndex, is_installed
from spiderfs.scorer.index import NO_ID, Ids, Near, Nearest, NearestSamples, Vectors, save_arrays, saved_arrays

GRAPH_CENTRES = 8192
# A centre is linked again when it has moved by this share of the mean distance of its samples from it.
_LINKED_AGAIN = 0.1
# The graph is asked for this many more cells than are wanted.
_SPARE = 8


class Centres:
    """The centres of cells, and which of them are nearest to a vector.

    All centres are compared, by one matrix product, up to GRAPH_CENTRES cells, which is some five million samples.
    Among more, a graph of the centres finds them in less time, where hnswlib is installed. Centres suit a graph well.
    They move little, so few of them have to be linked again, and a centre that the graph overlooks costs a few
    neighbours, not a sample.

    There are up to `capacity` cells; each of `graph_centres` cells or fewer is compared with every vector.
    """

    def __init__(self, capacity: int, dimension: int, graph_centres: int = GRAPH_CENTRES) -> None:
        self._vectors = np.zeros((capacity, dimension), np.float32)
        # The square of each centre's length; infinity where there is no cell, so that it is never the nearest.
        self._squares = np.full(capacity, np.inf, np.float32)
        self._used = 0
        self._graph_centres = graph_centres if is_installed() else capacity
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
            far = np.einsum("ij,ij->i", moved, moved) > _LINKED_AGAIN**2 * self.spread(cells)
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
        squared[cells == NO_ID] = np.inf
        return squared

    def nearest(self, vectors: Vectors, count: int) -> tuple[Ids, Vectors]:
        """(rows, count) the nearest cells, nearest first, and the squares of the distances to their centres."""
        if self._graph is None:
            return _ordered(*self._compared(vectors, count), count)
        # The graph still knows cells that are no more; the number of such a cell is the next to be used again.
        cells = self._graph.nearest(np.full(len(vectors), NO_ID), vectors, count + _SPARE).ids
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


# With 512 rows in a cell the recall is the same as with half as many cells of 1,024, and there are more products.
CELL_ROWS = 1024
# The memory of a cell grows by pages, so that half a page is wasted on average, 64 rows of some 700.
PAGE_ROWS = 128
PAGES = CELL_ROWS // PAGE_ROWS
# A cell with fewer rows is dissolved. So there are at most CELL_ROWS / LEAST_ROWS times as many cells as are needed,
# and some more while samples move.
LEAST_ROWS = CELL_ROWS // 4
SPARE_CELLS = 64
# The cells that a row looks at first, and in all. Clusters of classes need 4; a million samples in 50
# clusters that are round in all 64 dimensions need 32 (16 find 80 % of the neighbours).
PROBED_FIRST, PROBED = 2, 32
# Rows that are updated between two looks at the centres: new cells must be seen before many more samples come.
UPDATED_AT_ONCE = 256
# Rows that are queried at once. The more rows look at a cell, the less each costs; their neighbours so far take some
# tens of MiB.
QUERIED_AT_ONCE = 4096
# A row looks at a cell if the square of the distance to its centre is below this share of the square of (distance of
# the cell's samples from the centre + distance of the k-th nearest so far). Among 100,000 samples of 64 dimensions 0.7
# misses 0.1 % of the neighbours at most, and of 30 cells it spares 14 to 26, if classes are clusters.
WORTH_A_LOOK = 0.7
SCALE = 32767
# A sample stays where it is if another centre is nearer by no more than this, a rounding error. Otherwise equal samples
# would all move to one cell.
_STAYS = 1e-5

_Numbers = NDArray[np.int16]


class CellIndex:
    """An approximate index of up to `capacity` samples; see `Index` for its methods."""

    def __init__(self, capacity: int, dimension: int) -> None:
        # Only a long list needs the library.
        from threadpoolctl import ThreadpoolController

        self.failures = 0
        # A product of some rows with a cell is so small that several threads of BLAS wait for each other, and on cores
        # that have other work they wait many times as long as they compute.
        self._blas = ThreadpoolController()
        self._capacity = capacity
        self._dimension = dimension
        self._empty()

    def _empty(self) -> None:
        capacity, dimension = self._capacity, self._dimension
        cells = -(-capacity // LEAST_ROWS) + SPARE_CELLS
        pages = -(-capacity // PAGE_ROWS) + cells
        # The kernel gives memory only to pages that were written, so an index costs what it holds.
        self._rows = np.zeros((pages, PAGE_ROWS, dimension + 1), np.int16)
        self._ids = np.zeros(pages * PAGE_ROWS, np.int32)
        self._place_of = np.full(capacity, NO_ID, np.int32)
        self._count = 0
        self._cell_of_page = np.zeros(pages, np.int32)
        self._free_pages = _Free(pages)
        self._pages = np.zeros((cells, PAGES), np.int32)
        self._sizes = np.zeros(cells, np.int64)
        self._sums = np.zeros((cells, dimension), np.float64)
        self._centres = Centres(cells, dimension)
        self._free_cells = _Free(cells)

    def __len__(self) -> int:
        return self._count

    # -- updates

    def update(self, ids: Ids, vectors: Vectors) -> None:
        with self._blas.limit(limits=1, user_api="blas"):
            for start in range(0, len(ids), UPDATED_AT_ONCE):
                rows = slice(start, start + UPDATED_AT_ONCE)
                self._update(ids[rows], vectors[rows])

    def _update(self, ids: Ids, vectors: Vectors) -> None:
        numbers = _stored(vectors)
        if not self._count:
            self._fill(self._free_cells.take(), ids[:1], numbers[:1])
        cells, squared = self._centres.nearest(vectors, 1)
        present = np.flatnonzero(self._place_of[ids] >= 0)
        places = self._place_of[ids[present]]
        own = self._cell_of_page[places // PAGE_ROWS].astype(np.int64)
        stays = self._centres.distances(vectors[present], own[:, None])[:, 0] <= squared[present, 0] + _STAYS
        touched = self._replace(places[stays], numbers[present[stays]])
        for sample in ids[present[~stays]].tolist():
            touched.add(self._remove(int(self._place_of[sample])))
        comes = np.ones(len(ids), bool)
        comes[present[stays]] = False
        touched |= self._add(ids[comes], numbers[comes], cells[comes, 0])
        self._refresh(touched)
        for cell in sorted(touched):
            if self._sizes[cell] < LEAST_ROWS and self._count > self._sizes[cell]:
                self._dissolve(cell)

    def _replace(self, places: NDArray[np.int32], numbers: _Numbers) -> set[int]:
        """Write new rows over samples that stay in their cells; returns these cells."""
        cells = self._cell_of_page[places // PAGE_ROWS]
        rows = self._rows.reshape(-1, self._dimension + 1)
        np.add.at(self._sums, cells, numbers[:, :-1] - rows[places, :-1].astype(np.float64))
        rows[places] = numbers
        return set(cells.tolist())

    def _add(self, ids: Ids, numbers: _Numbers, cells: Ids) -> set[int]:
        """Put samples that have no place into these cells; returns all cells that have changed."""
        touched = set(cells.tolist())
        for sample, row, cell in zip(ids.tolist(), numbers, cells.tolist(), strict=True):
            if self._sizes[cell] == CELL_ROWS:
                touched.add(self._cut(cell))
            self._append(cell, sample, row)
        return touched

    def _append(self, cell: int, sample: int, numbers: _Numbers) -> None:
        size = int(self._sizes[cell])
        page, row = divmod(size, PAGE_ROWS)
        if row == 0:
            self._pages[cell, page] = self._free_pages.take()
            self._cell_of_page[self._pages[cell, page]] = cell
        which = int(self._pages[cell, page])
        place = which * PAGE_ROWS + row
        self._rows[which, row] = numbers
        self._ids[place] = sample
        self._place_of[sample] = place
        self._sums[cell] += numbers[:-1]
        self._sizes[cell] = size + 1
        self._count += 1

    def _remove(self, place: int) -> int:
        """Take the sample at `place` out of its cell, whose last sample takes the place; returns the cell."""
        page, row = divmod(place, PAGE_ROWS)
        cell = int(self._cell_of_page[page])
        last = int(self._sizes[cell]) - 1
        which, last_row = int(self._pages[cell, last // PAGE_ROWS]), last % PAGE_ROWS
        self._sums[cell] -= self._rows[page, row, :-1]
        self._place_of[self._ids[place]] = NO_ID
        if (which, last_row) != (page, row):
            moved = int(self._ids[which * PAGE_ROWS + last_row])
            self._rows[page, row] = self._rows[which, last_row]
            self._ids[place] = moved
            self._place_of[moved] = place
        self._sizes[cell] = last
        self._count -= 1
        if last_row == 0:
            self._free_pages.give(which)
        return cell

    def _cut(self, cell: int) -> int:
        """Cut a full cell in half, across the direction in which its rows differ most; returns the new cell."""
        ids, numbers = self._emptied(cell)
        rows = numbers[:, :-1].astype(np.float32)
        rows -= rows.mean(axis=0)
        direction = rows[np.einsum("ij,ij->i", rows, rows).argmax()]
        # Three steps of the power method come near enough to the first principal component.
        for _ in range(3):
            direction = (rows @ direction) @ rows
            direction /= np.linalg.norm(direction) + 1
        order = np.argsort(rows @ direction, kind="stable")
        new = self._free_cells.take()
        for half, which in ((order[: len(order) // 2], cell), (order[len(order) // 2 :], new)):
            self._fill(which, ids[half], numbers[half])
        return new

    def _dissolve(self, cell: int) -> None:
        """Give the samples of a cell to the cells that are nearest to them then."""
        ids, numbers = self._emptied(cell)
        self._free_cells.give(cell)
        cells, _ = self._centres.nearest(_vectors(numbers), 1)
        self._refresh(self._add(ids, numbers, cells[:, 0]))

    def _emptied(self, cell: int) -> tuple[Ids, _Numbers]:
        """The samples of a cell, and their rows; the cell has none then."""
        size = int(self._sizes[cell])
        ids, numbers = self._samples_of(cell), self._numbers_of(cell)[:size]
        for page in self._pages[cell, : -(-size // PAGE_ROWS)].tolist():
            self._free_pages.give(page)
        self._place_of[ids] = NO_ID
        self._count -= size
        self._sizes[cell] = 0
        self._sums[cell] = 0
        self._centres.remove(cell)
        return ids, numbers

    def _fill(self, cell: int, ids: Ids, numbers: _Numbers) -> None:
        """Put rows into an empty cell."""
        for page, start in enumerate(range(0, len(ids), PAGE_ROWS)):
            which = self._free_pages.take()
            some = slice(start, start + PAGE_ROWS)
            places = which * PAGE_ROWS + np.arange(len(ids[some]))
            self._pages[cell, page] = which
            self._cell_of_page[which] = cell
            self._rows[which, : len(places)] = numbers[some]
            self._ids[places] = ids[some]
            self._place_of[ids[some]] = places
        self._sizes[cell] = len(ids)
        self._sums[cell] = numbers[:, :-1].sum(axis=0, dtype=np.float64)
        self._count += len(ids)
        self._refresh({cell})

    def _refresh(self, touched: set[int]) -> None:
        """Compute the centres of these cells from their sums."""
        cells = np.fromiter(touched, np.int64, len(touched))
        cells = cells[self._sizes[cells] > 0]
        self._centres.put(cells, (self._sums[cells] / (SCALE * self._sizes[cells, None])).astype(np.float32))

    def _samples_of(self, cell: int) -> Ids:
        pages = self._pages[cell, : -(-int(self._sizes[cell]) // PAGE_ROWS)]
        ids: Ids = self._ids.reshape(-1, PAGE_ROWS)[pages].ravel()[: self._sizes[cell]].astype(np.int64)
        return ids

    def _numbers_of(self, cell: int) -> _Numbers:
        """The rows of a cell's pages, those behind its last sample included; a copy."""
        pages = self._pages[cell, : -(-int(self._sizes[cell]) // PAGE_ROWS)]
        return self._rows[pages].reshape(-1, self._dimension + 1)

    # -- queries

    def nearest(self, ids: Ids, vectors: Vectors, k: int) -> NearestSamples:
        found = [nearest.neighbours() for _, nearest in self._search(ids, vectors, k)]
        return NearestSamples(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def within(self, ids: Ids, vectors: Vectors, radius: float, most: int) -> Near:
        found = [(start, nearest.within()) for start, nearest in self._search(ids, vectors, most, radius)]
        return Near(
            np.concatenate([near.rows + start for start, near in found]),
            np.concatenate([near.ids for _, near in found]),
            np.concatenate([near.distances for _, near in found]),
        )

    def _search(self, ids: Ids, vectors: Vectors, k: int, radius: float = np.inf) -> Iterator[tuple[int, Nearest]]:
        """Some rows of a query at a time: the first of them, and what is near to them."""
        if not self._count or not len(ids):
            yield 0, Nearest(ids, k, radius)
            return
        with self._blas.limit(limits=1, user_api="blas"):
            for start in range(0, len(ids), QUERIED_AT_ONCE):
                rows = slice(start, start + QUERIED_AT_ONCE)
                yield start, self._nearest(ids[rows], vectors[rows], k, radius)

    def _nearest(self, ids: Ids, vectors: Vectors, k: int, radius: float) -> Nearest:
        probed, squared = self._centres.nearest(vectors, PROBED)
        nearest = Nearest(ids, k, radius)
        wanted = np.isfinite(squared)
        wanted[:, PROBED_FIRST:] = False
        self._compare(vectors, probed, wanted, nearest)
        reach = np.sqrt(self._centres.spread(probed)) + np.sqrt(nearest.bounds()[:, None])
        wanted = ~wanted & (squared < WORTH_A_LOOK * reach * reach)
        self._compare(vectors, probed, wanted, nearest)
        return nearest

    def _compare(self, vectors: Vectors, probed: Ids, wanted: NDArray[np.bool_], nearest: Nearest) -> None:
        """Compare each vector with all samples of those of its cells in `probed` that are `wanted`."""
        # The product with a sample's numbers, and with half the square of its length, is the distance's square, less
        # the square of the vector's length.
        widened = np.concatenate([vectors, np.full((len(vectors), 1), -1, np.float32)], axis=1) * np.float32(-2 / SCALE)
        lengths = np.einsum("ij,ij->i", vectors, vectors)[:, None]
        rows, cells = np.nonzero(wanted)[0], probed[wanted]
        order = np.argsort(cells, kind="stable")
        rows, cells = rows[order], cells[order]
        starts = np.flatnonzero(np.diff(cells, prepend=NO_ID))
        for start, end in itertools.pairwise([*starts.tolist(), len(cells)]):
            cell, some = int(cells[start]), rows[start:end]
            squared = widened[some] @ self._numbers_of(cell)[: self._sizes[cell]].astype(np.float32).T
            squared += lengths[some]
            nearest.consider(some, self._samples_of(cell), squared)

    # -- contents

    def present(self) -> Ids:
        return np.flatnonzero(self._place_of >= 0)

    def vectors(self, ids: Ids) -> Vectors:
        places = self._place_of[ids]
        return _vectors(self._rows.reshape(-1, self._dimension + 1)[places])

    @property
    def bytes_per_sample(self) -> float:
        pages = self._free_pages.used * PAGE_ROWS * (self._rows.itemsize * (self._dimension + 1) + self._ids.itemsize)
        cells = self._free_cells.used * (self._sums[0].nbytes + self._pages[0].nbytes + self._centres.bytes_per_cell)
        return float((pages + cells) / max(1, self._count) + self._place_of.itemsize)

    def save(self, path: Path) -> None:
        cells = np.flatnonzero(self._sizes).tolist()
        ids = [self._samples_of(cell) for cell in cells]
        numbers = [self._numbers_of(cell)[: self._sizes[cell]] for cell in cells]
        ids.insert(0, np.zeros(0, np.int64))
        numbers.insert(0, np.zeros((0, self._dimension + 1), np.int16))
        arrays = {"sizes": self._sizes[cells], "ids": np.concatenate(ids), "numbers": np.concatenate(numbers)}
        save_arrays(path, arrays)

    def restore(self, path: Path) -> None:
        saved = saved_arrays(path)
        if saved.keys() != {"sizes", "ids", "numbers"}:
            raise ValueError(f"{path} does not hold cells")
        sizes, ids, numbers = saved["sizes"], saved["ids"], saved["numbers"]
        if (
            numbers.shape != (len(ids), self._dimension + 1)
            or sizes.sum() != len(ids)
            or (len(sizes) and not 0 < sizes.min() <= sizes.max() <= CELL_ROWS)
            or len(sizes) > len(self._sizes)
            or len(np.unique(ids)) != len(ids)
            or (len(ids) and not 0 <= ids.min() <= ids.max() < self._capacity)
        ):
            raise ValueError(f"{path} holds vectors of another list, or of another dimension")
        self._empty()
        ends = np.cumsum(sizes)
        for start, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True):
            self._fill(self._free_cells.take(), ids[start:end], numbers[start:end])


class _Free:
    """Numbers below `limit` that are free; those that were given back are taken again first."""

    def __init__(self, limit: int) -> None:
        self.used = 0
        """All numbers that were ever taken lie below this one."""
        self._limit = limit
        self._given: list[int] = []

    def take(self) -> int:
        if self._given:
            return self._given.pop()
        assert self.used < self._limit
        self.used += 1
        return self.used - 1

    def give(self, number: int) -> None:
        self._given.append(number)


def _stored(vectors: Vectors) -> _Numbers:
    """Each vector in whole numbers of 1/SCALE, and half the square of its length behind it."""
    halves = np.einsum("ij,ij->i", vectors, vectors)[:, None] / 2
    numbers: _Numbers = np.rint(np.concatenate([vectors, halves], axis=1) * SCALE).astype(np.int16)
    return numbers


def _vectors(numbers: _Numbers) -> Vectors:
    vectors: Vectors = numbers[:, :-1].astype(np.float32) / np.float32(SCALE)
    return vectors
