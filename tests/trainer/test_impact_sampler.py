"""What ImpactSampler selects, when its warm-up ends, and what an evaluation between epochs leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hook_daemon import HookDaemon, until
from tiny_training import SIZE, Network, Numbered, loader, train_epoch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from two_ranks import in_two_ranks

from benchmarks.fakes import RecordingSink
from trainer_hook import HookClient, ImpactSampler, attach
from trainer_hook.samplers.impact import ImpactWarmUp

LOSSES = np.linspace(0.1, 2, 100).astype(np.float32)


class Daemon:
    """A client whose requests are always answered; every other sample is cached."""

    def __init__(self, losses: npt.NDArray[np.float32]) -> None:
        self.losses = losses
        self.pinned: list[list[int]] = []
        self.warm_ups: list[bool] = []

    def scores(self, name: str, timeout_s: float) -> npt.NDArray[np.float32]:
        return self.losses

    def cached(self, name: str, timeout_s: float) -> npt.NDArray[np.bool_]:
        return np.arange(len(self.losses)) % 2 == 0

    def warm_up(self, name: str, active: bool) -> None:
        self.warm_ups.append(active)

    def pin(self, name: str, indices: npt.NDArray[np.int64], timeout_s: float) -> int:
        self.pinned.append(indices.tolist())
        return len(indices)


def bound(sampler: ImpactSampler, losses: npt.NDArray[np.float32] = LOSSES) -> Daemon:
    daemon = Daemon(losses)
    sampler.bind(cast(HookClient, daemon), "train")
    return daemon


class TestSubset:
    def test_is_half_of_the_samples_none_twice_and_the_harder_the_likelier(self) -> None:
        sampler = ImpactSampler(100, hybrid=False)
        bound(sampler)
        assert len(sampler) == 100
        counts = np.zeros(100)
        for _ in range(300):
            drawn = list(sampler)
            assert len(drawn) == len(set(drawn)) == 50
            counts[drawn] += 1
        assert len(sampler) == 50
        np.testing.assert_allclose(counts / 300, (np.arange(100) + 0.5) / 100, atol=0.15)
        assert np.corrcoef(counts, np.arange(100))[0, 1] > 0.98

    def test_goes_by_the_part_of_the_loss_that_a_model_can_learn(self) -> None:
        noise = np.where(np.arange(100) >= 90, LOSSES - 0.1, 0.05)
        sampler = ImpactSampler(100, hybrid=False, irreducible=noise)
        bound(sampler)
        drawn = [one for _ in range(100) for one in sampler]
        assert np.bincount(drawn, minlength=100)[90:].mean() < 25
        assert np.bincount(drawn, minlength=100)[80:90].mean() > 80

    def test_is_all_samples_while_there_are_no_scores(self) -> None:
        assert sorted(ImpactSampler(10)) == [*range(10)]

    def test_the_next_epoch_is_not_known_before_it_begins(self) -> None:
        sampler = ImpactSampler(100, hybrid=False)
        bound(sampler)
        list(sampler)
        assert sampler.draw_ahead() is None

    def test_refuses_losses_that_cannot_be(self) -> None:
        for losses in (np.zeros(9), np.full(10, np.nan)):
            with pytest.raises(ValueError, match="one finite loss for each of the 10"):
                ImpactSampler(10, irreducible=losses)


class TestWarmUp:
    def test_finds_the_samples_whose_rank_varies_and_ends_when_they_stay_the_same(self) -> None:
        rng = np.random.default_rng(1)
        warm_up = ImpactWarmUp(100, 30)
        for _ in range(20):
            losses = LOSSES.copy()
            losses[40:45] = rng.uniform(0, 3, 5)
            warm_up.observe(losses, 5)
            if warm_up.over:
                break
        assert 3 <= warm_up.epochs < 20
        assert len(set(warm_up.unstable.tolist()) & {40, 41, 42, 43, 44}) >= 4

    def test_ends_at_its_limit(self) -> None:
        rng = np.random.default_rng(1)
        warm_up = ImpactWarmUp(100, 4)
        for _ in range(4):
            assert not warm_up.over
            warm_up.observe(rng.random(100).astype(np.float32), 10)
        assert warm_up.over
        assert len(warm_up.unstable) == 10

    def test_trains_on_all_samples_before_and_evaluates_some_again_after(self) -> None:
        sampler = ImpactSampler(100, warm_up=4)
        daemon = bound(sampler)
        asked: list[list[int]] = []

        def evaluate(indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
            asked.append(indices.tolist())
            assert daemon.pinned == asked, "the daemon knows before they are read"
            return np.full(len(indices), 9, np.float32)

        sampler.offer(evaluate)
        rng = np.random.default_rng(2)
        lengths = []
        for _ in range(6):
            daemon.losses = rng.permutation(LOSSES)
            lengths.append(len(list(sampler)))
        assert lengths == [100, 100, 100, 50, 50, 50]
        # A quarter of what is cached, which is half of all.
        assert [len(indices) for indices in asked] == [12] * 3
        assert sampler.evaluated == 36
        # They were found to be the hardest.
        assert sampler.probabilities()[asked[-1]].min() > np.sort(sampler.probabilities())[-13]

    def test_resumes_where_it_was(self) -> None:
        sampler, again = ImpactSampler(100, warm_up=3, seed=1), ImpactSampler(100, warm_up=3, seed=1)
        daemon = bound(sampler)
        rng = np.random.default_rng(2)
        for _ in range(2):
            daemon.losses = rng.permutation(LOSSES)
            list(sampler)
        again.load_state_dict(sampler.state_dict() | {"consumed": 100})
        bound(again, daemon.losses)
        assert list(again) == list(sampler)
        assert len(again) == 50
        assert again.warm_up.unstable.tolist() == sampler.warm_up.unstable.tolist()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[HookDaemon]:
    with HookDaemon(tmp_path, RecordingSink(scores_given=np.linspace(0.1, 2, SIZE).astype(np.float32))) as daemon:
        yield daemon


def test_the_hook_evaluates_with_the_current_model_and_changes_nothing(daemon: HookDaemon) -> None:
    sampler = ImpactSampler(SIZE, warm_up=2)
    model, batches = Network(), loader(shuffle=False, sampler=sampler)
    model.body = nn.Dropout(0.5)
    model.train()
    model.body.eval()
    hook = attach(daemon.mount, model, batches)
    for epoch in range(3):
        train_epoch(model, batches)
        hook.epoch_end(epoch / 10)
    hook.close()
    # Two epochs on all samples, then two halves; before each half S, a quarter of the 25 cached.
    assert sampler.evaluated == 12
    assert model.training
    assert [len(plan.order) for _, plan in daemon.sink.plans if plan.begun] == [50, 25, 25]
    assert [indices for _, indices in daemon.sink.pins] == [sampler.warm_up.unstable.tolist()] * 2
    evaluated = [batch for _, batch in daemon.sink.batches if len(batch.indices) == 6]
    assert len(evaluated) >= 2
    with torch.no_grad():
        index = int(evaluated[-1].indices[0])
        inputs, label = Numbered()[index]
        loss = nn.functional.cross_entropy(model.classifier(inputs[None]), torch.tensor([label]))
    assert evaluated[-1].losses is not None
    # The model has learned for four batches since.
    assert float(evaluated[-1].losses[0]) == pytest.approx(float(loss), rel=0.2)


class Words(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.samples = [(f"{index}.txt", 0) for index in range(SIZE)]

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"words": torch.zeros(8)}


def test_a_failed_evaluation_is_logged_once_and_the_training_goes_on(
    daemon: HookDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = ImpactSampler(SIZE, warm_up=2)
    batches = DataLoader(Words(), batch_size=10, sampler=sampler)
    hook = attach(daemon.mount, Network(), batches)
    assert [len(list(batches)) for _ in range(4)] == [5, 3, 3, 3]
    hook.close()
    assert caplog.text.count("cannot be evaluated between epochs") == 1


def _rank(rank: int, mount: str) -> None:
    sampler = ImpactSampler(SIZE, warm_up=2)
    batches: DataLoader[Any] = DataLoader(Numbered(), batch_size=8, sampler=sampler)
    model = Network()
    hook = attach(mount, model, batches)
    for epoch in range(2):
        train_epoch(model, batches)
        hook.epoch_end(epoch / 10)
    Path(mount, f"evaluated-{rank}").write_text(str(sampler.evaluated))
    hook.close(10)


def test_ranks_share_one_subset_and_each_evaluates_its_part(daemon: HookDaemon) -> None:
    in_two_ranks(_rank, daemon.mount)
    until(lambda: len(daemon.sink.plans) == 4)
    subset = {trainer.rank: plan.order.tolist() for trainer, plan in daemon.sink.plans if plan.epoch == 1}
    # So that both ranks draw equally many, the first draw is made once more.
    assert len(subset[0]) == len(subset[1]) == 13
    assert set(subset[0]) & set(subset[1]) == {subset[0][0]}
    # A quarter of the 25 cached samples is S: six samples, each evaluated and pinned once.
    pins = {trainer.rank: indices for trainer, indices in daemon.sink.pins}
    assert len(daemon.sink.pins) == 2
    assert (len(pins[0]), len(pins[1]), len({*pins[0], *pins[1]})) == (3, 3, 6)
    assert [int(Path(daemon.mount, f"evaluated-{rank}").read_text()) for rank in (0, 1)] == [3, 3]
    told = {rank: [active for trainer, active in daemon.sink.warm_ups if trainer.rank == rank] for rank in (0, 1)}
    assert told == {0: [True, False], 1: [True, False]}
