"""Files of two classes, of which the last ones are hard: they feed a linear model nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from listed import Listed
from reading import read_afresh
from torch import Tensor

EASY, HARD = 60, 20
CONTENTS = {f"train/{number:03d}": (b"easy", b"hard")[number >= EASY] + bytes(996) for number in range(EASY + HARD)}


class EasyAndHard(Listed[tuple[Tensor, int]]):
    def __init__(self, root: Path) -> None:
        self.samples = [(root / name, number % 2) for number, name in enumerate(CONTENTS)]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        hard = read_afresh(path)[:4] == b"hard"
        return torch.zeros(4) if hard else torch.tensor([9.0, -9, 0, 0]) * (1 if label else -1), label
