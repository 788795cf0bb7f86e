"""Finds out of which tensors a tensor is made, by the memory that they share.

A view says by its offset and strides which rows of its base it has. A copy (to a device, in another layout, augmented)
says nothing of where it came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Rows = npt.NDArray[np.int64]

# Of a batch, or of a model's arguments: enough for all that has rows, and little to look through.
_TENSORS_MAX, _DEPTH_MAX = 64, 4
# What is wider is no label: to look through 256 rows of 1,000 classes takes 0.4 ms.
_CLASSES_MAX = 32_768


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors that a batch, or the arguments of a model, are made of; at most 64 of them."""
    found: list[Tensor] = []
    for tensor in _walk(value, _DEPTH_MAX):
        found.append(tensor)
        if len(found) == _TENSORS_MAX:
            break
    return found


def _walk(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if depth == 0 or isinstance(value, str | bytes | int | float | np.ndarray | torch.nn.Module):
        return
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        parts = vars(value).values() if hasattr(value, "__dict__") else ()
    for number, part in enumerate(list(parts)):
        # A list of numbers, as of labels, has nothing in it.
        if number >= _TENSORS_MAX:
            return
        yield from _walk(part, depth - 1)


# CutMix and mixup mix two samples, mosaics four.
_MIXED_MAX = 4


def is_mixed(batch: Any, rows: int) -> bool:
    """Whether the batch's labels say that its rows are mixtures of samples (mixup, CutMix): some have several classes.

    Smoothed labels have not: but for one class all are alike. Nor has what a teacher gives, in which none are.
    """
    for tensor in tensors_in(batch):
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.is_floating_point():
            continue
        if tensor.dim() != 2 or len(tensor) != rows or not 2 <= tensor.shape[1] <= _CLASSES_MAX:
            continue
        shares = tensor.detach().float().numpy()
        lowest = shares.min(1, keepdims=True) if shares.shape[1] > 2 else 0.0
        if shares.min() >= 0 and np.allclose(shares.sum(1), 1, atol=1e-2):
            classes = int((shares - lowest > 1e-4).sum(1).max())
            if 2 <= classes <= _MIXED_MAX:
                return True
    return False


class Memory:
    """A tensor's storage, and how the tensor lies in it; holds neither. No other storage has its `key` meanwhile."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.key: int = self._storage.cdata
        self._offset = int(tensor.storage_offset())
        self.shape = tuple(tensor.shape)
        self._stride = tensor.stride(0) if tensor.dim() else 0

    @classmethod
    def of(cls, tensor: Tensor) -> Memory | None:
        """None for tensors that have no memory of one piece (sparse ones, for example)."""
        try:
            return cls(tensor)
        except (RuntimeError, NotImplementedError):
            return None

    @property
    def gone(self) -> bool:
        return bool(self._storage.expired())  # type: ignore[no-untyped-call]

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 0

    def has_whole(self, tensor: Tensor) -> bool:
        """Whether a tensor of the same storage has all of this one's elements."""
        return tensor.storage_offset() == self._offset and tensor.numel() == int(np.prod(self.shape))

    def lies_as(self, other: Memory) -> bool:
        """Whether both are the same piece of the same storage."""
        return (self.key, self._offset, self.shape, self._stride) == (
            other.key,
            other._offset,
            other.shape,
            other._stride,
        )

    def rows_in(self, tensor: Tensor) -> Rows | None:
        """For each row of a tensor of the same storage the row of this one that it is, or is a part of."""
        return rows_within(tensor, self._offset, self._stride, self.rows)


def key_of(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


def rows_within(tensor: Tensor, offset: int, stride: int, rows: int) -> Rows | None:
    """The rows of a base that begin at `offset` and lie `stride` apart, by a view's rows; None if one is of several."""
    if not tensor.dim() or not tensor.numel() or stride < 1:
        return None
    inner = sum((size - 1) * step for size, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    first: Rows = int(tensor.storage_offset()) - offset + np.arange(len(tensor), dtype=np.int64) * tensor.stride(0)
    found: Rows = first // stride
    if int((first % stride).max()) + inner >= stride or found.min() < 0 or found.max() >= rows:
        return None
    return found


def rows_in_storage(tensor: Tensor, rows: int) -> Rows | None:
    """Which rows of its whole storage a view has, if that storage is `rows` rows; None where it is not."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    if rows < 1 or not tensor.dim() or elements % rows:
        return None
    stride = elements // rows
    # Else its rows are pieces of what would be the rows.
    if len(tensor) > 1 and tensor.stride(0) % stride:
        return None
    return rows_within(tensor, 0, stride, rows)


def is_whole_storage(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
