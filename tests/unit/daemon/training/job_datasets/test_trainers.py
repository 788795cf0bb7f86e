"""Who is attached, with which lists, and what workers know of that."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from short_lists import job_dataset

from spiderfs.daemon.training.job_datasets import trainers as module
from spiderfs.daemon.training.job_datasets.trainers import Trainers
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.protocol import Hello
from spiderfs.shared.published import publish_trainers, published_trainers


def trainer(pid: int | None = None) -> Trainer:
    return Trainer(os.getpid() if pid is None else pid, os.getuid(), Hello("test", "test"))


def published_below(directory: Path, has_substitutes: Callable[[], bool] = lambda: True) -> Trainers:
    return Trainers(partial(publish_trainers, directory / "trainers"), has_substitutes)


def test_workers_know_of_a_trainer_with_a_list_and_of_the_lists_whose_batches_it_sends(tmp_path: Path) -> None:
    trainers, one = published_below(tmp_path), trainer()

    def known() -> list[tuple[int, int, tuple[int, ...]]]:
        return [
            (found.number, found.pid, found.job_dataset_numbers) for found in published_trainers(tmp_path / "trainers")
        ]

    trainers.attach(one)
    assert known() == []
    train = job_dataset(5, [10, 11])
    trainers.declare(one, "train", train, False)
    trainers.declare(one, "validation", job_dataset(6, [12]), False)
    assert known() == [(1, os.getpid(), ())]
    trainers.learns_from(one, "train")
    assert known() == [(1, os.getpid(), (5,))]
    trainers.declare(one, "train", train, False)
    assert known() == [(1, os.getpid(), (5,))], "the same list"
    trainers.declare(one, "train", job_dataset(7, [10]), False)
    assert known() == [(1, os.getpid(), ())], "it has sent batches of nothing of this one"
    trainers.detach(one)
    assert known() == []
    trainers.attach(one)
    trainers.declare(one, "train", train, False)
    assert known() == [(2, os.getpid(), ())], "a new connection has sent batches of nothing yet"


def test_workers_know_who_will_be_given_substitutes_before_anything_is_learned(tmp_path: Path) -> None:
    has_substitutes = True
    trainers, one = published_below(tmp_path, lambda: has_substitutes), trainer()

    def known() -> tuple[bool, ...]:
        found = tuple(known.sends_batches for known in published_trainers(tmp_path / "trainers"))
        assert trainers.may_be_given == any(found)
        return found

    trainers.attach(one)
    train, other = job_dataset(5, [10, 11]), job_dataset(6, [12])
    trainers.declare(one, "train", train, False)
    assert known() == (False,)
    assert trainers.feed == set()
    trainers.declare(one, "validation", other, True)
    assert known() == (True,)
    assert trainers.feed == {1}
    trainers.declare(one, "validation", other, False)
    assert known() == (False,)
    trainers.learns_from(one, "train")
    assert known() == (True,)
    trainers.declare(one, "train", train, False)
    assert known() == (True,), "it has sent batches of the list"
    has_substitutes = False
    trainers.publish()
    assert known() == (False,), "the policy has none"
    has_substitutes = True
    trainers.publish()
    assert known() == (True,)
    trainers.declare(one, "train", job_dataset(7, [10]), False)
    assert known() == (False,)


def test_workers_do_not_hear_of_trainers_that_the_kernel_cannot_name_or_that_have_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainers = published_below(tmp_path)
    for pid in (0, 1 << 22):
        foreign = trainer(pid)
        trainers.attach(foreign)
        trainers.declare(foreign, "train", job_dataset(1, [10]), False)
    assert published_trainers(tmp_path / "trainers") == []
    assert ["another pid namespace" in text for text in caplog.messages] == [True]


def test_a_file_belongs_to_a_list_of_its_own_trainer(tmp_path: Path) -> None:
    trainers, one, other = (
        published_below(tmp_path),
        trainer(),
        trainer(),
    )
    trainers.attach(one)
    trainers.attach(other)
    trainers.declare(one, "train", job_dataset(1, [10, 11]), False)
    trainers.declare(other, "train", job_dataset(2, [11, 12]), False)
    pairs = [(number, inode) for number in (1, 2, 3) for inode in (10, 11, 12)]
    found = [(*pair, known.number) for pair in pairs if (known := trainers.job_dataset_with(*pair)) is not None]
    assert found == [(1, 10, 1), (1, 11, 1), (2, 11, 2), (2, 12, 2)]
    assert [trainers.any_uses(f"job/digest {number}") for number in (1, 2, 3)] == [True, True, False]
    trainers.detach(one)
    assert [trainers.any_uses(f"job/digest {number}") for number in (1, 2)] == [False, True]


def test_no_two_trainers_have_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_NUMBER", 3)
    trainers, numbers = published_below(tmp_path), []
    trainers.attach(trainer())
    for _ in range(4):
        one = trainer()
        trainers.attach(one)
        numbers.append(trainers.number_of(one))
        trainers.detach(one)
    assert numbers == [2, 3, 2, 3]
