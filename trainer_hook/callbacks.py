"""Callbacks that attach a hook where a library runs the training loop: Lightning, and Hugging Face's Trainer.

Neither package is required.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer_hook.hook import Hook, HookOptions, attach

log = logging.getLogger("trainer_hook")


class _Attachment:
    """The hook of one run, and the arguments and options with which it is attached."""

    def __init__(
        self, directory: str | os.PathLike[str], options: HookOptions | None, arguments: dict[str, Any]
    ) -> None:
        self._directory = directory
        self._options = options or HookOptions()
        self._arguments = arguments
        self._job: str | None = None
        self._state: dict[str, Any] = {}
        self.hook: Hook | None = None

    def new_run(self) -> None:
        # An earlier run may have failed without an end.
        self.end()
        self._job, self._state = None, {}

    def begin(self, model: Any, loader: Any, epoch: int, **known: Any) -> None:
        """Attach a hook; Lightning may make a new loader every few epochs, and the run stays one job.

        What is `known` of the run fills in the options that the user has not given.
        """
        self.end()
        options = replace(
            self._options, **{name: value for name, value in known.items() if getattr(self._options, name) is None}
        )
        arguments = {"job": self._job, "epoch": epoch} | self._arguments
        self.hook = attach(self._directory, model, loader, options=options, **arguments)
        self._job = self.hook.job
        state, self._state = self._state, {}
        self.go_on(state)

    def go_on(self, state: dict[str, Any]) -> None:
        """The run goes on where the state was saved; the hook may be attached later."""
        if self.hook is None:
            self._state = state
        elif state:
            try:
                self.hook.load_state_dict(state)
            except ValueError as exc:
                log.warning("the epoch begins again, and does not go on where the checkpoint was written: %s", exc)

    def state(self, done: bool) -> dict[str, Any]:
        try:
            return self._state if self.hook is None else self.hook.state_dict(done)
        except RuntimeError as exc:
            log.warning("a run that resumes from this checkpoint begins its epoch again: %s", exc)
            return {}

    def failed(self, done: bool) -> None:
        """The run ends with an exception, after which a checkpoint may still be written."""
        state = self.state(done)
        self.end()
        self._state = state

    def copied(self, batch: Any) -> None:
        if self.hook is not None:
            self.hook.copied(batch)

    def epoch_end(self, accuracy: Any) -> None:
        if self.hook is not None:
            self.hook.epoch_end(accuracy)

    def end(self) -> None:
        if self.hook is not None:
            self.hook.close()
        self.hook = None


def lightning_callback(
    directory: str | os.PathLike[str],
    *,
    accuracy: str = "val_acc",
    options: HookOptions | None = None,
    **arguments: Any,
) -> Any:
    """A callback for Lightning's Trainer; `accuracy` names the logged metric; `attach` gets the other arguments.

    The training must have exactly one loader. The callback's `attachment.hook` is the `Hook` of the run, for `weights`
    and `losses`.
    """
    base = _base_class(("lightning.pytorch", "pytorch_lightning"), "Callback")

    class SpiderfsCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.attachment = _Attachment(directory, options, arguments)
            self._trainer: Callable[[], Any] = lambda: None

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage != "fit":
                return
            self.attachment.new_run()
            self._trainer = weakref.ref(trainer)
            _attach_to_what_is_processed(self.attachment, trainer, pl_module)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if not isinstance(trainer.train_dataloader, DataLoader):
                raise ValueError(
                    "the callback needs a training with one DataLoader: if there are several, use trainer_hook.attach"
                )
            hook = self.attachment.hook
            if hook is not None and hook.batches_left is not None:
                # A checkpoint of other ranks had others: have the Trainer count those that are behind this rank.
                counted = trainer.fit_loop.epoch_loop.batch_progress.current
                more = len(trainer.train_dataloader) - hook.batches_left - counted.processed
                for name in ("ready", "started", "processed", "completed"):
                    setattr(counted, name, getattr(counted, name) + more)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            _follow_length(trainer)
            self.attachment.copied(batch)

        def state_dict(self) -> dict[str, Any]:
            self._end_batches()
            return self.attachment.state(self._is_done())

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.attachment.go_on(state)

        def _end_batches(self) -> None:
            """The epoch is over if the Trainer takes no more batches of it, as after `limit_train_batches` of them."""
            trainer, hook = self._trainer(), self.attachment.hook
            if trainer and hook and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and self._is_done():
                hook.end_of_batches()

        def _is_done(self) -> bool:
            """Whether the training has done a step with each batch that it has taken."""
            trainer = self._trainer()
            counted = None if trainer is None else trainer.fit_loop.epoch_loop.batch_progress.current
            return counted is None or bool(counted.processed >= counted.ready)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            value = trainer.callback_metrics.get(accuracy)
            self.attachment.epoch_end(value)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._undo(trainer)
            self._end_batches()
            self.attachment.failed(self._is_done())

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self._undo(trainer)
            self.attachment.end()

        def _undo(self, trainer: Any) -> None:
            # Remove our function, so that the strategy has its own method again.
            vars(trainer.strategy).pop("process_dataloader", None)

    return SpiderfsCallback()


def hugging_face_callback(
    directory: str | os.PathLike[str],
    *,
    accuracy: str = "eval_accuracy",
    options: HookOptions | None = None,
    **arguments: Any,
) -> Any:
    """A callback for Hugging Face's Trainer; `accuracy` names a metric of its evaluation; `attach` gets the others.

    The Trainer evaluates after it has called `on_epoch_end`, so the hook gets the accuracy of the last evaluation
    before that. The callback's `attachment.hook` is the `Hook` of the run. Its `weighted_loss` is for the Trainer's
    argument `compute_loss_func`.
    """
    base = _base_class(("transformers",), "TrainerCallback")

    class HuggingFaceCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.attachment = _Attachment(directory, options, arguments)
            self.accuracy: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.attachment.new_run()
            self.attachment.begin(
                given["model"],
                given["train_dataloader"],
                client_name="transformers",
                # The state has a fraction of an epoch where the training resumes within one.
                epoch=int(state.epoch or 0),
                # Where the loader has no length, the Trainer has sys.maxsize epochs, and ends after a number of steps.
                epochs=state.num_train_epochs if 0 < state.num_train_epochs < sys.maxsize else None,
            )

        def weighted_loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            """The mean cross-entropy of a classifier, each sample's multiplied by its weight (`Hook.weights`)."""
            losses = nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")
            # In an evaluation there are no gradients, and its samples have no weights.
            if self.attachment.hook is not None and torch.is_grad_enabled():
                losses = losses * self.attachment.hook.weights()
            return losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch

        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.accuracy = (given.get("metrics") or {}).get(accuracy)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.attachment.epoch_end(self.accuracy)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.attachment.end()

    return HuggingFaceCallback()


