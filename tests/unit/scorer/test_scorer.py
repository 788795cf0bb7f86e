"""Scores by hand, both indexes against each other, and what a scorer keeps over a remount."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from spiderfs.scorer.cells import CellIndex
from spiderfs.scorer.graph import GraphIndex
from spiderfs.scorer.index import NO_ID, ExactIndex, NeighbourIndex, Vectors, normalised
from spiderfs.scorer.scorer import SETTLED_CHANGE, Radius, Scorer, importance
from spiderfs.scorer.scoring import FIRST_PRIOR, ScorerOptions

Kind = Literal["exact", "cells", "hnsw"]
INDEXES: dict[str, type[ExactIndex] | type[CellIndex] | type[GraphIndex]] = {
    "exact": ExactIndex,
    "cells": CellIndex,
    "hnsw": GraphIndex,
}
KINDS: tuple[Kind, ...] = ("exact", "cells", "hnsw")


def clusters(count: int, dimension: int = 16, classes: int = 5, seed: int = 0) -> tuple[NDArray[np.int64], Vectors]:
    """Labels and embeddings that lie around the centre of their class, some nearer to another one."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, dimension))
    labels = rng.integers(0, classes, count)
    lies_with = np.where(rng.random(count) < 0.1, rng.integers(0, classes, count), labels)
    return labels, (centres[lies_with] + 0.4 * rng.normal(size=(count, dimension))).astype(np.float32)


@pytest.fixture(params=INDEXES)
def empty_index(request: pytest.FixtureRequest) -> NeighbourIndex:
    return INDEXES[request.param](500, 16)


class TestIndexes:
    def test_an_empty_index_has_no_neighbours(self, empty_index: NeighbourIndex) -> None:
        answer = empty_index.nearest(np.array([3]), np.ones((1, 16), np.float32), 4)
        assert answer.ids.tolist() == [[NO_ID] * 4]
        assert np.isinf(answer.distances).all()
        assert (len(empty_index), len(empty_index.present())) == (0, 0)

    def test_nearest_first_and_never_itself(self, empty_index: NeighbourIndex) -> None:
        vectors = normalised(clusters(300)[1])
        ids = np.arange(100, 400)
        empty_index.update(ids, vectors)
        answer = empty_index.nearest(ids, vectors, 20)
        assert (np.diff(answer.distances, axis=1) >= 0).all()
        assert not (answer.ids == ids[:, None]).any()
        # Distances, not their squares.
        true = np.linalg.norm(vectors[answer.ids - 100] - vectors[:, None], axis=2)
        assert answer.distances == pytest.approx(true, abs=1e-3)
        assert sorted(empty_index.present()) == ids.tolist()
        assert empty_index.vectors(np.array([150, 399])) == pytest.approx(vectors[[50, 299]], abs=2e-5)

    def test_fewer_samples_than_neighbours_wanted(self, empty_index: NeighbourIndex) -> None:
        vectors = normalised(np.eye(16, dtype=np.float32)[:3] + np.float32(0.01))
        empty_index.update(np.arange(3), vectors)
        everybody = empty_index.nearest(np.arange(3), vectors, 10)
        assert (everybody.ids[:, 2:] == NO_ID).all()
        assert (everybody.ids[:, :2] != NO_ID).all()

    def test_an_update_moves_a_sample(self, empty_index: NeighbourIndex) -> None:
        vectors = normalised(clusters(200)[1])
        empty_index.update(np.arange(200), vectors)
        for _ in range(3):
            empty_index.update(np.array([7]), -vectors[[7]])
            empty_index.update(np.array([7, 8]), vectors[[9, 8]])
        assert len(empty_index) == 200
        answer = empty_index.nearest(np.array([9]), vectors[[9]], 5)
        assert answer.ids[0, 0] == 7
        assert answer.distances[0, 0] == pytest.approx(0, abs=1e-3)

    def test_survives_saving(self, empty_index: NeighbourIndex, tmp_path: Path) -> None:
        vectors = normalised(clusters(200)[1])
        empty_index.update(np.arange(200), vectors)
        before = empty_index.nearest(np.arange(50), vectors[:50], 10)
        empty_index.save(tmp_path / "index")
        empty_index.update(np.array([499]), vectors[[0]])
        empty_index.restore(tmp_path / "index")
        after = empty_index.nearest(np.arange(50), vectors[:50], 10)
        assert len(empty_index) == 200
        # Half precision on disk may swap two that are equally near.
        assert (before.ids == after.ids).mean() > 0.9
        empty_index.update(np.array([499]), vectors[[0]])
        assert len(empty_index) == 201


