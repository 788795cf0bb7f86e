"""What InfoBatchSampler leaves out, what the rest weighs, and that the plan of the next epoch is known in time."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from easy_and_hard import CONTENTS, EASY, HARD, EasyAndHard
from hook_daemon import HookDaemon, until
from hypothesis import given
from hypothesis import strategies as st
from mounting import Mounted, eventually, mounted
from reading import source_with
from tiny_training import SIZE, Network, loader, train
from torch import nn
from torch.utils.data import DataLoader
from two_ranks import in_two_ranks

from trainer_hook import InfoBatchSampler, attach

SAMPLES = 20
# The first twelve are below the mean, which is 0.45.
LOSSES = np.where(np.arange(SAMPLES) < 12, 0.1, 1).astype(np.float32)


def epoch_of(sampler: InfoBatchSampler, losses: Any = LOSSES) -> list[int]:
    drawn = list(sampler)
    sampler.trained(np.array(drawn, np.uint32), losses[drawn])
    return drawn


def pruning(**options: Any) -> InfoBatchSampler:
    """A sampler whose next epoch is the second one."""
    sampler = InfoBatchSampler(SAMPLES, **{"epochs": 100, **options})
    for _ in range(options.get("times", 1)):
        assert len(epoch_of(sampler)) == SAMPLES
        assert sampler.weights(range(SAMPLES)).tolist() == [1] * SAMPLES
    return sampler


class TestAnEpoch:
    def test_has_a_random_half_of_the_easy_samples_with_twice_their_weight(self) -> None:
        sampler, seen = pruning(), Counter[int]()
        for _ in range(20):
            drawn = epoch_of(sampler)
            assert len(sampler) == len(drawn) == len(set(drawn)) == 14
            assert {*range(12, SAMPLES)} <= {*drawn}
            assert sampler.weights(drawn).tolist() == [2 if sample < 12 else 1 for sample in drawn]
            assert sampler.weights(drawn, clip=1.5).max() == 1.5
            assert sampler.probabilities().sum() == pytest.approx(1)
            seen.update(drawn)
        assert min(seen.values()) > 1, "others are left out each time"

    @pytest.mark.parametrize(("prune", "times"), [(0.5, 1), (0.3, 1), (0.9, 1), (0.5, 2), (0.0, 1)])
    def test_is_unbiased(self, prune: float, times: int) -> None:
        """The weighted sum of what each sample contributes is in expectation that of all samples."""
        draws, sums = 600, np.zeros(SAMPLES)
        sampler = pruning(prune=prune, times=times, epochs=10_000, seed=3)
        for _ in range(draws * times):
            drawn = np.array(epoch_of(sampler))
            np.add.at(sums, drawn, sampler.weights(drawn).numpy())
        # A sample that is kept with the chance p and then weighs 1/p has the variance 1/p - 1.
        error = np.sqrt((1 / (1 - prune) - 1) / draws)
        assert np.abs(sums / (draws * times) - 1).max() <= 4 * error + 1e-6

    def test_draws_each_kept_sample_equally_often_in_a_cycle(self) -> None:
        sampler = pruning(times=3)
        for _ in range(3):
            drawn, weights = [], set()
            for _ in range(3):
                drawn += epoch_of(sampler)
                weights.add(tuple(sampler.weights(range(SAMPLES)).tolist()))
            assert {*Counter(drawn).values()} == {3}
            assert len(drawn) == 3 * 14
            assert len(weights) == 1

    def test_without_losses_has_all_samples_and_that_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        sampler = InfoBatchSampler(SAMPLES, epochs=100)
        with caplog.at_level(logging.WARNING, "trainer_hook"):
            for _ in range(5):
                assert len(list(sampler)) == SAMPLES
        (record,) = caplog.records
        assert "leaves nothing out without losses: attach a hook, or call trained()" in record.message
        caplog.clear()


@given(st.lists(st.floats(0, 100, width=16), min_size=1, max_size=30), st.floats(0, 0.99))
def test_no_epoch_is_empty(losses: list[float], prune: float) -> None:
    sampler = InfoBatchSampler(len(losses), epochs=100, prune=prune)
    for _ in range(3):
        assert epoch_of(sampler, np.array(losses, np.float16))


def test_the_weights_stay_those_of_the_epoch_that_runs_while_the_next_is_drawn() -> None:
    sampler = pruning()
    drawing = iter(sampler)
    next(drawing)
    assert sampler.settled == 0.25
    before = sampler.weights(range(SAMPLES)).tolist()
    sampler.trained(np.arange(SAMPLES, dtype=np.uint32), LOSSES[::-1])
    ahead = sampler.draw_ahead()
    assert sampler.weights(range(SAMPLES)).tolist() == before
    list(drawing)
    assert list(sampler) == ahead
    assert sampler.weights(range(SAMPLES)).tolist() == before[::-1]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("taken", [0, 5, 14])
def test_resumes_where_it_was(tmp_path: Path, taken: int, times: int) -> None:
    sampler, again = pruning(times=times), InfoBatchSampler(SAMPLES, epochs=100, times=times)
    drawing = iter(sampler)
    begun = [next(drawing) for _ in range(taken)]
    # The losses of the epoch so far count, too.
    sampler.trained(np.array(begun, np.uint32), LOSSES[begun])
    torch.save(sampler.state_dict(), tmp_path / "state")
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for first in (True, False, False):
        expected = list(drawing) if first and taken else epoch_of(sampler)
        if first and not expected:
            continue
        assert list(again) == expected
        assert again.weights(range(SAMPLES)).tolist() == sampler.weights(range(SAMPLES)).tolist()
        again.trained(np.array(expected, np.uint32), LOSSES[expected])


def drawn_by_a_rank(rank: int, mount: str) -> None:
    sampler = InfoBatchSampler(SAMPLES, epochs=100, seed=4)
    mine, weights = [], []
    for epoch in range(5):
        drawing = iter(sampler)
        drawn = [next(drawing)]
        # One rank alone has a plan, and its losses come earlier.
        early = sampler.draw_ahead() if rank == 0 and epoch else None
        assert early is None or len(early) in (7, 10)
        drawn += list(drawing)
        sampler.trained(np.array(drawn, np.uint32), LOSSES[drawn])
        mine.append(drawn)
        weights.append(sampler.weights(range(SAMPLES)).tolist())
    torch.save({"drawn": mine, "weights": weights}, Path(mount, f"rank-{rank}"))


def test_ranks_agree_on_what_is_left_out(tmp_path: Path) -> None:
    in_two_ranks(drawn_by_a_rank, tmp_path)
    one, other = (torch.load(tmp_path / f"rank-{rank}") for rank in range(2))
    assert one["weights"] == other["weights"]
    together = [sorted(first + second) for first, second in zip(one["drawn"], other["drawn"], strict=True)]
    # Ranks share the losses of the first epoch when the second begins, and the third one is drawn by them.
    assert [len(drawn) for drawn in together] == [SAMPLES, SAMPLES, 14, 14, 14]
    for drawn in together[2:]:
        assert len(set(drawn)) == 14
        assert {*range(12, SAMPLES)} <= {*drawn}


def test_the_hook_passes_the_losses_and_the_next_epoch_is_published_early(daemon: HookDaemon) -> None:
    sampler = InfoBatchSampler(SIZE, epochs=100)
    model, batches = Network(), loader(shuffle=False, sampler=sampler)
    hook = attach(daemon.mount, model, batches)
    read: list[list[int]] = []
    for epoch in range(4):
        read.append([])
        for step in train(model, batches):
            read[-1] += hook.indices.tolist()
            assert hook.weights().tolist() == sampler.weights(hook.indices).tolist()
            if not epoch and step == 3:
                # The second epoch is drawn by the losses that the sending thread has passed on by then.
                until(lambda: not sampler.state_dict()["losses"].isnan().all())
            if epoch and step == 3:
                until(lambda epoch=epoch: any(plan.epoch == epoch + 1 for _, plan in daemon.sink.plans))  # type: ignore[misc]
        hook.epoch_end(None)
    hook.close()
    assert [len(epoch) < SIZE for epoch in read] == [False, True, True, True]
    early = {plan.epoch: plan.order.tolist() for _, plan in daemon.sink.plans if not plan.begun}
    assert {2, 3} <= early.keys()
    assert all(early[epoch] == read[epoch] for epoch in (2, 3))


# -- on a mount

source = source_with(CONTENTS)


def plans(mount: Mounted) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = mount.stats()["plans"]
    return found


def test_on_a_mount_the_easy_half_is_read_less_and_the_next_epoch_is_foreseen(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path, capacity="24KiB", policy="minio") as mount:
        sampler = InfoBatchSampler(EASY + HARD, epochs=100)
        batches: DataLoader[Any] = DataLoader(EasyAndHard(mount.point), batch_size=8, sampler=sampler)
        model = nn.Linear(4, 2)
        # At first, all samples have the same loss.
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        hook = attach(mount.point, model, batches)
        lengths = []
        for epoch in range(7):
            drawn = []
            for step in train(model, batches):
                drawn += hook.indices.tolist()
                if epoch and step == 5:
                    eventually(
                        lambda epoch=epoch: (epoch, 1) in {(row["epoch"], row["epochs_ahead"]) for row in plans(mount)},  # type: ignore[misc]
                        what="the plan of the next epoch",
                    )
            hook.epoch_end(None)
            lengths.append(len(drawn))
            # The first epochs go by losses of steps at which the model knew nothing yet.
            if epoch > 4:
                assert {*range(EASY, EASY + HARD)} <= {*drawn}
        assert lengths[0] == EASY + HARD
        assert lengths[5:] == [HARD + EASY // 2] * 2
        hook.close()