def _attach_to_what_is_processed(attachment: _Attachment, trainer: Any, module: Any) -> None:
    """Attach to the loaders that Lightning's Trainer makes of the user's, while its strategy has this function.

    The Trainer begins to iterate over its loader before it calls `on_train_start`. `process_dataloader` is the last
    step in which it changes the loader.
    """
    process = trainer.strategy.process_dataloader

    def processed(loader: Any) -> Any:
        loader = process(loader)
        if trainer.training:
            # If a loader has no length, the Trainer takes one batch ahead to know which one is the last.
            lookahead = 0 if _has_length(loader) else 1
            # -1 stands for a training without an end.
            epochs = trainer.max_epochs if (trainer.max_epochs or 0) > 0 else None
            known = {"lookahead": lookahead, "epochs": epochs, "client_name": "lightning"}
            attachment.begin(module, loader, _epoch_that_begins(trainer), **known)
        return loader

    trainer.strategy.process_dataloader = processed


def _epoch_that_begins(trainer: Any) -> int:
    """The number of the epoch for which Lightning's Trainer makes a loader.

    A Trainer that resumes makes its loader first, and after that it counts an epoch that its checkpoint has seen nearly
    to the end. So `trainer.current_epoch` is one too low then.
    """
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
    # The checkpoint was written when the last batch ended, but for the last of all that happens at a batch's end.
    has_ended = batches.is_last_batch and batches.current.completed < batches.current.processed
    return int(epochs.processed + (epochs.processed < epochs.started and has_ended))


def _follow_length(trainer: Any) -> None:
    """Give Lightning's Trainer how many batches the epoch has that has just begun, as it asks only once.

    The epochs of an ImpactSampler or an InfoBatchSampler differ in length. The Trainer evaluates after the last batch.
    """
    loop = trainer.fit_loop
    counted, fetcher = loop.epoch_loop.batch_progress, loop._data_fetcher
    if counted.current.ready != 1 or not _has_length(trainer.train_dataloader) or fetcher.length is None:
        return
    length, limit, every = len(trainer.train_dataloader), trainer.limit_train_batches, trainer.val_check_interval
    length = min(length, limit) if isinstance(limit, int) else max(1, int(length * limit))
    if length != loop.max_batches:
        loop.max_batches = fetcher.length = length
        fetcher.combined_loader.limits = [length]
        if isinstance(every, float):
            trainer.val_check_batch = max(1, int(length * every))
        fetcher.done = counted.is_last_batch = fetcher.fetched >= length


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
