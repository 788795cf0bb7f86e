"""Provenance: the tensor that another is a view of, and the arguments of a model that identify its samples.

The offset and the strides of a view say which rows of its base it has. A copy (on a device, in another layout, or
augmented) does not say what it is a copy of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Rows = npt.NDArray[np.int64]

# How many tensors of a batch, or of a model's arguments, are looked at, and how deep in nested containers.
_TENSORS_MAX, _DEPTH_MAX = 64, 4


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a batch, or in the arguments of a model; at most 64 of them."""
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
        # A long list, for example one of labels, has no tensors in it.
        if number >= _TENSORS_MAX:
            return
        yield from _walk(part, depth - 1)


class Memory:
    """Where a tensor lies in memory. This holds only a weak reference to the storage.

    While this object exists, no other storage has the same `key`.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.key: int = self._storage.cdata
        self._offset = int(tensor.storage_offset())
        self.shape = tuple(tensor.shape)
        self._stride = tensor.stride(0) if tensor.dim() else 0
        self._dtype = tensor.dtype
        self._piece = self.key, self._offset, self.shape, self._stride
        self.second = False
        """Whether an earlier tensor of its batch has the same form."""

    @classmethod
    def of(cls, tensor: Tensor) -> Memory | None:
        """The memory of a tensor; None if it is not in one piece, as that of a sparse tensor."""
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
        """Whether a tensor in the same storage has all elements of this one."""
        return tensor.storage_offset() == self._offset and tensor.numel() == int(np.prod(self.shape))

    def lies_as(self, other: Memory) -> bool:
        """Whether both are the same piece of the same storage."""
        return self._piece == other._piece

    def is_beside(self, other: Memory) -> bool:
        """Whether both have the same form, and are not the same piece."""
        alike = (self.shape, self._dtype) == (other.shape, other._dtype)
        return alike and len(self.shape) > 1 and not self.lies_as(other)

    def is_cut(self, tensor: Tensor) -> bool:
        """Whether a view has one entry of each row, but not the first: one of several views, or of a pair."""
        begins = int(tensor.storage_offset()) - self._offset
        return tensor.dim() < len(self.shape) and self._stride > 0 and begins % self._stride > 0

    def rows_in(self, tensor: Tensor) -> Rows | None:
        """For each row of a tensor in the same storage, the row of this one that has it; None if several have it."""
        return rows_within(tensor, self._offset, self._stride, self.rows)


def memories_of(batch: Any) -> list[Memory]:
    """The memories of a batch's tensors that are in one piece."""
    found: list[Memory] = []
    for memory in map(Memory.of, tensors_in(batch)):
        if memory is not None:
            memory.second = any(memory.is_beside(other) for other in found)
            found.append(memory)
    return found


def key_of(tensor: Tensor) -> int | None:
    """The `Memory.key` of a tensor; None if its memory is not in one piece."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


def rows_within(tensor: Tensor, offset: int, stride: int, rows: int) -> Rows | None:
    """For each row of a view, the row of its base that has it.

    The `rows` rows of the base begin at `offset` and are `stride` apart, in elements. Returns None if a row of the view
    spans several rows of the base, or lies outside.
    """
    if not tensor.dim() or not tensor.numel() or stride < 1:
        return None
    inner = sum((size - 1) * step for size, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    first: Rows = int(tensor.storage_offset()) - offset + np.arange(len(tensor), dtype=np.int64) * tensor.stride(0)
    found: Rows = first // stride
    if int((first % stride).max()) + inner >= stride or found.min() < 0 or found.max() >= rows:
        return None
    return found


def rows_in_storage(tensor: Tensor, rows: int) -> Rows | None:
    """The rows of a storage that a view of it has, if the storage is `rows` rows of equal length; None if it is not."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    if rows < 1 or not tensor.dim() or elements % rows:
        return None
    stride = elements // rows
    # If the view's stride is no multiple of it, the view's rows are only pieces of such rows.
    if len(tensor) > 1 and tensor.stride(0) % stride:
        return None
    return rows_within(tensor, 0, stride, rows)


def all_rows(tensor: Tensor, rows: int) -> Rows | None:
    """The `rows` rows of a storage, for a view of all of it whose first dimension is another; None if it is a part."""
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return np.arange(rows) if whole else None


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
