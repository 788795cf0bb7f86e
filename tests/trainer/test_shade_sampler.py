"""What ShadeSampler repeats and when, and a training with it on a mount with `policy=shade`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from easy_and_hard import CONTENTS, EASY, HARD, EasyAndHard
from hook_daemon import HookDaemon, until
from hypothesis import given
from hypothesis import strategies as st
from mounting import Mounted, eventually, mounted
from reading import source_with
from tiny_training import SIZE, Network, loader, train, train_epoch
from torch import nn
from torch.utils.data import DataLoader
from two_ranks import in_two_ranks

from benchmarks.fakes import RecordingSink
from trainer_hook import HookClient, ShadeSampler, attach
from trainer_hook.samplers.shade import REPEATED_MAX, Trend, repeated

SCORES = np.linspace(0.1, 2, SIZE).astype(np.float32)


class Daemon:
    """A client whose requests are always answered."""

    follows_plans = True

    def __init__(self, scores: npt.ArrayLike, cached: npt.ArrayLike | None) -> None:
        self._scores = np.asarray(scores, np.float32)
        self._cached = None if cached is None else np.asarray(cached, bool)

    def scores(self, name: str, timeout_s: float) -> npt.NDArray[np.float32]:
        return self._scores

    def cached(self, name: str, timeout_s: float) -> npt.NDArray[np.bool_] | None:
        return self._cached


def bound(sampler: ShadeSampler, scores: npt.ArrayLike, cached: npt.ArrayLike | None, improves: bool) -> ShadeSampler:
    sampler.bind(cast(HookClient, Daemon(scores, cached)), "train")
    for loss in (2.0, 1.9 if improves else 2.1):
        sampler.observe(loss)
    return sampler


class TestTrend:
    @pytest.mark.parametrize(
        ("losses", "accuracies", "improves"),
        [
            ([], [], False),
            ([2.0], [0.1], False),
            ([2.0, 1.9], [], True),
            ([2.0, 2.1], [], False),
            ([2.0, 1.5], [0.1, 0.3], False),  # steep: what is hard changes
            ([2.0, 2.1], [0.1, 0.2], True),
            ([], [0.1, 0.2], True),
            ([2.0, 1.9, 1.8, 1.7], [0.50, 0.50, 0.49, 0.50], False),  # three epochs without a rise
            ([2.0, 1.9, 1.8, 1.7], [0.50, 0.50, 0.49, 0.51], True),
            ([2.0, 1.9, 1.8], [0.50, 0.50, 0.49], True),
            ([0.0, 0.0], [], False),
        ],
    )
    def test_decides_by_loss_and_accuracy(self, losses: list[float], accuracies: list[float], improves: bool) -> None:
        trend = Trend()
        for loss in losses:
            trend.observe(loss, None)
        for accuracy in accuracies:
            trend.observe(None, accuracy)
        assert trend.improves == improves


@given(
    st.lists(st.tuples(st.floats(0.125, 10, width=32), st.booleans()), min_size=2, max_size=40),
    st.floats(1, 5),
)
def test_cached_and_hard_samples_are_drawn_so_many_times_as_often(
    samples: list[tuple[float, bool]], repeats: float
) -> None:
    scores = np.array([score for score, _ in samples], np.float32)
    cached = np.array([flag for _, flag in samples])
    before = scores / scores.sum()
    after = repeated(scores, cached, repeats).astype(float)
    after /= after.sum()
    hot = cached & (scores.astype(np.float64) > scores.sum(dtype=np.float64) / len(scores) * (1 + 1e-6))
    mass = before[hot].sum()
    expected = mass if mass >= REPEATED_MAX else min(repeats * mass, REPEATED_MAX)
    assert after[hot].sum() == pytest.approx(expected, abs=1e-4)
    # Within both groups chances stay in proportion to the scores.
    for group in (hot, ~hot):
        if group.any():
            assert after[group] / after[group].sum() == pytest.approx(before[group] / before[group].sum(), rel=1e-3)


class TestDraws:
    # A fifth is cached, and hard: 0.32 of the sum of the scores.
    scores = [2.0] * 20 + [1.0] * 80 + [1.5] * 3
    cached = [True] * 20 + [False] * 80 + [True] * 3

    def shares(self, sampler: ShadeSampler) -> tuple[float, float]:
        counts = Counter(sampler)
        return sum(counts[sample] for sample in range(20)) / 50_000, len(counts) / 103

    @pytest.mark.parametrize("improves", [False, True])
    def test_draws_what_is_cached_before_all_else(self, improves: bool) -> None:
        first, mixed = (
            bound(ShadeSampler(103, seed=4, cached_first=option), self.scores, self.cached, improves)
            for option in (True, False)
        )
        drawn, others = list(first), list(mixed)
        assert drawn == sorted(others, key=lambda sample: not self.cached[sample])
        assert drawn != others
        assert self.cached[drawn[0]] > self.cached[drawn[-1]]

    def test_never_leaves_the_others_out(self) -> None:
        sampler = bound(ShadeSampler(103, draws=50_000, coverage=0, repeats=9), self.scores, self.cached, improves=True)
        share, seen = self.shares(sampler)
        assert share == pytest.approx(REPEATED_MAX * 40 / 44.5, abs=0.01)
        assert seen == 1

    def test_draws_by_scores_when_the_cached_samples_are_not_known(self) -> None:
        sampler = bound(ShadeSampler(103, draws=50_000, coverage=0), self.scores, None, improves=True)
        assert self.shares(sampler)[0] == pytest.approx(40 / 124.5, abs=0.01)

    def test_weights_undo_the_repetition(self) -> None:
        sampler = bound(ShadeSampler(103, repeats=3), self.scores, self.cached, improves=True)
        next(iter(sampler))
        chances = sampler.probabilities()
        assert chances.sum() == pytest.approx(1)
        assert (chances * sampler.weights(range(103)).numpy()).sum() == pytest.approx(1, rel=1e-5)
        assert float(sampler.weights([0])[0]) < float(sampler.weights([30])[0])


def test_the_loss_is_that_of_the_whole_set_however_it_was_drawn() -> None:
    sampler = bound(ShadeSampler(103, coverage=0), TestDraws.scores, TestDraws.cached, improves=True)
    drawn = np.array(list(sampler), np.uint32)
    # The repeated samples have a loss of 4 and all others of 1: the mean is 1.58.
    sampler.trained(drawn, np.where(drawn < 20, 4, 1).astype(np.float16))
    sampler.epoch_end(0.5)
    assert sampler.trend.losses[-1] == pytest.approx(1.58, abs=0.35)
    assert sampler.trend.accuracies == [0.5]
    sampler.epoch_end(None)
    assert len(sampler.trend.losses) == 3


# The losses that the ranks tell of two epochs: one rank alone seems to improve, all of them together do not.
LOSSES_OF_RANKS = {0: (2.0, 1.9), 1: (2.0, 2.4)}


# Rank 0 asks the daemon, and all ranks go by its answer.
CACHED_OF_RANKS = {0: [True, False, False, False], 1: [False, False, False, True]}


def _rank(rank: int, mount: str) -> None:
    sampler = bound_alone(ShadeSampler(4, draws=40, seed=1), CACHED_OF_RANKS[rank])
    for epoch, loss in enumerate(LOSSES_OF_RANKS[rank]):
        list(sampler)
        sampler.trained(np.array([0, 1], np.uint32), np.full(2, loss, np.float16))
        # The loop of one rank alone says that the last epoch is over.
        if epoch == 0 or rank == 0:
            sampler.epoch_end(0.5 if rank == 0 else None)
    before = sampler.state_dict()["ended"]
    drawn = list(sampler)
    trend = sampler.trend
    found = {"losses": trend.losses, "accuracies": trend.accuracies, "drawn": drawn, "pending": before is not None}
    # The next epoch's samples that are cached come first, though this rank's client knows of others.
    found["next"] = list(sampler)
    Path(mount, f"trend-{rank}.json").write_text(json.dumps(found))


def bound_alone(sampler: ShadeSampler, cached: list[bool]) -> ShadeSampler:
    sampler.bind(cast(HookClient, Daemon([2.0, 1.0, 1.0, 1.0], cached)), "train")
    return sampler


def test_the_loss_is_the_mean_over_all_ranks(tmp_path: Path) -> None:
    in_two_ranks(_rank, tmp_path)
    one, other = (json.loads((tmp_path / f"trend-{rank}.json").read_text()) for rank in (0, 1))
    assert one["losses"] == other["losses"] == [pytest.approx(2.0), pytest.approx(2.15, abs=0.01)]
    assert one["accuracies"] == other["accuracies"] == [0.5, 0.5]
    assert (one["pending"], other["pending"]) == (True, False)
    for found in (one, other):
        assert found["next"] == sorted(found["next"], key=lambda sample: sample != 0)
        assert {*found["next"][:2], found["next"][-1]} > {0}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[HookDaemon]:
    with HookDaemon(tmp_path, RecordingSink(scores_given=SCORES)) as daemon:
        yield daemon


@pytest.mark.parametrize("while_improving", [False, True])
def test_the_hook_passes_losses_and_accuracies(daemon: HookDaemon, while_improving: bool) -> None:
    """With `while_improving`, the third epoch alone repeats, by the trend of the first two."""
    sampler = ShadeSampler(SIZE, while_improving=while_improving, cached_first=not while_improving)
    model, batches = Network(), loader(shuffle=False, sampler=sampler)
    hook = attach(daemon.mount, model, batches, plan=False)
    for epoch in range(3):
        train_epoch(model, batches)
        # The losses come a moment after their batches, those of an epoch's last one after the end of the epoch.
        until(lambda expected=7 * (epoch + 1) - 1: hook.counts["sent"] >= expected)  # type: ignore[misc]
        hook.epoch_end(0.5 + epoch / 10)
    hook.close()
    assert sampler.trend.accuracies == [0.5, 0.6, 0.7]
    assert len(sampler.trend.losses) == 3
    assert all(0 < loss < 3 for loss in sampler.trend.losses)
    asked = Counter(name for name, _ in daemon.sink.calls)
    assert (asked["scores"], asked["cached"]) == (3, 1 if while_improving else 3)


# -- on a mount


class Training:
    def __init__(self, mount: Mounted, plan: bool) -> None:
        self.mount = mount
        self.sampler = ShadeSampler(EASY + HARD)
        self.batches: DataLoader[Any] = DataLoader(EasyAndHard(mount.point), batch_size=16, sampler=self.sampler)
        torch.manual_seed(1)
        self.model = nn.Linear(4, 2)
        # Each training goes on with what the one before it has learned.
        self.hook = attach(mount.point, self.model, self.batches, plan=plan, job="shade")
        self.drawn: Counter[int] = Counter()
        self.repeats: list[float] = []
        self.epochs = 0

    def epoch(self) -> None:
        self.repeats.append(self.sampler.repeats)
        for _ in train(self.model, self.batches):
            self.drawn.update(self.hook.indices.tolist())
        self.epochs += 1
        until(lambda: self.hook.counts["sent"] >= 5 * self.epochs - 1)
        self.hook.epoch_end(min(0.99, 0.5 + self.epochs / 50))


def cached(mount: Mounted) -> list[int]:
    """The samples that the cache holds outside of landing."""
    lines = eventually(mount.control("cache").read_bytes, what="members").decode().splitlines()
    return [int(line.rsplit("/", 1)[1]) for line in lines if line.startswith("samples ")]


source = source_with(CONTENTS)


@pytest.mark.parametrize("plan", [False, True])
def test_hard_samples_are_cached_and_repeated(source: Path, tmp_path: Path, plan: bool) -> None:
    options: dict[str, object] = {"capacity": "24KiB", "policy": "shade", "plan": "on" if plan else "off"}
    with mounted(source, tmp_path, **options) as mount:
        training = Training(mount, plan)
        for _ in range(8):
            training.epoch()
        assert {*training.repeats} == {3}
        if not plan:
            hard = sum(count for number, count in training.drawn.items() if number >= EASY)
            assert hard / training.drawn.total() > 0.3
            kept = cached(mount)
            assert sum(number >= EASY for number in kept) >= 0.4 * len(kept)
        # Under another policy ranks are not used; when shade is chosen again, it has them again.
        eventually(lambda: len(mount.control("scores").read_bytes().splitlines()) == EASY + HARD, what="scores")
        # Batches that were sent may wait for the manager: the next policy would score them.
        eventually(lambda: mount.stats()["jobs"][0]["epoch"] == training.epochs, what="the end of the last epoch")
        mount.control("config").write_bytes(b"policy=spider\n")
        eventually(lambda: mount.control("scores").read_bytes() == b"", what="no scores of a graph")
        training.epoch()
        mount.control("config").write_bytes(b"policy=shade\n")
        eventually(lambda: len(mount.control("scores").read_bytes().splitlines()) == EASY + HARD, what="scores again")
        assert b"without losses     0 " in mount.control("graph").read_bytes()
        training.epoch()
        training.hook.close()
    with mounted(source, tmp_path, **options) as mount:
        training = Training(mount, plan)
        training.epoch()
        assert len(training.drawn) < EASY + HARD, "drawn by the scores of the training before"
        training.hook.close()
        assert all((mount.point / f"train/{number:03d}").read_bytes()[:4] in (b"easy", b"hard") for number in range(80))
