"""Callbacks that attach a hook where a library runs the training loop: Lightning, and Hugging Face's Trainer.

Neither package is required.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from torch.utils.data import DataLoader

from trainer_hook.attaching import attach
from trainer_hook.hook import Hook


class _Attachment:
    """The hook of one run, and the options with which it is attached."""

    def __init__(self, directory: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self._directory = directory
        self._options = options
        self._job: str | None = None
        self.hook: Hook | None = None

    def new_run(self) -> None:
        """A run begins: it is a job of its own. An earlier run may have failed without an end."""
        self.end()
        self._job = None

    def begin(self, model: Any, loader: Any, **options: Any) -> None:
        """Attach a hook; Lightning may make a new loader every few epochs, and the run stays one job."""
        self.end()
        self.hook = attach(self._directory, model, loader, **options | {"job": self._job} | self._options)
        self._job = self.hook.job

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

    The training must have exactly one loader. The callback's `attachment.hook` is the `Hook` of the run, for `weights`
    and `losses`.
    """
    base = _base_class(("lightning.pytorch", "pytorch_lightning"), "Callback")

    class SpiderfsCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.attachment = _Attachment(directory, options)

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage != "fit":
                return
            self.attachment.new_run()
            # The Trainer begins to iterate over its loader before it calls `on_train_start`, and it may have made that
            # loader from the user's. `process_dataloader` is the last step in which it changes the loader.
            process = trainer.strategy.process_dataloader

            def processed(loader: Any) -> Any:
                loader = process(loader)
                if trainer.training:
                    # If a loader has no length, the Trainer takes one batch ahead to know which one is the last.
                    lookahead = 0 if _has_length(loader) else 1
                    # -1 stands for a training without an end.
                    epochs = trainer.max_epochs if (trainer.max_epochs or 0) > 0 else None
                    options = {"lookahead": lookahead, "epoch": _epoch_that_begins(trainer), "epochs": epochs}
                    self.attachment.begin(pl_module, loader, client_name="lightning", **options)
                return loader

            trainer.strategy.process_dataloader = processed

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if not isinstance(trainer.train_dataloader, DataLoader):
                raise ValueError(
                    "the callback needs a training with one DataLoader: if there are several, use trainer_hook.attach"
                )

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
            # Remove our function, so that the strategy has its own method again.
            vars(trainer.strategy).pop("process_dataloader", None)
            self.attachment.end()

    return SpiderfsCallback()


def hugging_face_callback(directory: str | os.PathLike[str], *, accuracy: str = "eval_accuracy", **options: Any) -> Any:
    """A callback for Hugging Face's Trainer; `accuracy` names the metric of the evaluation.

    The Trainer evaluates after it has called `on_epoch_end`, so the hook gets the accuracy of the last evaluation
    before that. A training that resumes in the middle of an epoch reads the rest of that epoch through another loader,
    which the hook does not follow: the mount gets no plan and no batches of it. The callback's `attachment.hook` is the
    `Hook` of the run.
    """
    base = _base_class(("transformers",), "TrainerCallback")

    class SpiderfsCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.attachment = _Attachment(directory, options)
            self.accuracy: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.attachment.new_run()
            self.attachment.begin(
                given["model"],
                given["train_dataloader"],
                client_name="transformers",
                # The state has a fraction of an epoch where the training resumes within one.
                epoch=int(state.epoch or 0),
                # Where the loader has no length, the Trainer has sys.maxsize epochs, and ends after so many steps.
                epochs=state.num_train_epochs if 0 < state.num_train_epochs < sys.maxsize else None,
            )

        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.accuracy = (given.get("metrics") or {}).get(accuracy)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.attachment.epoch_end(self.accuracy)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.attachment.end()

    return SpiderfsCallback()


def _epoch_that_begins(trainer: Any) -> int:
    """The number of the epoch for which Lightning's Trainer makes a loader.

    A Trainer that resumes makes its loader first, and after that it counts an epoch that its checkpoint has seen nearly
    to the end. So `trainer.current_epoch` is one too low then.
    """
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
    # The checkpoint was written when the last batch ended, but for the last of all that happens at a batch's end.
    has_ended = batches.is_last_batch and batches.current.completed < batches.current.processed
    return int(epochs.processed + (epochs.processed < epochs.started and has_ended))


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


def _base_class(packages: tuple[str, ...], name: str) -> Any:
    """The class of this name in the first package that is installed; packages that are imported already come first."""
    for package in sorted(packages, key=lambda package: package not in sys.modules):
        try:
            return getattr(importlib.import_module(package), name)
        except ImportError:
            continue
    raise ImportError(f"none of these packages is installed: {', '.join(packages)}")
