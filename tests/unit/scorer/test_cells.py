"""The index of cells against what it promises: one place a sample, cells within their limits, near samples found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from threadpoolctl import threadpool_info, threadpool_limits

from spiderfs.scorer import cells as module
from spiderfs.scorer.cells import CELL_ROWS, LEAST_ROWS, PAGE_ROWS, CellIndex, Centres
from spiderfs.scorer.index import NO_ID, Nearest, Vectors, blocks_of, exact_nearest, normalised

DIMENSION = 8


def check(index: CellIndex) -> None:
    """The invariants of the module's docstring."""
    present = index.present()
    assert len(index) == len(present) == index._sizes.sum()
    assert (index._ids[index._place_of[present]] == present).all()
    pages: list[int] = []
    for cell in np.flatnonzero(index._sizes).tolist():
        size = int(index._sizes[cell])
        assert size <= CELL_ROWS
        own = index._pages[cell, : -(-size // PAGE_ROWS)].tolist()
        assert (index._cell_of_page[own] == cell).all()
        pages += own
        samples, numbers = index._samples_of(cell), index._numbers_of(cell)[:size, :-1].astype(np.float64)
        assert (index._cell_of_page[index._place_of[samples] // PAGE_ROWS] == cell).all()
        assert index._sums[cell] == pytest.approx(numbers.sum(axis=0), abs=0.5)
        assert index._centres._vectors[cell] == pytest.approx(numbers.mean(axis=0) / module.SCALE, abs=1e-4)
    assert len(pages) == len(set(pages))
    assert not set(pages) & set(index._free_pages._given)
    assert not set(np.flatnonzero(index._sizes).tolist()) & set(index._free_cells._given)
    assert np.isinf(index._centres._squares[index._free_cells._given]).all()


def embeddings(rng: np.random.Generator, count: int, clusters: int, spread: float) -> Vectors:
    centres = rng.normal(size=(clusters, DIMENSION))
    return normalised(centres[rng.integers(0, clusters, count)] + spread * rng.normal(size=(count, DIMENSION)))


@given(
    seed=st.integers(0, 1000),
    clusters=st.sampled_from([1, 3, 40]),
    spread=st.sampled_from([0.0, 0.05, 1.0]),
    at_once=st.sampled_from([50, 700, 3000]),
)
@settings(max_examples=4, deadline=None, derandomize=True, database=None)
def test_cells_stay_within_their_limits_while_samples_move(
    seed: int, clusters: int, spread: float, at_once: int
) -> None:
    rng = np.random.default_rng(seed)
    count = 3000
    index = CellIndex(count, DIMENSION)
    for _ in range(3):
        vectors = embeddings(rng, count, clusters, spread)
        order = rng.permutation(count)
        for start in range(0, count, at_once):
            ids = order[start : start + at_once]
            index.update(ids, vectors[ids])
        assert index.vectors(order) == pytest.approx(vectors[order], abs=2e-5)
        sizes = index._sizes[index._sizes > 0]
        assert len(sizes) == 1 or sizes.min() >= LEAST_ROWS
    check(index)
    assert index.bytes_per_sample < 2.5 * (2 * DIMENSION + 10) + 10


def test_finds_nearly_all_neighbours_after_embeddings_have_moved() -> None:
    rng = np.random.default_rng(1)
    count = 20_000
    index = CellIndex(count, DIMENSION)
    vectors = embeddings(rng, count, 30, 0.3)
    for _ in range(2):
        vectors = normalised(vectors + 0.1 * rng.normal(size=vectors.shape))
        for ids in np.array_split(rng.permutation(count), 40):
            index.update(ids, vectors[ids])
    ids = rng.choice(count, 600, replace=False)
    found = index.nearest(ids, vectors[ids], 20)
    true = exact_nearest(blocks_of(index), ids, vectors[ids], 20).neighbours()
    pairs = np.arange(len(ids))[:, None] * count
    assert np.isin(true.ids + pairs, found.ids + pairs).mean() > 0.98
    assert not (found.ids == ids[:, None]).any()


def test_equal_embeddings_stay_where_they_are() -> None:
    index = CellIndex(4000, DIMENSION)
    vectors = normalised(np.ones((4000, DIMENSION), np.float32))
    index.update(np.arange(4000), vectors)
    before = index._place_of.copy()
    index.update(np.arange(4000), vectors)
    assert (index._place_of == before).all()
    answer = index.nearest(np.arange(5), vectors[:5], 10)
    assert answer.distances == pytest.approx(0, abs=0.01)
    assert (answer.ids != NO_ID).all()


def test_restores_its_cells_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    vectors = embeddings(rng, 3000, 5, 0.5)
    index = CellIndex(3500, DIMENSION)
    index.update(np.arange(3000), vectors)
    index.save(tmp_path / "index")
    again = CellIndex(3500, DIMENSION)
    again.update(np.array([3400]), vectors[:1])
    again.restore(tmp_path / "index")
    check(again)
    one, other = (each.nearest(np.arange(100), vectors[:100], 10) for each in (index, again))
    assert one.distances == pytest.approx(other.distances)
    with np.load(tmp_path / "index") as file:
        saved = dict(file)
    for wrong in (
        {"sizes": saved["sizes"][:-1]},
        {"sizes": np.array([3000])},
        {"ids": saved["ids"] * 0},
        {"ids": saved["ids"] + 1000},
        {"ids": -1 - saved["ids"]},
        {"numbers": saved["numbers"][:, 1:]},
    ):
        with (tmp_path / "wrong").open("wb") as file:
            np.savez(file, **(saved | wrong))
        with pytest.raises(ValueError, match="another list"):
            again.restore(tmp_path / "wrong")
    check(again)


def test_a_graph_of_many_centres_finds_those_that_comparing_finds() -> None:
    rng = np.random.default_rng(3)
    compared, graph = Centres(600, DIMENSION), Centres(600, DIMENSION, graph_centres=100)
    centres = 0.8 * embeddings(rng, 600, 20, 0.5)
    for each in (compared, graph):
        for cells in np.array_split(np.arange(500), 7):
            each.put(cells, centres[cells])
        each.put(np.arange(50), centres[550:])
        for cell in range(100, 140):
            each.remove(cell)
    vectors = normalised(np.concatenate([centres[100:140], embeddings(rng, 200, 20, 0.5)]))
    true, found = compared.nearest(vectors, 8), graph.nearest(vectors, 8)
    assert (np.diff(found[1], axis=1) >= 0).all()
    assert not np.isin(found[0], np.arange(100, 140)).any(), "removed cells are found by neither"
    pairs = np.arange(len(vectors))[:, None] * 600
    assert np.isin(true[0] + pairs, found[0] + pairs).mean() > 0.9
    assert (true[0][:, 0] == found[0][:, 0]).mean() > 0.95
    assert graph.bytes_per_cell > compared.bytes_per_cell


def test_queries_and_updates_let_blas_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    index = CellIndex(100, DIMENSION)
    seen = []
    for name in ("_update", "_nearest"):
        really = getattr(index, name)

        def noted(*arguments: Any, really: Any = really) -> Any:
            seen.append({library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"})
            return really(*arguments)

        monkeypatch.setattr(index, name, noted)
    vectors = normalised(np.random.default_rng(0).normal(size=(100, DIMENSION)))
    # Whatever the environment says (OMP_NUM_THREADS).
    with threadpool_limits(2, user_api="blas"):
        assert 2 in {library["num_threads"] for library in threadpool_info()}
        index.update(np.arange(100), vectors)
        index.nearest(np.arange(100), vectors, 5)
    assert seen == [{1}, {1}]


WITHOUT_HNSWLIB = """
import sys
sys.modules["hnswlib"] = None
import numpy as np
from spiderfs.errors import ConfigError
from spiderfs.options.model import Options
from spiderfs.scorer.cells import Centres
from spiderfs.scorer.scorer import Scorer
Scorer([0, 1], 8)
centres = Centres(10, 2, graph_centres=2)
centres.put(np.arange(4), np.eye(4, 2, dtype=np.float32))
assert centres.nearest(np.eye(2, dtype=np.float32), 1)[0].tolist() == [[0], [1]]
try:
    Options.load(["index=hnsw"], None, "/", "/mnt")
except ConfigError as exc:
    print(exc)
"""


def test_only_an_index_of_its_own_needs_hnswlib() -> None:
    program = WITHOUT_HNSWLIB
    said = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert said.stdout == (
        "index=hnsw: hnswlib is not installed: run `pip install '.[hnsw]'` in a checkout of spiderfs\n"
    )


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([2, 5, 100]))
@settings(max_examples=50, deadline=None)
def test_the_nearest_of_several_parts_are_those_of_all(seed: int, k: int, values: int) -> None:
    rng = np.random.default_rng(seed)
    rows, samples = 4, 60
    # With few values many distances are equal.
    squared = rng.integers(-1, values, (rows, samples)).astype(np.float32)
    nearest = Nearest(np.arange(rows), k)
    for part in np.array_split(rng.permutation(samples), rng.integers(1, 8)):
        some = np.arange(rows)
        nearest.consider(some, part, np.ascontiguousarray(squared[np.ix_(some, part)]))
    found = nearest.neighbours()
    for row in range(rows):
        others = np.delete(np.arange(samples), row)
        true = np.sort(np.sqrt(np.maximum(squared[row, others], 0)))[:k]
        assert found.distances[row] == pytest.approx(true)
        assert len(set(found.ids[row].tolist())) == k
        assert row not in found.ids[row]
        assert np.sqrt(np.maximum(squared[row, found.ids[row]], 0)) == pytest.approx(found.distances[row])
