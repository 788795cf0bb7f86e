"""What the labels of batches say: whether the rows are the samples that were drawn, and in the order of the draws.

A data set that cannot read a sample may give another one, and a collate function may move rows, fill gaps or mix
samples. The labels show that where they are not those of the list. A training may number the classes in its own way,
or join some, so a label is compared with the one that the training had before for a sample of the same class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer_hook.model.provenance import tensors_in

Numbers = npt.NDArray[np.int64]

# A wider tensor is not taken for labels. Looking through 256 rows of 1,000 classes takes 0.4 ms.
_CLASSES_MAX = 32_768
# CutMix and mixup mix two samples; mosaics mix four.
_MIXED_MAX = 4
# The hook sends nothing while more than one batch in this number had labels of other samples. It does not see samples
# that others of their class replace; with a few broken files in a large data set, these are fewer still.
_TRUSTED = 100
# A second target of two classes may be the labels in another order by chance, but not so often.
_BY_CHANCE = 8

# Why a batch is not sent; the hook logs these texts.
MIXED = "batches are not sent to the daemon: their labels show that the collate function mixes samples"
OTHERS = (
    "batches are not sent to the daemon: their labels are not those that the list has for their samples: the data set "
    "or the collate function moves rows or puts other samples in the place of some, or the list has other labels"
)


class Labels:
    """Compares the labels of batches with those of a list; -1 stands for a sample without a label."""

    def __init__(self, declared: npt.NDArray[np.int32]) -> None:
        self._declared = declared
        self._classes = len(np.unique(declared[declared >= 0]))
        # For each tensor of a batch that may be the labels, by its place: the training's number for each class.
        self._numbers: dict[int, dict[int, int]] | None = None
        # How often a tensor beside the labels was the labels in another order, and which were once something else.
        self._moved: Counter[int] = Counter()
        self._aside: set[int] = set()
        self._mixed = False
        self._batches = self._contradicted = 0

    def doubt(self, indices: npt.NDArray[np.uint32], batch: Any) -> str | None:
        """Why the rows of a batch may not be these samples (empty if that is not worth a warning); None if they are."""
        self._batches += 1
        declared = self._declared[indices].astype(np.int64)
        given: dict[int, Numbers] = {}
        shares = {}
        for place, tensor in _label_like(batch, len(indices)):
            numbers, outstanding = _numbers_in(tensor)
            if outstanding is not None and 2 <= int(outstanding.sum(1).max()) <= _MIXED_MAX:
                shares[place] = outstanding
            elif numbers is not None and not np.array_equal(numbers, indices):
                given[place] = numbers
        if any(np.array_equal(numbers, declared) for numbers in given.values()):
            # Shares that leave out a row's class are something else than the labels.
            classes = range(len(declared)), declared
            enough = int(self._declared.max()) + 1
            self._aside |= {at for at, one in shares.items() if one.shape[1] < enough or not one[classes].all()}
        # This holds for good: a batch with samples of one class does not show that they are mixed.
        self._mixed = self._mixed or bool(shares.keys() - self._aside)
        if self._mixed:
            return MIXED
        labelled = declared >= 0
        return self._compare(declared[labelled], {place: numbers[labelled] for place, numbers in given.items()})

    def _compare(self, declared: Numbers, given: dict[int, Numbers]) -> str | None:
        if self._numbers is None and given:
            self._numbers = {place: {} for place in given}
        standing: dict[int, dict[int, int]] = {}
        renumbered = proof = False
        for place in (self._numbers or {}).keys() & given.keys():
            assert self._numbers is not None
            known, numbers = self._numbers[place], given[place].tolist()
            pairs = set(zip(declared.tolist(), numbers, strict=True))
            if len(dict(pairs)) == len(pairs) and all(known.get(label, number) == number for label, number in pairs):
                standing[place] = known | dict(pairs)
                renumbered |= any(label != number and label not in known for label, number in pairs)
            elif len({*known.values(), *numbers}) <= self._classes:
                # A class that has its own number once has no other.
                known.update((label, number) for label, number in pairs if label == number)
                proof = True
            else:
                del self._numbers[place]
        if standing:
            self._numbers = standing
        elif proof:
            self._contradicted += 1
        if self._contradicted * _TRUSTED > self._batches or (proof and not standing):
            return OTHERS
        doubt = self._beside(given, standing)
        return "" if doubt is None and renumbered else doubt

    def _beside(self, given: dict[int, Numbers], standing: dict[int, Any]) -> str | None:
        """Mixup may give the labels twice, the second time in another order; a further target does that by chance."""
        for place, numbers in given.items():
            alike = [given[other] for other in standing if np.array_equal(np.sort(given[other]), np.sort(numbers))]
            if standing and not alike:
                self._aside.add(place)
            self._moved[place] += bool(alike) and not any(np.array_equal(numbers, other) for other in alike)
        often = max((self._moved[place] for place in given.keys() - self._aside), default=0)
        return None if not often else MIXED if often > _BY_CHANCE else ""


def _label_like(batch: Any, rows: int) -> Iterator[tuple[int, Tensor]]:
    """The tensors of a batch, with their places, that have a number or shares of classes for each row."""
    for place, tensor in enumerate(tensors_in(batch)):
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
        if not plain or tensor.is_complex() or tensor.is_quantized or tensor.dim() > 2:
            continue
        if len(tensor) == rows if tensor.dim() else rows == 1:
            yield place, tensor.detach()


def _numbers_in(tensor: Tensor) -> tuple[Numbers | None, npt.NDArray[np.bool_] | None]:
    """The whole number that each row has; and which classes of a row stand out, if it has shares of classes.

    In smoothed labels one class stands out, in mixtures of samples two to four, and in a teacher's output nearly all.
    """
    if tensor.dim() < 2 or tensor.shape[1] == 1:
        if tensor.is_floating_point() and not torch.equal(tensor.double(), tensor.double().round()):
            return None, None
        return tensor.reshape(-1).long().numpy(), None
    if not 2 <= tensor.shape[1] <= _CLASSES_MAX or abs(float(tensor[0].sum()) - 1) > 1e-2:
        return None, None
    shares = tensor.float().numpy()
    if shares.min() < 0 or not np.allclose(shares.sum(1), 1, atol=1e-2):
        return None, None
    outstanding: npt.NDArray[np.bool_] = shares - (shares.min(1, keepdims=True) if shares.shape[1] > 2 else 0.0) > 1e-4
    return (shares.argmax(1) if int(outstanding.sum(1).max()) == 1 else None), outstanding
