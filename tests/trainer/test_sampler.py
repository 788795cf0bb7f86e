"""What the sampler draws: in proportion to the scores, the same for a seed, the same on all ranks, resumable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hook_daemon import HookDaemon, until
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import SIZE, Network, Numbered, loader, recorded, train, train_epoch
from torch.utils.data import DataLoader
from two_ranks import in_two_ranks

from benchmarks.fakes import RecordingSink
from trainer_hook import SpiderSampler, attach

SCORES = np.linspace(0.1, 2, SIZE).astype(np.float32)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[HookDaemon]:
    with HookDaemon(tmp_path, RecordingSink(scores_given=SCORES)) as daemon:
        yield daemon


def with_scores(sampler: SpiderSampler, scores: Any) -> SpiderSampler:
    """Let the sampler draw as if a daemon had answered with these scores when each epoch began."""
    sampler._shared_scores = lambda timeout_s: np.asarray(scores, np.float32)  # type: ignore[method-assign]
    return sampler


def test_draws_in_proportion_to_the_scores() -> None:
    scores = [0, 1, 3]
    sampler = with_scores(SpiderSampler(3, draws=40_000, coverage=0.0), scores)
    counts = np.bincount(list(sampler), minlength=3)
    # Five standard deviations of a binomial count.
    np.testing.assert_allclose(counts, [0, 10_000, 30_000], atol=5 * 87)


@pytest.mark.parametrize(
    ("options", "counted"),
    [({"coverage": 0.4}, [4_000, 4_000, 4_000, 28_000]), ({}, [3_000, 3_000, 3_000, 31_000])],
)
def test_the_coverage_floor(options: dict[str, Any], counted: list[int]) -> None:
    sampler = with_scores(SpiderSampler(4, draws=40_000, **options), [0, 0, 0, 1])
    counts = np.bincount(list(sampler), minlength=4)
    np.testing.assert_allclose(counts, counted, atol=5 * 92)


@given(st.lists(st.floats(0.125, 10, width=32), min_size=2, max_size=30), st.floats(0, 1))
def test_weights_make_the_expectation_uniform(scores: list[float], coverage: float) -> None:
    sampler = with_scores(SpiderSampler(len(scores), coverage=coverage), scores)
    next(iter(sampler))
    chances = sampler.probabilities()
    assert np.isclose(chances.sum(), 1)
    values = np.arange(len(scores))
    weighted = (chances * sampler.weights(values).numpy() * values).sum()
    assert np.isclose(weighted, values.mean(), rtol=1e-4)
    assert float(sampler.weights(values, clip=0.5).max()) <= 0.5


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(0, 39), st.booleans())
def test_resumes_where_it_was(draws: int, taken: int, scored: bool) -> None:
    def make() -> SpiderSampler:
        sampler = SpiderSampler(10, draws=draws, seed=3)
        return with_scores(sampler, range(1, 11)) if scored else sampler

    whole, stopped, resumed = make(), make(), make()
    expected = [*whole, *whole]
    draws_of = iter(stopped)
    begun = [next(draws_of) for _ in range(min(taken, draws))]
    resumed.load_state_dict(stopped.state_dict())
    rest = [*resumed]
    if len(begun) in (0, draws):
        # Nothing was drawn yet, or an epoch was complete: the next epoch begins at its start.
        assert begun + rest == expected[: len(begun) + draws]
    else:
        assert begun + rest == expected[:draws]
        assert [*resumed] == expected[draws:]


@pytest.mark.parametrize("workers", [0, 2])
def test_asks_the_daemon_and_publishes_what_it_draws(daemon: HookDaemon, workers: int, tmp_path: Path) -> None:
    sampler = SpiderSampler(SIZE, coverage=0.0)
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    model, batches = Network(), loader(shuffle=False, sampler=sampler, num_workers=workers, **options)
    hook = attach(daemon.mount, model, batches)
    state: dict[str, Any] = {}
    for step in train(model, batches):
        weights = hook.weights()
        np.testing.assert_allclose(weights.numpy(), SCORES.mean() / SCORES[hook.indices], rtol=1e-5)
        if step == 2:
            state = sampler.state_dict()
    following = sampler.state_dict() | {"order": None}
    hook.close()
    drawn = recorded(daemon, 7)
    begun, ahead = (plan for _, plan in daemon.sink.plans)
    assert (begun.order.tolist(), begun.epoch, begun.begun) == (drawn, 0, True)
    assert (ahead.order.tolist(), ahead.epoch, ahead.begun) == (list(sampler), 1, False)
    assert (following["epoch"], following["consumed"]) == (0, SIZE)

    torch.save(state, tmp_path / "state")
    again = SpiderSampler(SIZE, coverage=0.0)
    again.load_state_dict(torch.load(tmp_path / "state"))
    batches = loader(shuffle=False, sampler=again)
    hook = attach(daemon.mount, model, batches)
    train_epoch(model, batches)
    hook.close()
    assert recorded(daemon, 7 + 4)[SIZE:] == drawn[24:]
    assert [plan.order.tolist() for _, plan in daemon.sink.plans][2:] == [drawn[24:], ahead.order.tolist()]


@pytest.mark.parametrize("settled", [0.25, 1.0])
def test_draws_an_epoch_when_it_begins_if_its_plan_is_of_no_use(tmp_path: Path, settled: float) -> None:
    with HookDaemon(tmp_path, RecordingSink(scores_given=SCORES, follows_plans=settled == 1)) as daemon:
        sampler = SpiderSampler(SIZE, coverage=0.0, settled=settled)
        model, batches = Network(), loader(shuffle=False, sampler=sampler)
        hook = attach(daemon.mount, model, batches)
        train_epoch(model, batches)
        # The next epoch is drawn by the scores of now.
        daemon.sink.scores_given = np.eye(SIZE, dtype=np.float32)[3] + 1e-9
        assert set(sampler) == {3}
        hook.close()
        assert [plan.begun for _, plan in daemon.sink.plans] == [True]


def test_scores_that_do_not_fit_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with HookDaemon(tmp_path, RecordingSink(scores_given=np.ones(3, np.float32))) as daemon:
        batches = loader(shuffle=False, sampler=SpiderSampler(SIZE))
        hook = attach(daemon.mount, Network(), batches)
        assert sorted(index for inputs, _ in batches for index in range(len(inputs)))
        hook.close()
    assert "3 scores for 50 samples" in caplog.text


def _rank(rank: int, mount: str) -> None:
    sampler = SpiderSampler(SIZE, draws=SIZE - 1)
    batches: DataLoader[Any] = DataLoader(Numbered(), batch_size=8, sampler=sampler)
    model = Network()
    hook = attach(mount, model, batches)
    assert len(batches) == 4
    for _ in range(2):
        train_epoch(model, batches)
        # As an evaluation takes: an epoch that begins at once is not told ahead by the rank that comes late.
        time.sleep(0.5)
    hook.close(10)


def test_ranks_share_the_draws_of_an_epoch_and_know_the_next_one(daemon: HookDaemon) -> None:
    in_two_ranks(_rank, daemon.mount)
    until(lambda: len(daemon.sink.plans) == 8)
    sampler = with_scores(SpiderSampler(SIZE, draws=SIZE - 1), SCORES)
    for epoch in range(2):
        expected = list(sampler)
        # So that both ranks draw equally many, the first draw is made once more.
        expected.append(expected[0])
        for rank in range(2):
            found = [plan for trainer, plan in daemon.sink.plans if (trainer.rank, plan.epoch) == (rank, epoch)]
            assert [plan.begun for plan in found] == ([False, True] if epoch else [True])
            assert {tuple(plan.order.tolist()) for plan in found} == {tuple(expected[rank::2])}
    # For the first epoch, and for each that was drawn ahead.
    assert [name for name, _ in daemon.sink.calls].count("scores") == 3
