"""An index that is a navigable small-world graph (Malkov and Yashunin, 2018), and approximate.

`index=hnsw` keeps all samples in one, as SpiderCache does; by default one finds the cells of very long lists
(`cells.py`). Only this module imports hnswlib, which is compiled where it is installed, so nothing else needs it. The
library's space "l2" returns squared distances. A sample is usually, but not
always, its own first neighbour. A query that finds fewer than k neighbours raises RuntimeError; this can happen after
many updates.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spiderfs.scorer.index import NO_ID, Ids, Near, NearestSamples, Vectors

if TYPE_CHECKING:
    import hnswlib

# The number of links of a node, and of candidates that are looked at while a node is linked. An update costs as much as
# several inserts: among 10,000 samples of 64 dimensions a batch of 128 takes 55 ms with 100 candidates and 23 ms with
# 40 (one core). The recall over four epochs of updates is 1.00 and 0.97 to 0.99.
LINKS = 16
BUILD_CANDIDATES = 40
# Candidates that a query looks at for each neighbour that is wanted. Among 100,000 samples a factor of 1.5 finds
# 93 % in 63 ms per batch, 3 finds 97 % in 77 ms, and 5 finds little more in 98 ms.
SEARCH_FACTOR = 3
# hnswlib draws the level of each node at random; a fixed seed makes runs repeatable.
SEED = 1
# The data loaders need the other cores.
THREADS = 1


def is_installed() -> bool:
    """Whether hnswlib is there."""
    return importlib.util.find_spec("hnswlib") is not None


class GraphIndex:
    """An approximate index of up to `capacity` samples; see `Index` for its methods."""

    def __init__(self, capacity: int, dimension: int) -> None:
        self.failures = 0
        self._capacity = capacity
        self._dimension = dimension
        self._graph = self._empty_graph()
        self._graph.init_index(capacity, M=LINKS, ef_construction=BUILD_CANDIDATES, random_seed=SEED)

    def __len__(self) -> int:
        return int(self._graph.get_current_count())

    def update(self, ids: Ids, vectors: Vectors) -> None:
        self._graph.add_items(vectors, ids, num_threads=THREADS)

    def nearest(self, ids: Ids, vectors: Vectors, k: int) -> NearestSamples:
        # Ask for one neighbour more than wanted, because a sample usually finds itself.
        found, squared = self._query(vectors, k + 1)
        own = found == ids[:, None]
        # If a sample did not find itself, its farthest neighbour is removed instead. The stable sort moves those to be
        # removed to the end, and leaves the others nearest first.
        own[~own.any(axis=1), -1] = True
        order = np.argsort(own, axis=1, kind="stable")[:, :-1]
        found, squared = np.take_along_axis(found, order, 1), np.take_along_axis(squared, order, 1)
        return NearestSamples(_padded(found, k, NO_ID), _padded(np.sqrt(squared), k, np.inf))

    def within(self, ids: Ids, vectors: Vectors, radius: float, most: int) -> Near:
        found = self.nearest(ids, vectors, most)
        rows, places = np.nonzero(found.distances < radius)
        return Near(rows, found.ids[rows, places], found.distances[rows, places])

    def present(self) -> Ids:
        return np.array(self._graph.get_ids_list(), np.int64)

    def vectors(self, ids: Ids) -> Vectors:
        vectors: Vectors = self._graph.get_items(ids, return_type="numpy")
        return vectors

    @property
    def bytes_per_sample(self) -> float:
        return float(self._graph.index_file_size()) / max(1, len(self))

    def save(self, path: Path) -> None:
        with _named(path) as name:
            self._graph.save_index(name)

    def restore(self, path: Path) -> None:
        graph = self._empty_graph()
        try:
            with _named(path) as name:
                graph.load_index(name, max_elements=self._capacity)
        except RuntimeError as exc:
            raise ValueError(f"{path} is not a graph of this size: {exc}") from exc
        self._graph = graph

    def _empty_graph(self) -> hnswlib.Index:
        # Not at the top: spiderfs works without it.
        import hnswlib

        return hnswlib.Index(space="l2", dim=self._dimension)

    def _query(self, vectors: Vectors, k: int) -> tuple[Ids, Vectors]:
        """Up to k neighbours of each vector; k is halved until the graph can answer, and 0 if it never can."""
        k = min(k, len(self))
        while k > 0:
            self._graph.set_ef(k * SEARCH_FACTOR)
            try:
                found, squared = self._graph.knn_query(vectors, k=k, num_threads=THREADS)
            except RuntimeError:
                self.failures += 1
                k //= 2
            else:
                return found.astype(np.int64), squared
        return np.full((len(vectors), 1), NO_ID, np.int64), np.full((len(vectors), 1), np.inf, np.float32)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[str]:
    """A path that hnswlib can open: it takes UTF-8 only, while the file's directory may have any name."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _padded(rows: NDArray[Any], width: int, value: float) -> NDArray[Any]:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=value)
