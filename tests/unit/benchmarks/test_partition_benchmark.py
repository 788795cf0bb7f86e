"""The benchmark of partitions: which image a split has where, and how it judges."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.training.partition import USES, Epochs, Partitioned, Row, auto_of_best, pearson, places_of
from spiderfs.core.partition import Split
from spiderfs.profiling.profile import Cost, Form, Profile, SourceSpeed
from trainer_hook.partial_store import PartialStore

COST = Cost(0.001, 0.0, 0.0)
PROFILE = Profile(
    cache_bytes=30_000,
    cores=2,
    source=SourceSpeed(0.01, 4, 1e6),
    samples=60,
    workers=2,
    batch=16,
    step_s=None,
    uncached=COST,
    encoded=Form(1000, None, COST),
    augmented=Form(1500, None, COST),
    views={"bmp256": Form(2000, None, COST)},
)


def test_a_split_decides_where_each_image_is() -> None:
    assert Counter(places_of(PROFILE, Split(0, 0.5, 0.5))) == {"augmented": 10, "decoded": 8, "storage": 42}
    assert Counter(places_of(PROFILE, Split(1, 0, 0))) == {"encoded": 30, "storage": 30}


def test_augmented_images_are_made_anew_after_their_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Counter[int]()

    def image(self: object, index: int) -> torch.Tensor:
        made[index] += 1
        return torch.tensor(index)

    monkeypatch.setattr("benchmarks.training.partition.Images.__getitem__", image)
    store = PartialStore(tmp_path)
    for index in range(4):
        store.put(index, 0, torch.tensor(index))
    places = ["augmented"] * 3 + ["storage"]
    data = Partitioned({"storage": tmp_path}, ["a", "b", "c", "d"], places, store)
    for epoch in range(2 * USES):
        assert [int(data[4 * epoch + index]) for index in range(4)] == [0, 1, 2, 3]
    assert made == {0: 2, 1: 2, 2: 2, 3: 2 * USES}


def test_an_epoch_has_each_image_once_after_a_few_that_begin_the_workers() -> None:
    sampler = Epochs(40, epoch=2)
    assert len(list(sampler)) == 16
    assert sorted(sampler) == list(range(80, 120))


def test_predictions_are_judged_over_the_six_splits_and_the_named_split_by_the_best() -> None:
    rows = [
        Row("", predicted, 7 - predicted, [measured] * 3) for predicted, measured in enumerate((10, 20, 30, 40, 50, 60))
    ]
    named = Row("", 99, 0, [30.0, 57.0, 99.0])
    assert pearson([*rows, named], "predicted") == pytest.approx(1)
    assert pearson([*rows, named], "equation_9") == pytest.approx(-1)
    assert auto_of_best([*rows, named]) == pytest.approx(0.95)
