"""Data sets whose `samples` are a path and a label each, as those of a folder of images are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.utils.data import Dataset

Sample = TypeVar("Sample", covariant=True)


class Listed(Dataset[Sample]):
    samples: Sequence[tuple[Any, Any]]

    def __len__(self) -> int:
        return len(self.samples)


class Read(Listed[Sample]):
    """What `read` makes of each path and label."""

    def __init__(self, samples: Sequence[tuple[Any, Any]], read: Callable[[Any, Any], Sample]) -> None:
        self.samples, self.read = samples, read

    def __getitem__(self, index: int) -> Sample:
        return self.read(*self.samples[index])
