"""The callbacks, driven as Lightning and Hugging Face's Trainer drive theirs; neither package is needed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hook_daemon import HookDaemon
from tiny_training import SIZE, Network, loader, recorded, train

from trainer_hook import hugging_face_callback, lightning_callback


class Callback:
    """As both packages': a base class whose events do nothing."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[HookDaemon]:
    with HookDaemon(tmp_path) as daemon:
        yield daemon


def test_lightning(daemon: HookDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("pytorch_lightning")
    package.Callback = Callback  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", package)
    callback = lightning_callback(daemon.mount, accuracy="top1", embed_dim=32)
    assert Callback in type(callback).__mro__
    model, batches = Network(), loader()
    trainer = SimpleNamespace(model=model, train_dataloader=batches, callback_metrics={})
    callback.on_train_start(trainer, model)
    for accuracy in (None, torch.tensor(0.25)):
        for _ in train(model, batches):
            pass
        trainer.callback_metrics = {} if accuracy is None else {"top1": accuracy}
        callback.on_train_epoch_end(trainer, model)
    callback.on_train_end(trainer, model)
    callback.on_exception(trainer, model, KeyboardInterrupt())
    assert sorted(recorded(daemon, 14)) == sorted([*range(SIZE)] * 2)
    assert [end.accuracy for _, end in daemon.sink.ends] == [None, 0.25]
    assert daemon.sink.lists[0][0].hello.client == "lightning"


def test_hugging_face(daemon: HookDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("transformers")
    package.TrainerCallback = Callback  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", package)
    callback = hugging_face_callback(daemon.mount)
    model, batches = Network().train(), loader()
    arguments = SimpleNamespace(gradient_accumulation_steps=3)
    callback.on_train_begin(arguments, None, None, model=model, train_dataloader=batches)
    for _ in range(2):
        waiting = iter(batches)
        # The Trainer takes the batches of an optimizer step together.
        while group := list(itertools.islice(waiting, 3)):
            for inputs, _ in group:
                model(inputs)
        callback.on_epoch_end(arguments, None, None)
        callback.on_evaluate(arguments, None, None, metrics={"eval_accuracy": 0.5})
    callback.on_train_end(arguments, None, None)
    assert sorted(recorded(daemon, 14)) == sorted([*range(SIZE)] * 2)
    assert [end.accuracy for _, end in daemon.sink.ends] == [None, 0.5]


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="none of these packages is installed: transformers"):
        hugging_face_callback(tmp_path)
