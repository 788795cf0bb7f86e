"""The benchmark of partitions: which image a split has where, and how it judges."""

from __future__ import annotations

import pytest

from benchmarks.training.partition import (
    Row,
    auto_of_best,
    chosen,
    judged,
    pearson,
)
from spiderfs.views.recipe import READY
from spiderfs.views.tree import Forms


def test_augmented_images_are_shown_as_originals_as_long_as_there_are_any() -> None:
    names = [f"{number}.jpg" for number in range(60)]
    forms = Forms(READY, "bmp256", 0.5)
    originals = {index for index, name in enumerate(names) if forms.place(name.encode()).form == "original"}
    few, many = chosen(10, names, 0.5), chosen(50, names, 0.5)
    assert len(few) == 10
    assert few <= originals <= many
    assert len(many) == 50


def test_predictions_are_judged_over_the_six_splits_and_the_named_split_by_the_best() -> None:
    rows = [
        Row("", predicted, 7 - predicted, [measured] * 3) for predicted, measured in enumerate((10, 20, 30, 40, 50, 60))
    ]
    named = Row("", 99, 0, [30.0, 57.0, 99.0])
    assert pearson(rows, "predicted") == pytest.approx(1)
    assert pearson(rows, "equation_9") == pytest.approx(-1)
    assert auto_of_best([*rows, named]) == pytest.approx(0.95)
    assert judged([*rows, named]) == pytest.approx({"pearson": 1, "pearson_of_equation_9": -1, "auto_of_best": 0.95})
