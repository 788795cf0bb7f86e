"""The inputs of a forward pass: which of the model's arguments can say of which samples it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer_hook.model.provenance import Memory, Rows, key_of


class Shown(NamedTuple):
    """A forward pass, as the torch hooks saw it."""

    given: list[Tensor]
    """The tensors among the model's arguments."""
    shape: tuple[int, ...]
    """The shape of the classifier's input."""
    runs: int = 1
    """How often the classifier ran."""

    def inputs(self) -> list[Tensor]:
        """The tensors with as many rows as the classifier's input; and if these are flat, those that are not.

        A tensor of truth values is taken for a mask.
        """
        data = [tensor for tensor in self.given if tensor.dtype != torch.bool and tensor.dim()] or self.given
        of_rows = [tensor for tensor in data if self.shape[0] in tensor.shape[:2]]
        if any(tensor.dim() > 1 for tensor in of_rows):
            return of_rows
        return [*of_rows, *(tensor for tensor in data if tensor.dim() > 1)] or data


def agreed(found: Iterable[Rows | None]) -> Rows | None:
    """The rows that several inputs have; None if they have different ones."""
    known = [rows for rows in found if rows is not None]
    return known[0] if known and all(np.array_equal(rows, known[0]) for rows in known) else None


def are_paired(inputs: list[Tensor]) -> bool:
    """Whether two inputs are alike, as two images are."""
    wide = {(key_of(tensor), tensor.storage_offset()): tensor for tensor in inputs if tensor.dim() > 1}.values()
    forms = [(tensor.shape, tensor.dtype) for tensor in wide if tensor.is_floating_point()]
    return len(set(forms)) < len(forms)


def may_be_copies(inputs: list[Tensor], memories: list[Memory]) -> bool:
    """Whether the batch has as many tensors as the model was given; what it has beside tensors may be one more."""
    wide = sum(tensor.dim() > 1 for tensor in inputs) <= max(1, sum(len(memory.shape) > 1 for memory in memories))
    return wide and len(inputs) <= max(1, len(memories))
