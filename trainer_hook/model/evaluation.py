"""Evaluation: the losses of chosen samples by the current model, from a forward pass that changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer_hook.boundary import by_signal_handler
from trainer_hook.model.capture import Capture, Seen

log = logging.getLogger("trainer_hook")

Told = Callable[[npt.NDArray[np.uint32], Seen], None]

# Samples in one forward pass: more than in a batch of a training, because there are no gradients.
_BATCH = 256


class Evaluation:
    """Reads samples as the loader does, in this process, and computes their losses.

    `labels` are those of the list, or None if there are none; each batch is passed to `told`.
    """

    def __init__(
        self,
        model: nn.Module,
        classifier: nn.Module,
        loader: DataLoader[Any],
        labels: npt.NDArray[np.int32] | None,
        capture: Capture,
        told: Told,
    ) -> None:
        # DistributedDataParallel would make ranks wait for each other, but each evaluates its own number of batches.
        self._model: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._classifier = classifier
        self._dataset: Any = loader.dataset
        self._collate: Callable[[list[Any]], Any] = loader.collate_fn
        self._labels = labels
        self._capture = capture
        self._told = told
        self._usable = True

    def losses(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float32] | None:
        """The loss of each sample; None if this model and data set cannot give them, which is logged once.

        The data set must give an input, or a tuple that begins with the input, as for the training; and the classifier
        must give one number for each class.
        """
        if not self._usable:
            return None
        try:
            with _as_it_was(self._model), torch.no_grad():
                parts = [self._part(indices[first : first + _BATCH]) for first in range(0, len(indices), _BATCH)]
        except Exception as exc:
            if by_signal_handler(exc):
                raise
            # An error here must not stop the training, which goes on with the losses that it knows.
            log.exception("samples cannot be evaluated between epochs")
            self._usable = False
            return None
        return np.concatenate(parts)

    def _part(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        collated = self._collate([self._dataset[index] for index in indices.tolist()])
        inputs = collated[0] if isinstance(collated, tuple | list) else collated
        if not isinstance(inputs, Tensor):
            raise TypeError(f"the data set's samples begin with {type(inputs).__name__}, not with a tensor")
        shown: list[tuple[Tensor, Tensor | None]] = []

        def keep(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            shown.append((given[0], output if isinstance(output, Tensor) else None))

        handle = self._classifier.register_forward_hook(keep)
        try:
            self._model(inputs.to(next(self._model.parameters()).device))
        finally:
            handle.remove()
        seen = self._capture.shown(*shown[0], None if self._labels is None else self._labels[indices])
        if seen.losses is None:
            raise TypeError("the classifier does not give one number for each class")
        self._told(indices.astype(np.uint32), seen)
        return seen.losses.array().astype(np.float32)


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and afterwards back into the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