def test_a_graph_that_cannot_answer_is_asked_for_fewer() -> None:
    class Failing:
        def __init__(self, real: Any, largest: int) -> None:
            self.real, self.largest = real, largest

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def knn_query(self, vectors: Vectors, k: int, num_threads: int) -> Any:
            if k > self.largest:
                raise RuntimeError("Cannot return the results in a contiguous 2D array. Probably ef or M is too small")
            return self.real.knn_query(vectors, k=k, num_threads=num_threads)

    graph = GraphIndex(100, 16)
    vectors = normalised(clusters(100)[1])
    graph.update(np.arange(100), vectors)
    for largest, failures, neighbours in ((10, 3, 7), (0, 10, 0)):
        graph._graph = Failing(graph._graph, largest)
        answer = graph.nearest(np.arange(4), vectors[:4], 70)
        assert graph.failures == failures
        assert ((answer.ids >= 0).sum(axis=1) == neighbours).all()
        assert answer.ids.shape == (4, 70)


@given(
    count=st.integers(1, 300),
    k=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_exact_neighbours_against_sorting_all_distances(count: int, k: int, seed: int) -> None:
    vectors = normalised(clusters(count, seed=seed)[1])
    ids = np.random.default_rng(seed).permutation(count)
    index = ExactIndex(count, 16)
    index.update(ids, vectors[ids])
    query = ids[: min(20, count)]
    answer = index.nearest(query, vectors[query], k)
    for row, sample in enumerate(query.tolist()):
        distances = np.linalg.norm(vectors.astype(np.float64) - vectors[sample], axis=1)
        true = np.sort(np.delete(distances, sample))[:k]
        assert answer.distances[row, : len(true)] == pytest.approx(true, abs=1e-3)
        assert (answer.ids[row, len(true) :] == NO_ID).all()


@given(st.lists(st.floats(-6e4, 6e4, width=16), min_size=4, max_size=4))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_normalised_vectors_have_length_one_or_are_nothing(numbers: list[float]) -> None:
    vectors = normalised(np.array([numbers], np.float16))
    length = 1 if np.array(numbers, np.float16).any() else 0
    assert np.linalg.norm(vectors) == pytest.approx(length, abs=1e-5)


def test_equation_4_by_hand() -> None:
    scores = importance([0, 1, 4, 0, 500], [0, 0, 250, 500, 0])
    assert scores == pytest.approx([log(3), log(2), log(1.75), log(4), log(1.002)], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_count_changes_no_count_that_lies_within_the_radius(kind: Kind) -> None:
    """Counts were multiplied by 500/k, so that one neighbour among 100 was worth five."""
    labels, embeddings = clusters(300)
    counted = [
        Scorer(labels, 16, ScorerOptions(neighbours=most, radius=0.3, index=kind)).batch(np.arange(300), embeddings)
        for most in (100, 200)
    ]
    few = counted[1].same + counted[1].other < 100
    assert few.mean() > 0.5
    assert (counted[0].scores[few] == counted[1].scores[few]).all()
    assert counted[0].scores[few] == pytest.approx(importance(counted[0].same, counted[0].other)[few])


@given(
    count=st.integers(2, 200),
    most=st.integers(1, 40),
    radius=st.floats(0.05, 1.5),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_counts_and_scores_from_first_principles(count: int, most: int, radius: float, kind: Kind, seed: int) -> None:
    """SpiderCache eq. 1 to 4: neighbours within the radius, of more than may count the nearest."""
    labels, embeddings = clusters(count, seed=seed)
    vectors = normalised(embeddings.astype(np.float16)).astype(np.float64)
    scorer = Scorer(labels, 16, ScorerOptions(neighbours=most, radius=radius, index=kind))
    found = scorer.batch(np.arange(count), embeddings.astype(np.float16))
    for sample in range(count):
        distances = np.linalg.norm(vectors - vectors[sample], axis=1)
        distances[sample] = np.inf
        nearest = np.argsort(distances)[:most]
        near = nearest[distances[nearest] < radius]
        ties = np.abs(np.sort(distances)[: most + 1] - radius).min() < 1e-3 or (
            len(near) == most and np.diff(np.sort(distances)[most - 1 : most + 1]).min(initial=1.0) < 1e-3
        )
        if ties or (kind == "hnsw" and count > most):
            continue
        same = int((labels[near] == labels[sample]).sum())
        assert (int(found.same[sample]), int(found.other[sample])) == (same, len(near) - same)
        assert found.scores[sample] == pytest.approx(log((1 / same if same else 2) + (len(near) - same) / 500 + 1))


def angle(degrees: float) -> list[float]:
    return [np.cos(np.radians(degrees)), np.sin(np.radians(degrees))]


@pytest.mark.parametrize("kind", KINDS)
class TestScorer:
    def test_counts_by_hand(self, kind: Kind) -> None:
        # On a circle, chords of up to 20 degrees count: 2 sin(10°) = 0.347.
        embeddings = np.array([angle(0), angle(10), angle(25), angle(12), angle(180)])
        scorer = Scorer([0, 0, 0, 1, 1], 2, ScorerOptions(neighbours=4, radius=0.3473, index=kind))
        scores = scorer.batch([0, 1, 2, 3, 4], embeddings.astype(np.float16))
        assert scores.ids.tolist() == [0, 1, 2, 3, 4]
        assert scores.same.tolist() == [1, 2, 1, 0, 0]
        assert scores.other.tolist() == [1, 1, 1, 3, 0]
        expected = [log(1 + 1 / 500 + 1), log(1 / 2 + 1 / 500 + 1), log(1 + 1 / 500 + 1), log(2 + 3 / 500 + 1), log(3)]
        assert scores.scores == pytest.approx(expected, rel=1e-6)
        assert scorer.scores == pytest.approx(expected, rel=1e-6)
        hub = next(scores.hubs())
        assert (hub.id, hub.neighbours.tolist()) == (1, [0, 2])
        assert hub.distances == pytest.approx([2 * np.sin(np.radians(5)), 2 * np.sin(np.radians(7.5))], abs=1e-3)
        assert [hub.id for hub in scores.hubs()] == [1, 0, 2]

    def test_every_substitute_has_the_label_of_its_hub(self, kind: Kind) -> None:
        labels, embeddings = clusters(400)
        scorer = Scorer(labels, 16, ScorerOptions(neighbours=30, index=kind))
        rng = np.random.default_rng(1)
        for _ in range(20):
            ids = rng.choice(400, 40)
            hub = next(scorer.batch(ids, embeddings[ids]).hubs(), None)
            if hub is not None:
                assert (labels[hub.neighbours] == labels[hub.id]).all()
                assert hub.id not in hub.neighbours
                assert (hub.distances < scorer.radius).all()
                assert len(set(hub.neighbours.tolist())) == len(hub.neighbours)

    def test_calibration_keeps_scores_apart(self, kind: Kind) -> None:
        labels, embeddings = clusters(400)
        scorer = Scorer(labels, 16, ScorerOptions(neighbours=30, index=kind))
        for start in range(0, 400, 40):
            scorer.batch(np.arange(start, start + 40), embeddings[start : start + 40])
        scorer.new_epoch()
        frozen = scorer.radius
        for start in range(0, 400, 40):
            scorer.batch(np.arange(start, start + 40), embeddings[start : start + 40])
            assert scorer.radius == frozen
        statistics = scorer.statistics()
        assert 5 < statistics["median_same"] < 29
        assert statistics["isolated_share"] < 0.2
        assert scorer.scored_share == 1
        assert statistics["sigma"] == pytest.approx(scorer.scores.std(), rel=1e-4)
        # What lies in another class is what is worth most.
        assert scorer.recall(100, np.random.default_rng(0)) > 0.9

    def test_batches_that_are_scored_together_calibrate_as_each_alone(self, kind: Kind) -> None:
        labels, embeddings = clusters(400)
        apart, together, as_one = (Scorer(labels, 16, ScorerOptions(neighbours=30, index=kind)) for _ in range(3))
        for epoch in range(2):
            moved = embeddings * [[1.0] * 8 + [1.0 + epoch] * 8]
            for start in range(0, 400, 40):
                apart.batch(np.arange(start, start + 40), moved[start : start + 40])
            for start in range(0, 400, 200):
                together.batch(np.arange(start, start + 200), moved[start : start + 200], None, 5)
                as_one.batch(np.arange(start, start + 200), moved[start : start + 200])
        for scorer in (apart, together, as_one):
            scorer.new_epoch()
        assert len(together._radius.state()["distances"]) > 2 * len(as_one._radius.state()["distances"])
        assert together.radius == pytest.approx(apart.radius, rel=0.05)

    def test_survives_a_remount(self, kind: Kind, tmp_path: Path) -> None:
        labels, embeddings = clusters(200)
        options = ScorerOptions(neighbours=20, index=kind)
        scorer = Scorer(labels, 16, options)
        scorer.batch(np.arange(150), embeddings[:150])
        scorer.new_epoch()
        scorer.save(tmp_path)
        again = Scorer(labels, 16, options)
        assert again.restore(tmp_path)
        assert again.radius == scorer.radius
        assert again.scores.tolist() == scorer.scores.tolist()
        assert again.statistics() == scorer.statistics()
        one, other = (each.batch(np.arange(100, 200), embeddings[100:]) for each in (scorer, again))
        assert np.abs(one.same - other.same).mean() < 0.5
        for labels_now, dimension_now, options_now in (
            (labels[::-1], 16, options),
            (labels, 8, options),
            (labels, 16, ScorerOptions(neighbours=21, index=kind)),
        ):
            assert not Scorer(labels_now, dimension_now, options_now).restore(tmp_path)
        assert not Scorer(labels, 16, options).restore(tmp_path / "nowhere")
        (tmp_path / "index.bin").write_bytes(b"torn")
        assert not Scorer(labels, 16, options).restore(tmp_path)

    def test_an_unseen_sample_has_the_mean_of_the_others(self, kind: Kind) -> None:
        labels, embeddings = clusters(50)
        scorer = Scorer(labels, 16, ScorerOptions(index=kind))
        scorer.new_epoch()
        assert (scorer.scores == FIRST_PRIOR).all()
        scorer.batch(np.arange(40), embeddings[:40])
        assert (scorer.scores[40:] == FIRST_PRIOR).all()
        scorer.new_epoch()
        assert scorer.scores[40:] == pytest.approx(scorer.scores[:40].mean())


@pytest.mark.parametrize("kind", ["cells", "hnsw"])
def test_approximate_and_exact_agree_on_x_same(kind: Kind) -> None:
    labels, embeddings = clusters(2000)
    rng = np.random.default_rng(2)
    exact, approximate = (
        Scorer(labels, 16, ScorerOptions(neighbours=50, radius=0.5, index=each)) for each in ("exact", kind)
    )
    for _ in range(2):
        for ids in np.split(rng.permutation(2000), 20):
            moved = embeddings[ids] + 0.02 * rng.normal(size=(100, 16)).astype(np.float32)
            true, near = exact.batch(ids, moved), approximate.batch(ids, moved)
    recall = approximate.recall(200, np.random.default_rng(0))
    assert recall > 0.9
    assert near.same.sum() == pytest.approx(true.same.sum(), rel=2 * (1 - recall) + 0.01)
    assert exact.recall(200, np.random.default_rng(0)) == 1.0


@pytest.mark.parametrize(
    ("indices", "embeddings", "complaint"),
    [
        ([0, 1], np.zeros((1, 4)), "indices with embeddings"),
        ([0], np.zeros((1, 5)), "of 4 numbers"),
        ([[0]], np.zeros((1, 1, 4)), "indices with"),
        ([], np.zeros((0, 4)), "from 0 to 9"),
        ([10], np.zeros((1, 4)), "from 0 to 9"),
        ([-1], np.zeros((1, 4)), "from 0 to 9"),
        ([3], np.full((1, 4), np.nan), "not finite"),
        ([3], np.full((1, 4), np.inf), "not finite"),
    ],
)
def test_an_invalid_batch_changes_nothing(indices: Any, embeddings: Any, complaint: str) -> None:
    scorer = Scorer(np.zeros(10), 4)
    with pytest.raises(ValueError, match=complaint):
        scorer.batch(indices, embeddings)
    assert len(scorer.index) == 0


def test_impossible_settings_are_refused() -> None:
    for wrong in (
        lambda: Scorer([], 4),
        lambda: Scorer([1], 0),
        lambda: ScorerOptions(neighbours=0),
        lambda: Radius(ScorerOptions(radius=0.0)),
        lambda: Radius(ScorerOptions(radius=float("inf"), embeddings="raw")),
        lambda: ScorerOptions(radius=2.1),
        lambda: Radius(ScorerOptions(radius_quantile=1.0)),
        lambda: Radius(ScorerOptions(radius="class", radius_share=0.0)),
        lambda: ScorerOptions(embeddings="raw", index="cells"),
    ):
        with pytest.raises(ValueError, match=r"scorer|radius|raw"):
            wrong()


NEAREST, CLASS = ScorerOptions(radius="nearest"), ScorerOptions(radius="class", radius_share=0.5)


class TestRadius:
    def test_follows_the_first_epoch_and_then_only_epochs(self) -> None:
        radius = Radius(NEAREST, remembered=4)
        assert radius.value == 0
        radius.new_epoch()
        radius.observe(np.array([1, 2, 3], np.float32))
        assert radius.value == 2
        radius.new_epoch()
        radius.observe(np.array([9, 9, 9], np.float32))
        assert radius.value == 2
        radius.new_epoch()
        # The oldest were forgotten: 9, 9, 3, 9.
        assert radius.value == 9

    def test_a_fixed_one_stays(self) -> None:
        radius = Radius(ScorerOptions(radius=0.7))
        assert radius.settled
        radius.observe(np.array([1, 2, 3], np.float32))
        radius.new_epoch()
        assert radius.value == 0.7

    @pytest.mark.parametrize("options", [NEAREST, CLASS])
    def test_survives_a_remount(self, options: ScorerOptions) -> None:
        radius = Radius(options, remembered=4)
        radius.observe(np.array([1, 2, 3], np.float32))
        radius.new_epoch()
        radius.observe(np.array([5, 5], np.float32))
        again = Radius(options, remembered=4)
        again.restore(radius.state())
        assert again.value == radius.value
        for each in (radius, again):
            each.new_epoch()
        assert again.value == radius.value

    def test_of_a_class_stays_once_two_epochs_have_hardly_changed_it(self) -> None:
        radius = Radius(CLASS, remembered=4)
        values = []
        # Little change, then a jump: only two settled epochs in a row count.
        for level in (1.0, 1.01, 2.0, 2.0, 2.0 * (1 + SETTLED_CHANGE / 2), 3.0):
            radius.observe(np.full(4, level, np.float32))
            radius.new_epoch()
            values.append(radius.value)
        assert values == pytest.approx([1.0, 1.01, 2.0, 2.0, 2.05, 2.05])
        assert radius.settled
        again = Radius(CLASS, remembered=4)
        again.restore(radius.state())
        again.observe(np.full(4, 9.0, np.float32))
        again.new_epoch()
        assert again.value == radius.value

    @pytest.mark.parametrize("other", [NEAREST, ScorerOptions(radius="class", radius_share=0.1)])
    def test_of_another_calibration_begins_again(self, other: ScorerOptions) -> None:
        radius = Radius(CLASS, remembered=4)
        radius.observe(np.ones(4, np.float32))
        again = Radius(other, remembered=4)
        again.restore(radius.state())
        assert again.value == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.05, 0.4])
def test_the_radius_of_a_class_takes_in_a_share_of_each(kind: Kind, share: float) -> None:
    labels = np.repeat(np.arange(5), [60, 60, 240, 240, 240])
    embeddings = np.eye(16)[labels] + 0.2 * np.random.default_rng(3).normal(size=(840, 16))
    scorer = Scorer(labels, 16, ScorerOptions(radius="class", radius_share=share, index=kind))
    rng = np.random.default_rng(4)
    for _ in range(4):
        for ids in np.split(rng.permutation(840), 21):
            scorer.batch(ids, embeddings[ids])
        scorer.new_epoch()
    assert scorer._radius.settled
    counts = scorer.batch(np.arange(840), embeddings)
    for size in (60, 240):
        its = np.bincount(labels)[labels] == size
        assert counts.same[its].mean() == pytest.approx(share * (size - 1), rel=0.2)
    assert scorer.statistics()["mean_same"] == pytest.approx(counts.same.mean())


class TestRawEmbeddings:
    """The released program's rule: a radius of 1.42 among embeddings of any length."""

    @pytest.mark.parametrize("kind", ["exact", "hnsw"])
    def test_distances_are_those_of_the_numbers_themselves(self, kind: Kind) -> None:
        embeddings = 15 * np.eye(4, dtype=np.float32)[:1] + np.array([[0], [1.4], [1.5], [-1.3]]) * np.eye(4)[1]
        options = ScorerOptions(radius=1.42, embeddings="raw", index=kind)
        found = Scorer([0, 0, 0, 1], 4, options).batch(np.arange(4), embeddings)
        assert found.same.tolist() == [1, 2, 1, 0]
        assert found.other.tolist() == [1, 0, 0, 1]
        # As unit vectors all of them are neighbours.
        unit = Scorer([0, 0, 0, 1], 4, ScorerOptions(radius=1.42)).batch(np.arange(4), embeddings)
        assert unit.same.tolist() == [2, 2, 2, 0]

    def test_of_a_long_list_are_in_no_cells(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("spiderfs.scorer.scorer.EXACT_MAX_SAMPLES", 10)
        for installed, index in ((True, GraphIndex), (False, ExactIndex)):
            monkeypatch.setattr("spiderfs.scorer.scorer.is_installed", lambda installed=installed: installed)
            assert isinstance(Scorer(np.zeros(20), 4, ScorerOptions(embeddings="raw")).index, index)
            assert isinstance(Scorer(np.zeros(20), 4).index, CellIndex)

    def test_scores_of_unit_embeddings_are_not_taken_over(self, tmp_path: Path) -> None:
        labels, embeddings = clusters(50)
        scorer = Scorer(labels, 16)
        scorer.batch(np.arange(50), embeddings)
        scorer.save(tmp_path)
        assert not Scorer(labels, 16, ScorerOptions(embeddings="raw")).restore(tmp_path)
        assert Scorer(labels, 16, ScorerOptions(radius="class")).restore(tmp_path)
