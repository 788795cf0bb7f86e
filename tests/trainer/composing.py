"""A pipeline of transforms, written as torchvision's Compose is: refurbish goes by its list `transforms`."""

from __future__ import annotations

from typing import Any


class Compose:
    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample
