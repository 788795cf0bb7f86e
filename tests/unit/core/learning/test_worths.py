"""What a sample is worth, from the scores of one job dataset or of several."""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from spiderfs.core.feed import Worths
from spiderfs.core.policy import Key

SCORES = st.floats(0.001, 1000, allow_nan=False)
JOB_SCORES = st.dictionaries(st.integers(0, 30), SCORES, min_size=1)
QUICKLY = settings(max_examples=100, deadline=None, derandomize=True, database=None)


class Ranking:
    """The worths as a policy has them: those that were passed on last."""

    def __init__(self, **job_datasets: dict[int, float]) -> None:
        self.worths, self.of = Worths(), dict[Key, float]()
        for job_dataset_id, scores in job_datasets.items():
            self.scored(job_dataset_id, scores)

    def note(self, changed: Iterable[tuple[Key, float]]) -> None:
        self.of.update(changed)

    def scored(self, job_dataset_id: str, scores: dict[int, float]) -> None:
        self.note(self.worths.scored(job_dataset_id, list(scores), list(scores.values())))
        self.rank_due()

    def epoch_ended(self, job_dataset_id: str) -> None:
        self.worths.epoch_ended(job_dataset_id)
        self.rank_due()

    def forget(self, job_dataset_id: str) -> None:
        self.worths.forget(job_dataset_id)
        self.rank_due()

    def rank_due(self) -> None:
        self.note(self.worths.due(1_000_000))


@given(parts=st.lists(JOB_SCORES, min_size=1, max_size=5))
@QUICKLY
def test_with_one_job_dataset_the_worth_is_the_score(parts: list[dict[int, float]]) -> None:
    ranking, expected = Ranking(), dict[Key, float]()
    for scores in parts:
        ranking.scored("one", scores)
        expected.update(scores)
        ranking.epoch_ended("one")
    assert ranking.of == expected


@given(one=JOB_SCORES, other=JOB_SCORES, more=JOB_SCORES)
@QUICKLY
def test_with_several_the_worth_is_the_largest_rank(
    one: dict[int, float], other: dict[int, float], more: dict[int, float]
) -> None:
    ranking = Ranking(one=one, other=other)
    ranking.scored("one", more)
    one = one | more
    for job_dataset_id in ("one", "other"):
        ranking.epoch_ended(job_dataset_id)
    assert all(0 < worth < 1 for worth in ranking.of.values())

    def rank(scores: dict[int, float], key: int) -> float:
        values = np.array(list(scores.values()))
        return float((values < scores[key]).mean() + (values == scores[key]).mean() / 2)

    ranks = {key: [rank(scores, key) for scores in (one, other) if key in scores] for key in one | other}
    assert ranking.of == pytest.approx({key: max(some) for key, some in ranks.items()})


@given(one=JOB_SCORES, other=JOB_SCORES, later=JOB_SCORES)
@QUICKLY
def test_the_order_within_a_job_dataset_is_kept_up_to_ties(
    one: dict[int, float], other: dict[int, float], later: dict[int, float]
) -> None:
    """Among samples that one job dataset alone has scored, also those that it scores between two renewals of its
    table."""
    ranking = Ranking(one=one, other={key + 100: score for key, score in other.items()})
    ranking.scored("one", later)
    scores = one | later
    ascending = sorted(scores, key=scores.__getitem__)
    worths = [ranking.of[key] for key in ascending]
    assert worths == sorted(worths)


@given(one=JOB_SCORES, other=JOB_SCORES, raised=st.tuples(st.integers(0, 30), SCORES))
@QUICKLY
def test_a_higher_score_never_lowers_a_worth(
    one: dict[int, float], other: dict[int, float], raised: tuple[int, float]
) -> None:
    ranking = Ranking(one=one, other=other)
    key, score = raised
    if key in one:
        before = ranking.of[key]
        ranking.scored("one", {key: one[key] + score})
        assert ranking.of[key] >= before


@given(one=JOB_SCORES, other=JOB_SCORES, third=JOB_SCORES)
@QUICKLY
def test_a_job_dataset_that_ends_gives_back_what_the_others_think(
    one: dict[int, float], other: dict[int, float], third: dict[int, float]
) -> None:
    ranking = Ranking(one=one, other=other, third=third)
    ranking.forget("third")
    for job_dataset_id in ("one", "other"):
        ranking.epoch_ended(job_dataset_id)
    two = Ranking(one=one, other=other)
    assert {key: ranking.of[key] for key in two.of} == pytest.approx(two.of)
    ranking.forget("other")
    assert {key: ranking.of[key] for key in one} == one
    assert ranking.worths.job_dataset_ids == ["one"]
    ranking.forget("one")
    ranking.scored("new", {1: 7.0})
    assert ranking.of[1] == 7.0


NAMES = st.sampled_from(["one", "other", "third"])
SCORED = st.tuples(st.just("scored"), NAMES, JOB_SCORES)
STEPS = st.one_of(SCORED, st.tuples(st.sampled_from(["epoch_ended", "forget"]), NAMES, st.none()))


@given(steps=st.lists(STEPS, max_size=20), count=st.integers(1, 40))
@QUICKLY
def test_what_is_passed_in_slices_ends_as_what_is_passed_at_once(
    steps: list[tuple[str, str, dict[int, float] | None]], count: int
) -> None:
    at_once, sliced = Ranking(), Ranking()
    scored: dict[str, set[int]] = {}
    for what, job_dataset_id, scores in steps:
        if scores is not None:
            at_once.scored(job_dataset_id, scores)
            sliced.note(sliced.worths.scored(job_dataset_id, list(scores), list(scores.values())))
            scored.setdefault(job_dataset_id, set()).update(scores)
        else:
            getattr(at_once, what)(job_dataset_id)
            getattr(sliced.worths, what)(job_dataset_id)
            if what == "forget":
                scored.pop(job_dataset_id, None)
        some = list(sliced.worths.due(count))
        assert len(some) <= count
        sliced.note(some)
    known = set[int]().union(*scored.values())
    for _ in range(200 // count + 1):
        some = list(sliced.worths.due(count))
        assert {key for key, _ in some} <= known, "no one has a score of the others"
        sliced.note(some)
    assert list(sliced.worths.due(count)) == []
    assert {key: sliced.of[key] for key in known} == {key: at_once.of[key] for key in known}
