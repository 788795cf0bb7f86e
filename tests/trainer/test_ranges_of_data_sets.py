"""The ranges that are found in data sets of Hugging Face `datasets`, and the lists of these; without a mount."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset

import trainer_hook
from trainer_hook.connection.sample_list import Declaration, found_declaration
from trainer_hook.ranges import SampleRanges
from trainer_hook.ranges.files import rows_of_dataset

datasets: Any = pytest.importorskip("datasets")
pyarrow: Any = pytest.importorskip("pyarrow")

ROWS = 60


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, rng = tmp_path_factory.mktemp("rows"), random.Random(5)
    for name in "ab":
        rows = {"image": [rng.randbytes(rng.randrange(100, 3000)) for _ in range(ROWS)], "label": list(range(ROWS))}
        datasets.Dataset.from_dict(rows).save_to_disk(place / name, num_shards=2)
    empty = {"tags": [[] for _ in range(ROWS)], "none": [None] * ROWS, "label": list(range(ROWS))}
    features = {"tags": datasets.Sequence(datasets.Value("string")), "none": datasets.Value("string")}
    features["label"] = datasets.Value("int64")
    datasets.Dataset.from_dict(empty, datasets.Features(features)).save_to_disk(place / "empty")
    return place


def load(place: Path, name: str) -> Any:
    return datasets.load_from_disk(place / name)


def beside(left: Any, right: Any) -> Any:
    return datasets.concatenate_datasets([left, right.rename_columns({"image": "i", "label": "l"})], axis=1)


def checked(place: Path, dataset: Any, *columns: str) -> SampleRanges:
    """The ranges of a data set, which hold the bytes of these columns of each row."""
    ranges = rows_of_dataset(dataset)
    assert ranges is not None
    assert len(ranges) == len(dataset)
    assert (ranges.lengths > 0).all()
    contents = [Path(path).read_bytes() for path in map(str, ranges.paths)]
    for index in range(len(dataset)):
        rows = range(ranges.first[index], ranges.first[index + 1])
        spans = [(contents[ranges.files[row]], ranges.offsets[row], ranges.lengths[row]) for row in rows]
        parts = [content[offset : offset + length] for content, offset, length in spans]
        assert all(dataset[index][column] in parts for column in columns)
    assert all(Path(str(path)).is_relative_to(place) for path in ranges.paths)
    return ranges


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: a.select(range(7, 20)),
        lambda a, b: a.take(20),
        lambda a, b: a.skip(20),
        lambda a, b: a.shard(4, 1),
        lambda a, b: a.shard(4, 1, contiguous=False),
        lambda a, b: a.train_test_split(0.1, shuffle=False)["train"],
        lambda a, b: a.skip(35).shuffle(seed=1, keep_in_memory=True),
        lambda a, b: a.shuffle(seed=1, keep_in_memory=True).skip(5).take(20),
        lambda a, b: Subset(a.skip(35), [3, 0, -1]),
        lambda a, b: datasets.concatenate_datasets([a.skip(35), b.take(9)]).shuffle(seed=1, keep_in_memory=True),
        lambda a, b: datasets.interleave_datasets([a, b]),
        lambda a, b: ConcatDataset([a.skip(50), Subset(b, [5, 3])]),
        lambda a, b: a.add_column("more", list(range(ROWS))),
    ],
)
def test_the_ranges_are_of_the_rows(place: Path, make: Callable[[Any, Any], Any]) -> None:
    checked(place, make(load(place, "a"), load(place, "b")), "image")


def test_columns_beside_each_other_have_the_ranges_of_both(place: Path) -> None:
    checked(place, beside(load(place, "a"), load(place, "b")).skip(5), "image", "i")


def test_columns_that_are_not_read_have_no_ranges(place: Path) -> None:
    dataset = load(place, "a")
    for labels in (dataset.remove_columns("image"), dataset.with_format("torch", columns=["label"])):
        assert set(checked(place, labels).lengths) == {8}


def test_empty_lists_have_no_ranges_of_their_own(place: Path) -> None:
    checked(place, load(place, "empty"))


def test_index_files_are_no_part_of_the_data(place: Path, tmp_path: Path) -> None:
    dataset = load(place, "a").shuffle(seed=1, indices_cache_file_name=str(tmp_path / "indices.arrow"))
    assert len(dataset.cache_files) == 3
    checked(place, dataset, "image")
    declared = found(dataset, place)
    assert {path.partition(b"/")[0] for path in declared.paths} == {b"a"}


def test_other_data_sets_have_none(place: Path) -> None:
    dataset, numbers = load(place, "a"), cast("Any", range(ROWS))
    others: list[Any] = [ConcatDataset([dataset, numbers]), StackDataset(dataset, numbers), numbers, None]
    for other in others:
        assert rows_of_dataset(other) is None


def found(dataset: Any, root: Path) -> Declaration:
    declared = found_declaration(dataset, root, "train", is_mount=True)
    assert declared is not None
    assert declared.grid is not None
    assert declared.grid.samples == len(dataset)
    return declared


@pytest.mark.parametrize(
    "make",
    [
        lambda place: datasets.load_from_disk(place / "a", keep_in_memory=True),
        lambda place: datasets.Dataset(pyarrow.table({"x": pyarrow.array(["a" * 30] * 9, pyarrow.string_view())})),
        lambda place: datasets.Dataset.from_dict({"x": [1, 2, 3]}),
    ],
)
def test_without_ranges_nothing_is_planned_and_one_line_says_so(
    place: Path, make: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = make(place)
    assert found(dataset, place).paths == []
    (line,) = [record.getMessage() for record in caplog.records]
    assert "give ranges=" in line


def test_rows_of_files_elsewhere_are_left_out(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    both = datasets.concatenate_datasets([load(place, "a"), load(place, "b")])
    declared = found(both, place / "b")
    assert declared.grid is not None
    assert declared.paths
    assert all(path.startswith(b"data-") for path in declared.paths)
    assert not len(declared.grid.draws(np.arange(ROWS, dtype=np.uint32)))
    assert not caplog.records
    assert found(load(place, "a"), place / "b").paths == []


def test_a_training_without_ranges_goes_on(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(load(place, "a"), batch_size=8, shuffle=True, collate_fn=list)
    # There is no mount here, and that is the only warning.
    with trainer_hook.plan(place / "b", loader):
        assert sorted(row["label"] for batch in loader for row in batch) == list(range(ROWS))
    hook = trainer_hook.attach(place / "b", torch.nn.Linear(2, 2), loader)
    assert sum(map(len, loader)) == ROWS
    hook.epoch_end()
    hook.close()
    assert all("no spiderfs" in record.getMessage() for record in caplog.records), caplog.text


def test_ranges_that_are_found_are_not_exchanged(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(load(place, "a"), batch_size=8, collate_fn=list)
    with trainer_hook.plan(place, loader, share=True):
        assert sum(map(len, loader)) == ROWS
    assert "leave share out" in caplog.text
