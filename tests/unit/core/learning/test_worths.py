"""What a sample is worth, from the scores of one course or of several."""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from spiderfs.core.learning.worths import QUANTILES, Worths
from spiderfs.core.policy import Key

SCORES = st.floats(0.001, 1000, allow_nan=False)
COURSE = st.dictionaries(st.integers(0, 30), SCORES, min_size=1)
QUICKLY = settings(max_examples=100, deadline=None, derandomize=True, database=None)


class Told:
    """The worths as a policy has them: those that it was told last."""

    def __init__(self, **courses: dict[int, float]) -> None:
        self.worths, self.of = Worths(), dict[Key, float]()
        for course_id, scores in courses.items():
            self.scored(course_id, scores)

    def note(self, changed: Iterable[tuple[Key, float]]) -> None:
        self.of.update(changed)

    def scored(self, course_id: str, scores: dict[int, float]) -> None:
        self.note(self.worths.scored(course_id, list(scores), list(scores.values())))
        self.tell_due()

    def epoch_ended(self, course_id: str) -> None:
        self.worths.epoch_ended(course_id)
        self.tell_due()

    def forget(self, course_id: str) -> None:
        self.worths.forget(course_id)
        self.tell_due()

    def tell_due(self) -> None:
        self.note(self.worths.due(1_000_000))


@given(parts=st.lists(COURSE, min_size=1, max_size=5))
@QUICKLY
def test_with_one_course_the_worth_is_the_score(parts: list[dict[int, float]]) -> None:
    told, expected = Told(), dict[Key, float]()
    for scores in parts:
        told.scored("one", scores)
        expected.update(scores)
        told.epoch_ended("one")
    assert told.of == expected


@given(one=COURSE, other=COURSE, more=COURSE)
@QUICKLY
def test_with_several_the_worth_is_the_largest_rank(
    one: dict[int, float], other: dict[int, float], more: dict[int, float]
) -> None:
    told = Told(one=one, other=other)
    told.scored("one", more)
    one = one | more
    for course_id in ("one", "other"):
        told.epoch_ended(course_id)
    assert all(0 < worth < 1 for worth in told.of.values())

    def rank(scores: dict[int, float], key: int) -> float:
        values = np.array(list(scores.values()))
        return float((values < scores[key]).mean() + (values == scores[key]).mean() / 2)

    ranks = {key: [rank(scores, key) for scores in (one, other) if key in scores] for key in one | other}
    assert told.of == pytest.approx({key: max(some) for key, some in ranks.items()})


@given(one=COURSE, other=COURSE, later=COURSE)
@QUICKLY
def test_the_order_within_a_course_is_kept_up_to_ties(
    one: dict[int, float], other: dict[int, float], later: dict[int, float]
) -> None:
    """Among samples that one course alone has scored, also those that it scores between two renewals of its table."""
    told = Told(one=one, other={key + 100: score for key, score in other.items()})
    told.scored("one", later)
    scores = one | later
    ascending = sorted(scores, key=scores.__getitem__)
    worths = [told.of[key] for key in ascending]
    assert worths == sorted(worths)


@given(one=COURSE, other=COURSE, raised=st.tuples(st.integers(0, 30), SCORES))
@QUICKLY
def test_a_higher_score_never_lowers_a_worth(
    one: dict[int, float], other: dict[int, float], raised: tuple[int, float]
) -> None:
    told = Told(one=one, other=other)
    key, score = raised
    if key in one:
        before = told.of[key]
        told.scored("one", {key: one[key] + score})
        assert told.of[key] >= before


@given(one=COURSE, other=COURSE, third=COURSE)
@QUICKLY
def test_a_course_that_ends_gives_back_what_the_others_think(
    one: dict[int, float], other: dict[int, float], third: dict[int, float]
) -> None:
    told = Told(one=one, other=other, third=third)
    told.forget("third")
    for course_id in ("one", "other"):
        told.epoch_ended(course_id)
    two = Told(one=one, other=other)
    assert {key: told.of[key] for key in two.of} == pytest.approx(two.of)
    told.forget("other")
    assert {key: told.of[key] for key in one} == one
    assert told.worths.course_ids == ["one"]
    told.forget("one")
    told.scored("new", {1: 7.0})
    assert told.of[1] == 7.0


def test_a_table_grows_with_its_course() -> None:
    """A course that has just begun is not measured by its first few samples for a whole epoch."""
    told = Told(one={key: float(key) for key in range(1, 11)}, other={20: 1.0})
    for key in range(21, 40):
        told.scored("other", {key: float(key)})
    worths = [told.of[key] for key in range(20, 36)]
    assert worths == sorted(worths)
    assert len(set(worths)) > 10


def test_many_scores_become_a_short_table() -> None:
    count = 10 * QUANTILES
    told = Told(one={key: float(key + 1) for key in range(count)}, other={-1: 1.0})
    worths = np.array([told.of[key] for key in range(count)])
    assert worths == pytest.approx((np.arange(count) + 0.5) / count, abs=1 / QUANTILES)


NAMES = st.sampled_from(["one", "other", "third"])
SCORED = st.tuples(st.just("scored"), NAMES, COURSE)
STEPS = st.one_of(SCORED, st.tuples(st.sampled_from(["epoch_ended", "forget"]), NAMES, st.none()))


@given(steps=st.lists(STEPS, max_size=20), count=st.integers(1, 40))
@QUICKLY
def test_what_is_told_in_slices_ends_as_what_is_told_at_once(
    steps: list[tuple[str, str, dict[int, float] | None]], count: int
) -> None:
    at_once, sliced = Told(), Told()
    scored: dict[str, set[int]] = {}
    for what, course_id, scores in steps:
        if scores is not None:
            at_once.scored(course_id, scores)
            sliced.note(sliced.worths.scored(course_id, list(scores), list(scores.values())))
            scored.setdefault(course_id, set()).update(scores)
        else:
            getattr(at_once, what)(course_id)
            getattr(sliced.worths, what)(course_id)
            if what == "forget":
                scored.pop(course_id, None)
        some = list(sliced.worths.due(count))
        assert len(some) <= count
        sliced.note(some)
    known = set[int]().union(*scored.values())
    for _ in range(200 // count + 1):
        some = list(sliced.worths.due(count))
        assert {key for key, _ in some} <= known, "nobody has a score of the others"
        sliced.note(some)
    assert list(sliced.worths.due(count)) == []
    assert {key: sliced.of[key] for key in known} == {key: at_once.of[key] for key in known}
