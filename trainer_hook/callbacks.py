"""The hook for trainers that own the loop: Lightning, and Hugging Face's Trainer. Neither package is required."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from torch.utils.data import DataLoader

from trainer_hook.hook import Hook, attach


class _Attachment:
    """The hook of one run, and what it was attached with."""

    def __init__(self, directory: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self._directory = directory
        self._options = options
        self.hook: Hook | None = None

    def begin(self, model: Any, loader: Any, **options: Any) -> None:
        # A run that failed need not have ended; and Lightning may make its loader anew every some epochs.
        self.end()
        self.hook = attach(self._directory, model, loader, **options | self._options)

    def has(self, batch: Any) -> None:
        if self.hook is not None:
            self.hook.has(batch)

    def epoch_end(self, accuracy: Any) -> None:
        if self.hook is not None:
            self.hook.epoch_end(accuracy)

    def end(self) -> None:
        if self.hook is not None:
            self.hook.close()
        self.hook = None


def lightning_callback(directory: str | os.PathLike[str], *, accuracy: str = "val_acc", **options: Any) -> Any:
    """A callback for Lightning's Trainer; `accuracy` names the logged metric, `options` are those of `attach`.

    The training has to have one loader. Its `attachment.hook` is the `Hook` of the run, for `weights` and `losses`.
    """
    base = _base_class(("lightning.pytorch", "pytorch_lightning"), "Callback")

    class SpiderfsCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.attachment = _Attachment(directory, options)

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage != "fit":
                return
            # The Trainer begins to iterate over its loader before it says that training starts, and may have made that
            # loader from the user's. This is the last that it does to it.
            process = trainer.strategy.process_dataloader

            def processed(loader: Any) -> Any:
                loader = process(loader)
                if trainer.training:
                    # Of a loader without a length it takes a batch ahead to know which is the last.
                    lookahead = 0 if _has_length(loader) else 1
                    self.attachment.begin(pl_module, loader, lookahead=lookahead, client_name="lightning")
                return loader

            trainer.strategy.process_dataloader = processed

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if not isinstance(trainer.train_dataloader, DataLoader):
                raise ValueError("the callback follows one DataLoader: attach to one of several by trainer_hook.attach")

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.attachment.has(batch)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            value = trainer.callback_metrics.get(accuracy)
            self.attachment.epoch_end(value)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._end(trainer)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self._end(trainer)

        def _end(self, trainer: Any) -> None:
            # The strategy's own again.
            vars(trainer.strategy).pop("process_dataloader", None)
            self.attachment.end()

    return SpiderfsCallback()


def hugging_face_callback(directory: str | os.PathLike[str], *, accuracy: str = "eval_accuracy", **options: Any) -> Any:
    """A callback for Hugging Face's Trainer; `accuracy` names the metric of the evaluation.

    The Trainer evaluates after it has said that an epoch is over, so an epoch's end carries the accuracy of the last
    evaluation before it. A training that goes on in the middle of an epoch ends that epoch with another loader, of
    which nothing is known: it is neither planned nor recorded. `attachment.hook` is the `Hook` of the run.
    """
    base = _base_class(("transformers",), "TrainerCallback")

    class SpiderfsCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.attachment = _Attachment(directory, options)
            self.accuracy: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.attachment.begin(given["model"], given["train_dataloader"], client_name="transformers")

        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.accuracy = (given.get("metrics") or {}).get(accuracy)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.attachment.epoch_end(self.accuracy)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.attachment.end()

    return SpiderfsCallback()


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


def _base_class(packages: tuple[str, ...], name: str) -> Any:
    """From the package that the training uses, if it has been imported; two of them may be installed."""
    for package in sorted(packages, key=lambda package: package not in sys.modules):
        try:
            return getattr(importlib.import_module(package), name)
        except ImportError:
            continue
    raise ImportError(f"none of these packages is installed: {', '.join(packages)}")
