"""What every scoring of the table keeps, and the scores that are made of losses."""

from __future__ import annotations

from math import log
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from spiderfs.policies import POLICIES
from spiderfs.scorer import SCORINGS
from spiderfs.scorer.scoring import FIRST_PRIOR, LEAST_LOSS, RANK_OFFSET, LossScores, RankScores, ScorerOptions, Scoring

LABELS = np.arange(30) % 3
OPTIONS = ScorerOptions(neighbours=5)


def batch_of(rng: np.random.Generator, *samples: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    embeddings = rng.standard_normal((len(samples), 4)).astype(np.float16)
    return list(samples), embeddings, rng.random(len(samples)).astype(np.float16)


@pytest.fixture(params=SCORINGS)
def kind(request: pytest.FixtureRequest) -> type[Scoring]:
    return SCORINGS[request.param]


class TestContract:
    def test_scores_each_sample_of_a_batch_once_and_positively(self, kind: type[Scoring]) -> None:
        scoring = kind(LABELS, 4, OPTIONS)
        scored = scoring.batch(*batch_of(np.random.default_rng(1), 3, 1, 3, 7))
        assert scored.ids.tolist() == [1, 3, 7]
        assert (scored.scores > 0).all()
        assert scoring.scores[scored.ids].tolist() == scored.scores.tolist()
        assert scoring.scores[0] == FIRST_PRIOR
        scoring.new_epoch()
        assert scoring.scores[0] == pytest.approx(scored.scores.mean())
        assert scoring.sigma == pytest.approx(scored.scores.std())

    def test_survives_a_remount(self, kind: type[Scoring], tmp_path: Path) -> None:
        rng = np.random.default_rng(2)
        scoring = kind(LABELS, 4, OPTIONS)
        for _ in range(5):
            scoring.batch(*batch_of(rng, *rng.permutation(30)[:8].tolist()))
        assert kind.saved(LABELS, OPTIONS, tmp_path) is None
        scoring.save(tmp_path)
        again = kind.saved(LABELS, OPTIONS, tmp_path)
        assert again is not None
        assert again.fits(4)
        assert again.scores.tolist() == scoring.scores.tolist()
        batch = batch_of(rng, 1, 2, 3)
        assert again.batch(*batch).scores == pytest.approx(scoring.batch(*batch).scores)
        assert kind.saved(LABELS[::-1], OPTIONS, tmp_path) is None

    def test_refuses_an_invalid_batch(self, kind: type[Scoring]) -> None:
        scoring = kind(LABELS, 4, OPTIONS)
        embeddings, losses = np.ones((1, 4), np.float16), np.ones(1, np.float16)
        for indices in ([], [30], [-1], [[1]]):
            with pytest.raises(ValueError, match="indices"):
                scoring.batch(indices, embeddings, losses)

    def test_describes_itself(self, kind: type[Scoring]) -> None:
        described = dict(kind(LABELS, 4, OPTIONS).described())
        assert described["scored share"] == "0.000"


def test_every_policy_names_a_scoring_that_exists() -> None:
    assert {policy.scoring for policy in POLICIES.values()} <= SCORINGS.keys()


EMBEDDINGS = np.zeros((0, 4), np.float16)


class TestRanks:
    def test_equation_6(self) -> None:
        scored = RankScores(LABELS).batch([4, 5, 6], EMBEDDINGS, np.array([0.3, 0.5, 0.4]))
        assert scored.scores == pytest.approx([log(10), log(12), log(11)])

    def test_equal_losses_share_the_lower_rank(self) -> None:
        scored = RankScores(LABELS).batch([4, 5, 6], EMBEDDINGS, np.array([0.5, 0.5, 0.4]))
        assert scored.scores == pytest.approx([log(11), log(11), log(10)])

    @given(st.lists(st.floats(0, 10, width=16), min_size=2, max_size=30))
    def test_against_the_definition(self, losses: list[float]) -> None:
        scored = RankScores(LABELS).batch(range(len(losses)), EMBEDDINGS, np.array(losses))
        expected = [log(sum(one > other for other in losses) + RANK_OFFSET) for one in losses]
        assert scored.scores == pytest.approx(expected, rel=1e-6)

    def test_compares_batches_of_different_scale_and_size(self) -> None:
        scoring = RankScores(LABELS)
        first = scoring.batch(range(21), EMBEDDINGS, np.linspace(5, 9, 21))
        last = scoring.batch(range(21, 26), EMBEDDINGS, np.linspace(0.1, 0.2, 5))
        assert first.scores[::5] == pytest.approx(last.scores)
        alone = scoring.batch([29], EMBEDDINGS, np.array([7.0]))
        assert alone.scores == pytest.approx([log(20)])

    def test_a_repeated_sample_has_one_score_and_its_rows_keep_their_places_in_the_batch(self) -> None:
        scored = RankScores(LABELS).batch([4, 4, 4, 6], EMBEDDINGS, np.array([0.1, 0.1, 0.1, 0.4]))
        assert scored.ids.tolist() == [4, 6]
        assert scored.scores == pytest.approx([log(10), log(13)])


class TestLosses:
    def test_are_the_scores(self) -> None:
        scored = LossScores(LABELS).batch([4, 5, 6], EMBEDDINGS, np.array([0.5, 2.0, 0.0]))
        assert scored.scores == pytest.approx([0.5, 2.0, LEAST_LOSS])

    @pytest.mark.parametrize("kind", [LossScores, RankScores])
    def test_without_losses_nothing_is_scored_and_that_is_said(self, kind: type[LossScores]) -> None:
        scoring = kind(LABELS)
        scored = scoring.batch([1, 2], EMBEDDINGS)
        assert (len(scored.ids), len(scored.scores), [*scored.hubs()]) == (0, 0, [])
        assert dict(scoring.described())["without losses"].startswith("1 ")

    def test_must_be_finite_and_as_many_as_samples(self) -> None:
        for losses in ([1.0], [1.0, float("nan")]):
            with pytest.raises(ValueError, match="one finite loss"):
                LossScores(LABELS).batch([1, 2], EMBEDDINGS, np.array(losses))

    def test_a_torn_file_is_no_state(self, tmp_path: Path) -> None:
        (tmp_path / LossScores.FILE).write_bytes(b"torn")
        assert LossScores.saved(LABELS, OPTIONS, tmp_path) is None
