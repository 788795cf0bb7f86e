"""The benchmark of partitions: which image a split has where, and how it judges."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.training.partition import (
    USES,
    Partitioned,
    Row,
    auto_of_best,
    chosen,
    judged,
    pearson,
)
from spiderfs.views.recipe import READY
from spiderfs.views.tree import Forms
from trainer_hook.refurbishing.stores import PartialStore


def test_augmented_images_are_shown_as_originals_as_long_as_there_are_any() -> None:
    names = [f"{number}.jpg" for number in range(60)]
    forms = Forms(READY, "bmp256", 0.5)
    originals = {index for index, name in enumerate(names) if forms.place(name.encode()).form == "original"}
    few, many = chosen(10, names, 0.5), chosen(50, names, 0.5)
    assert len(few) == 10
    assert few <= originals <= many
    assert len(many) == 50


def test_augmented_images_are_made_again_after_their_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Counter[int]()

    def image(self: object, index: int) -> torch.Tensor:
        made[index] += 1
        return torch.tensor(index)

    monkeypatch.setattr("benchmarks.training.partition.Images.__getitem__", image)
    store = PartialStore(tmp_path)
    for index in range(3):
        store.put(index, index // USES, torch.tensor(index))
    data = Partitioned(["a", "b", "c", "d"], frozenset({0, 1, 2}), store)
    for epoch in range(1, 2 * USES + 1):
        assert [int(data[4 * epoch + index]) for index in range(4)] == [0, 1, 2, 3]
    assert made == {0: 2, 1: 2, 2: 2, 3: 2 * USES}
    # What the mount has let go is made again.
    store.close()
    for path in tmp_path.iterdir():
        path.unlink()
    assert int(data[4 * (2 * USES + 1)]) == 0
    assert made[0] == 3


def test_predictions_are_judged_over_the_six_splits_and_the_named_split_by_the_best() -> None:
    rows = [
        Row("", predicted, 7 - predicted, [measured] * 3) for predicted, measured in enumerate((10, 20, 30, 40, 50, 60))
    ]
    named = Row("", 99, 0, [30.0, 57.0, 99.0])
    assert pearson([*rows, named], "predicted") == pytest.approx(1)
    assert pearson([*rows, named], "equation_9") == pytest.approx(-1)
    assert auto_of_best([*rows, named]) == pytest.approx(0.95)
    assert judged([*rows, named])["auto_of_best"] == pytest.approx(0.95)
