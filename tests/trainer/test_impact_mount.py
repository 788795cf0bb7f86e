"""Trainings on mounts with `policy=impact`: which reads get a substitute, and what survives a remount."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from known_losses import Training
from mounting import Mounted, eventually, mounted, run_spiderfs
from reading import read_afresh, source_with
from tiny_training import train, train_epoch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainer_hook import ImpactSampler, attach

CLASSES, EACH = 3, 30
SAMPLES = CLASSES * EACH
NAMES = [f"train/{label}/{number:03d}" for number in range(EACH) for label in range(CLASSES)]
LABELS = np.arange(SAMPLES, dtype=np.int32) % CLASSES
# The first half of the samples is learned soon, the other never.
LOSSES = np.where(np.arange(SAMPLES) < SAMPLES // 2, 0.1, 2.0) + np.arange(SAMPLES) / 1000
BATCH = 15


def training_on(mount: Mounted) -> Training:
    return Training(mount.point, NAMES, LABELS, LOSSES, BATCH)


source = source_with({name: b"%08d" % number + bytes(900 + number) for number, name in enumerate(NAMES)})


OPTIONS: dict[str, object] = {"capacity": "48KiB", "policy": "impact"}


def test_low_samples_substitute_within_their_class_and_for_trainers_only(source: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with mounted(source, tmp_path, trace=trace, **OPTIONS) as mount:
        assert "\npackages=off " in mount.control("config").read_text(), "by default"
        training = training_on(mount)
        training.until_redirected(mount, 50)
        lent = [(wanted, given) for wanted, given in training.given if wanted != given]
        assert len(lent) >= 5
        for wanted, given in lent:
            assert LABELS[wanted] == LABELS[given]
            assert max(wanted, given) < SAMPLES // 2, "samples of a high loss are read themselves"
        assert mount.metric("redirects") == sum(training.given[pair] for pair in lent)
        training.close()
        # This process was the trainer; after it has disconnected it gets each file itself.
        for number, name in enumerate(NAMES):
            truth = b"%08d" % number + bytes(900 + number)
            eventually(lambda name=name, truth=truth: (mount.point / name).read_bytes() == truth, what=name)  # type: ignore[misc]
    done = run_spiderfs(
        "simulate", trace, "--policy", "impact,shade", "--capacity", "48KiB", "--json", tmp_path / "json"
    )
    assert done.returncode == 0, done.stderr
    found = {row["policy"]: row for row in json.loads((tmp_path / "json").read_text())["results"]}
    assert found["impact"]["redirects"] > 50
    assert found["shade"]["redirects"] == 0


class Files(Dataset[tuple[Tensor, int]]):
    """Pictures whose classes are learned at once, except that nothing can be learned from every fourth sample."""

    def __init__(self, root: Path) -> None:
        self.samples = [(root / name, int(label)) for name, label in zip(NAMES, LABELS, strict=True)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        number = int(read_afresh(path)[:8])
        inputs = torch.zeros(CLASSES)
        if number % 4:
            inputs[LABELS[number]] = 9
        return inputs, label


@pytest.mark.parametrize("plan", [False, True])
def test_a_model_trains_on_the_harder_half(source: Path, tmp_path: Path, plan: bool) -> None:
    with mounted(source, tmp_path, plan="on" if plan else "off", **OPTIONS) as mount:
        sampler = ImpactSampler(SAMPLES, warm_up=3)
        batches: DataLoader[Any] = DataLoader(Files(mount.point), batch_size=10, sampler=sampler)
        torch.manual_seed(1)
        model = nn.Linear(CLASSES, CLASSES)
        hook = attach(mount.point, model, batches, plan=plan)
        lengths, drawn = [], Counter[int]()
        for epoch in range(7):
            lengths.append(0)
            for _ in train(model, batches):
                lengths[-1] += len(hook.indices)
                if epoch > 3:
                    drawn.update(hook.indices.tolist())
            hook.epoch_end(0.5)
        # Without scores, two epochs of warm-up, and halves.
        assert lengths == [90, 90, 90, 45, 45, 45, 45]
        assert sampler.evaluated > 0
        hard = sum(count for index, count in drawn.items() if index % 4 == 0)
        assert hard / drawn.total() > 0.3, "a quarter of the samples"
        if plan:
            # The evaluations between epochs were not in any plan.
            assert all(plan["trusted"] for plan in mount.stats()["plans"])
            assert mount.metric("planned_opens") > 200
        assert hook.counts["errors"] == hook.counts["unmatched"] == 0
        hook.close()


def test_evaluated_samples_are_pinned_until_the_trainer_disconnects(source: Path, tmp_path: Path) -> None:
    # Reads are slow, so that the manager hears of a file before four others push it out of so small a landing.
    with mounted(source, tmp_path, plan="off", **OPTIONS, **{"source.latency_ms": 10}) as mount:

        def held() -> int:
            entries: int = mount.stats()["sections"]["pinned"]["entries"]
            return entries

        sampler = ImpactSampler(SAMPLES, warm_up=2)
        batches: DataLoader[Any] = DataLoader(Files(mount.point), batch_size=10, sampler=sampler)
        torch.manual_seed(1)
        model = nn.Linear(CLASSES, CLASSES)
        hook = attach(mount.point, model, batches, plan=False)
        evaluate, misses = sampler._evaluate, list[float]()
        assert evaluate is not None

        def counted(indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float32] | None:
            before = mount.metric("opens") - mount.metric("opens_hit")
            losses = evaluate(indices)
            misses.append(mount.metric("opens") - mount.metric("opens_hit") - before)
            return losses

        sampler.offer(counted)
        for _ in range(6):
            train_epoch(model, batches)
            hook.epoch_end(0.5)
        assert len(misses) == 4
        count = len(sampler.warm_up.unstable)
        assert count >= 8
        # The kernel's page cache has opens all the same.
        assert misses[1:] == [0, 0, 0]
        assert held() == count
        used = mount.stats()["sections"]["pinned"]["bytes"]
        assert used <= 48 * 1024 // 4
        hook.close()
        eventually(lambda: held() == 0, what="the end of the pins")
