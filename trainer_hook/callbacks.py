"""The hook for trainers that own the loop: Lightning, and Hugging Face's Trainer. Neither package is required."""

from __future__ import annotations

import importlib
import os
from typing import Any

from trainer_hook.hook import Hook, attach


class _Attachment:
    """The hook of one run, and what it was attached with."""

    def __init__(self, directory: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self._directory = directory
        self._options = options
        self.hook: Hook | None = None

    def begin(self, model: Any, loader: Any, **options: Any) -> None:
        self.hook = attach(self._directory, model, loader, **options | self._options)

    def epoch_end(self, accuracy: float | None) -> None:
        if self.hook is not None:
            self.hook.epoch_end(accuracy)

    def end(self) -> None:
        if self.hook is not None:
            self.hook.close()
        self.hook = None


def lightning_callback(directory: str | os.PathLike[str], *, accuracy: str = "val_acc", **options: Any) -> Any:
    """A callback for Lightning's Trainer; `accuracy` names the logged metric, `options` are those of `attach`."""
    base = _base_class(("lightning.pytorch", "pytorch_lightning"), "Callback")

    class SpiderfsCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.attachment = _Attachment(directory, options)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.attachment.begin(trainer.model, trainer.train_dataloader, client_name="lightning")

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            value = trainer.callback_metrics.get(accuracy)
            self.attachment.epoch_end(None if value is None else float(value))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.attachment.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.attachment.end()

    return SpiderfsCallback()


def hugging_face_callback(directory: str | os.PathLike[str], *, accuracy: str = "eval_accuracy", **options: Any) -> Any:
    """A callback for Hugging Face's Trainer; `accuracy` names the metric of the evaluation.

    The Trainer evaluates after it has said that an epoch is over, so an epoch's end carries the accuracy of the last
    evaluation before it.
    """
    base = _base_class(("transformers",), "TrainerCallback")

    class SpiderfsCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.attachment = _Attachment(directory, options)
            self.accuracy: float | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            # The Trainer takes all batches of one optimizer step before the first of their forwards.
            lookahead = args.gradient_accumulation_steps - 1
            self.attachment.begin(
                given["model"], given["train_dataloader"], lookahead=lookahead, client_name="transformers"
            )

        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.accuracy = given.get("metrics", {}).get(accuracy)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.attachment.epoch_end(self.accuracy)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.attachment.end()

    return SpiderfsCallback()


def _base_class(packages: tuple[str, ...], name: str) -> Any:
    for package in packages:
        try:
            return getattr(importlib.import_module(package), name)
        except ImportError:
            continue
    raise ImportError(f"none of these packages is installed: {', '.join(packages)}")
