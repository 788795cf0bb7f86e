"""The files and classes of a list, for all kinds of data sets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from trainer_hook.connection.sample_list import classes_of, declaration


@pytest.mark.parametrize(
    ("labels", "classes", "numbered", "said"),
    [
        ([0, 2, 1], [0, 2, 1], True, ""),
        ([True, False], [1, 0], True, ""),
        ([*np.array([3, 4])], [3, 4], True, ""),
        ([*torch.tensor([3, 4])], [3, 4], True, ""),
        ([1, None, 0], [1, -1, 0], True, ""),
        ([1, -1, -100], [1, -1, -1], True, ""),
        (["3", "1"], [3, 1], True, ""),
        (["dog", "cat", None, "dog"], [1, 0, -1, 1], False, "numbers the 2 different labels"),
        ([2**40, 7, 2**40], [0, 1, 0], False, "numbers the 2 different labels"),
        ([b"dog", "cat"], [1, 0], False, "numbers the 2 different labels"),
        ([0.25, 0.75], [-1, -1], False, "are not classes"),
        ([1.0, 2.0], [-1, -1], False, "are not classes"),
        ([1, 0.5], [-1, -1], False, "are not classes"),
        ([*np.array([0.5, 0.7], np.float32)], [-1, -1], False, "are not classes"),
        ([[1, 0, 1], [0, 0, 1]], [-1, -1], False, "are not classes"),
        ([*torch.eye(2)], [-1, -1], False, "are not classes"),
        ([np.array([1]), np.array([0, 1])], [-1, -1], False, "are not classes"),
        ([{"box": 1}, {}], [-1, -1], False, "are not classes"),
        ([None, None], [-1, -1], True, ""),
    ],
)
def test_labels(labels: list[Any], classes: list[int], numbered: bool, said: str) -> None:
    found = classes_of(labels)
    assert (found.labels.tolist(), found.labels.dtype, found.numbered) == (classes, np.int32, numbered)
    assert said in found.remark
    assert bool(said) is bool(found.remark)


class Data:
    def __init__(self, samples: Any, targets: Any = None) -> None:
        self.samples = samples
        if targets is not None:
            self.targets = targets


@pytest.mark.parametrize(
    "dataset",
    [
        Data([("/m/a/1.png", 0), ("/m/b/2.png", 1)]),
        Data(np.array([("/m/a/1.png", 0), ("/m/b/2.png", 1)], object)),
        Data(np.array([("/m/a/1.png", "0"), ("/m/b/2.png", "1")])),
        Data(np.array([("/m/a/1.png", 0), ("/m/b/2.png", 1)], [("path", "U20"), ("label", "i8")])),
        Data(np.array(["/m/a/1.png", "/m/b/2.png"]), np.array([0, 1])),
        Data(["/m/a/1.png", "/m/b/2.png"], torch.tensor([0, 1])),
        Data([("/m/a/1.png", 0, "more"), ("/m/b/2.png", 1, "more")]),
    ],
)
def test_samples_of_all_kinds_of_data_sets(dataset: Data) -> None:
    declared = declaration(dataset, Path("/m"), Path("/m"), "train", "train")
    assert (declared.paths, declared.labels.tolist()) == ([b"a/1.png", b"b/2.png"], [0, 1])


@pytest.mark.parametrize(
    ("dataset", "given", "said"),
    [
        (Data(torch.zeros(3, 2)), None, "Data.samples is a Tensor: give samples="),
        (Data([]), None, "Data.samples is empty: "),
        (Data({"a": 1}), None, "Data.samples is a dict: give samples="),
        (Data([("a", 0)]), 7, "samples is a int: give samples="),
        (Data([("a", 0)]), [], "the data set has no samples"),
    ],
)
def test_what_is_no_list_of_samples_is_named(dataset: Any, given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        declaration(dataset, Path("/m"), Path("/m"), "train", "train", given)


def test_samples_outside_of_the_mount_are_said_early_and_declared_as_no_file(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Data([("/nfs/a.png", 0), ("/m/b.png", 1), ("/nfs/c.png", 0)])
    declared = declaration(dataset, Path("/m"), Path("/m"), "train", "train")
    assert [record.getMessage() for record in caplog.records] == [
        "spiderfs: 2 of 3 samples of the list 'train' lie outside of /m, such as /nfs/a.png: have the data set read "
        "the files below /m"
    ]
    (chunk,) = declared.chunks()
    assert list(chunk.split_paths()) == [b"", b"b.png", b""]
    assert len(set(declared.paths)) == 3, "no two of them are taken for one file"


# -- paths


def paths(root: Path, directory: Path, *names: str) -> list[bytes]:
    return declaration(None, root, directory, "train", "train", [(name, 0) for name in names]).paths


def test_links_of_files_lead_into_the_mount_too(tmp_path: Path) -> None:
    mount, outside = tmp_path / "mount", tmp_path / "outside"
    (mount / "train").mkdir(parents=True)
    outside.mkdir()
    (mount / "train" / "1.png").touch()
    (outside / "first").symlink_to("second")
    (outside / "second").symlink_to("../mount/train/1.png")
    (outside / "loop").symlink_to("loop")
    (outside / "away").symlink_to("/etc/hostname")
    found = paths(mount, mount, *(f"{outside}/{name}" for name in ("first", "second", "loop", "away")))
    assert found[:2] == [b"train/1.png"] * 2
    assert all(path.startswith(b"../") for path in found[2:])


def test_paths_may_lead_into_the_mount_in_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = tmp_path / "mount"
    (mount / "train" / "cat").mkdir(parents=True)
    (mount / "train" / "cat" / "1.png").touch()
    link = tmp_path / "data"
    link.symlink_to(mount / "train")
    assert paths(mount, mount, f"{mount}/train/cat/1.png") == [b"train/cat/1.png"]
    assert paths(mount, link, f"{link}/cat/1.png", f"{link}/cat/../cat/1.png") == [b"train/cat/1.png"] * 2
    assert paths(mount, mount, f"{link}/cat/1.png") == [b"train/cat/1.png"]
    assert paths(mount, link, "cat/1.png") == [b"train/cat/1.png"]
    assert paths(mount, mount / "train", "cat/.hidden.png") == [b"train/cat/.hidden.png"]
    monkeypatch.chdir(tmp_path)
    assert paths(mount, mount / "train", "mount/train/cat/1.png") == [b"train/cat/1.png"]
    assert paths(mount, link, "data/cat/1.png") == [b"train/cat/1.png"]
    monkeypatch.chdir(mount)
    assert paths(mount, mount / "train", "train/cat/1.png", "train/cat/2.png") == [
        b"train/cat/1.png",
        b"train/cat/2.png",
    ]
    assert paths(mount, mount / "train", "cat/1.png") == [b"train/cat/1.png"]
    assert paths(mount, mount, "/remote/1.png") == [os.fsencode(os.path.relpath("/remote/1.png", mount))]


def test_a_name_that_no_message_can_carry_is_refused(tmp_path: Path) -> None:
    for split in ("x" * 2000, "\udcff"):
        with pytest.raises(ValueError, match=r"split.*: give "):
            declaration(Data([("1.png", 0)]), tmp_path, tmp_path, split, split)


class Counted(Data):
    """A data set with an index of its own, of which its list knows nothing."""

    def __init__(self, length: int, paths: int) -> None:
        super().__init__([(f"/m/{number}.png", 0) for number in range(paths)])
        self.length = length

    def __len__(self) -> int:
        return self.length


class Endless(Counted):
    def __len__(self) -> int:
        raise NotImplementedError


def test_a_list_that_is_longer_than_the_data_set_is_refused() -> None:
    said = "the Counted has 3 samples, and its list 5: give samples="
    for dataset in (Counted(3, 5), Subset[Any](Counted(3, 5), [1]), ConcatDataset[Any]([Counted(5, 5), Counted(3, 5)])):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=said):
            declaration(dataset, Path("/m"), Path("/m"), "train", "train")
    for given in (2, 4):
        with pytest.raises(ValueError, match=f"has 3 samples, and its list {given}: give samples="):
            declaration(Counted(3, 3), Path("/m"), Path("/m"), "train", "train", [("1.png", 0)] * given)
    for dataset in (Counted(5, 5), Endless(3, 5), Subset[Any](Counted(5, 5), [*range(5)])):  # type: ignore[arg-type]
        assert len(declaration(dataset, Path("/m"), Path("/m"), "train", "train").paths) == 5
