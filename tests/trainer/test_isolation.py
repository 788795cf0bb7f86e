"""Whatever fails in the hook, the training goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hook_daemon import HookDaemon, until
from tiny_training import CLASSES, SIZE, WIDTH, Network, Numbered, features, loader, recorded, train, train_epoch
from torch import Tensor, nn

from trainer_hook import attach
from trainer_hook.connection.client import HookClient
from trainer_hook.loader.planner import Planner
from trainer_hook.model.capture import Capture

SAID = "spiderfs: the hook has failed: the training continues without it; please report the error below"
BATCHES = 7  # of 50 samples in eights


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (Capture, "shown"),
        (HookClient, "batch"),
        (HookClient, "epoch_end"),
        (HookClient, "plan"),
        (HookClient, "set_progress"),
        (Planner, "taken"),
        (Planner, "left"),
        (Planner, "_foresee"),
    ],
)
def test_a_failure_of_the_hook_ends_the_hook_and_not_the_training(
    daemon: HookDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type, method: str
) -> None:
    expected = [labels.tolist() for _ in range(2) for _, labels in loader()]
    model, batches = Network(), loader()
    plain = type(batches)
    hook = attach(daemon.mount, model, batches)

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError(method)

    monkeypatch.setattr(kind, method, fail)
    seen = []
    for epoch in range(2):
        for step in train(model, (seen.append(labels.tolist()) or (inputs, labels) for inputs, labels in batches)):
            if epoch and step == 3:
                break
        hook.epoch_end(0.5)
    assert hook.weights() is not None
    hook.losses(torch.ones(8))
    hook.close()
    assert seen[:BATCHES] == expected[:BATCHES]
    assert type(batches) is plain
    assert not model.classifier._forward_hooks
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in said] == [SAID]
    assert method in str(said[0].exc_info)


# -- cases that once failed


def test_a_data_set_longer_than_its_samples(daemon: HookDaemon, caplog: pytest.LogCaptureFixture) -> None:
    class Longer(Numbered):
        def __len__(self) -> int:
            return SIZE + 8

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return features(index), index % CLASSES

    model, batches = Network(), loader(Longer(), shuffle=False)
    hook = attach(daemon.mount, model, batches)
    for _ in range(2):
        train_epoch(model, batches)
    hook.close()
    assert sorted(recorded(daemon, 2 * 6)) == sorted([*range(48)] * 2)
    assert caplog.text.count("the loader reads samples that the list does not have") == 1
    assert not daemon.counted["hook_malformed"]


@pytest.mark.parametrize("given", [tuple, dict])
def test_a_classifier_whose_input_is_no_tensor(daemon: HookDaemon, given: type) -> None:
    class Head(nn.Linear):
        def forward(self, inputs: Any) -> Tensor:
            return super().forward(inputs[0])

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = Head(WIDTH, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head((inputs,) if given is tuple else {0: inputs})  # type: ignore[no-any-return]

    model, batches = Packed(), loader()
    hook = attach(daemon.mount, model, batches)
    train_epoch(model, batches)
    hook.close()
    assert not daemon.sink.batches


@pytest.mark.parametrize("accuracy", [87.5, -1, float("nan"), "much", torch.ones(2)])
def test_an_accuracy_in_percent_is_left_out(
    daemon: HookDaemon, caplog: pytest.LogCaptureFixture, accuracy: Any
) -> None:
    hook = attach(daemon.mount, Network(), loader())
    for _ in range(2):
        hook.epoch_end(accuracy)
    hook.close()
    until(lambda: len(daemon.sink.ends) == 2)
    assert [end.accuracy for _, end in daemon.sink.ends] == [None, None]
    assert caplog.text.count("give a share between 0 and 1") == 1
