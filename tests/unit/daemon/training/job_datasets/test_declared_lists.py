"""Lists come into memory when they are declared, and leave it with what the policy and the workers knew by them."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from recording_policy import recorded_cache
from short_lists import sample_list

from benchmarks.fakes import MemorySource
from spiderfs.core.feed import PolicyFeed
from spiderfs.core.policy import Key
from spiderfs.daemon.training.job_datasets import declared_lists as module
from spiderfs.daemon.training.job_datasets.declared_lists import DeclaredLists
from spiderfs.daemon.training.job_datasets.job_datasets import JobDataset, JobDatasets
from spiderfs.daemon.training.job_datasets.trainers import Trainers
from spiderfs.daemon.training.trainer import SampleList, Trainer
from spiderfs.errors import ProtocolError
from spiderfs.protocol import Hello
from spiderfs.shared.published import publish_trainers
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs.catalogue import TABLES, Catalogue
from spiderfs.vfs.lister import Lister

FILES = 6


class Scoring:
    """A `BatchScoring` that scores nothing."""

    def __init__(self) -> None:
        self.introduced: list[int] = []
        self.saved: list[int] = []
        self.full = False
        self.meanwhile: Callable[[], Awaitable[object]] | None = None

    def of(self, job_dataset: JobDataset) -> None:
        return None

    async def introduce(self, job_dataset: JobDataset) -> None:
        self.introduced.append(job_dataset.number)

    async def in_turn(self, save: Callable[[], None]) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        if self.meanwhile is not None:
            await self.meanwhile()
        self.saved.append(save.__self__.number)  # type: ignore[attr-defined]


class Redirects:
    """A `RedirectPublisher` that publishes nothing."""

    def __init__(self) -> None:
        self.withdrawn: list[int] = []

    async def withdraw(self, job_dataset: JobDataset) -> None:
        self.withdrawn.append(job_dataset.number)


class Harness:
    def __init__(self, directory: Path) -> None:
        source = MemorySource()
        for number in range(FILES):
            source.add(b"%03d" % number, bytes(10))
        client = SourceClient(source, SourceLimits(), rng=random.Random(1), on_event=lambda event: None)
        catalogue = Catalogue(MemoryRecords(TABLES))
        cache, self.policy = recorded_cache()
        self.job_datasets, self.trainers = (
            JobDatasets(),
            Trainers(partial(publish_trainers, directory / "trainers"), lambda: False),
        )
        scoring: Any = Scoring()
        redirects: Any = Redirects()
        self.scoring, self.redirects = scoring, redirects
        read_log = SimpleNamespace(is_kept=lambda now_s: False)
        supply: Any = SimpleNamespace(catalogue=catalogue, lister=Lister(catalogue, client), read_log=read_log)
        self.declared = DeclaredLists(
            supply,
            cache,
            PolicyFeed(cache.engine, cache.size_of),
            self.job_datasets,
            self.trainers,
            scoring,
            redirects,
            directory / "scores",
            1 << 20,
            directory,
        )

    def trainer(self, job: str = "test", **told: Any) -> Trainer:
        trainer = Trainer(os.getpid(), os.getuid(), Hello("test", job, **told))
        self.trainers.attach(trainer)
        return trainer

    @property
    def numbers(self) -> list[int]:
        return [job_dataset.number for job_dataset in self.job_datasets]


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


async def test_read_ahead_is_as_usual_again_when_no_list_of_ranges_is_left(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[tuple[int, ...]] = []
    monkeypatch.setattr(module, "set_read_ahead", lambda _, *kib: changes.append(kib))
    await harness.declared.let_go()
    one = harness.trainer()
    ranges = SampleList("ranges", "train", b"000.@ranges/0-4\0", np.zeros(1, np.int32))
    await harness.declared.declare(one, ranges)
    await harness.declared.let_go(0.0)
    assert changes == [(4,)]
    harness.trainers.detach(one)
    await harness.declared.let_go(0.0)
    assert changes == [(4,), (256, 4)]
    # Another manager does not know what this one has done.
    later = Harness(tmp_path).declared
    await later.let_go()
    assert len(changes) == 2
    await later.let_go(0.0)
    await later.let_go(0.0)
    assert changes[2:] == [(256, 4)]


async def test_what_another_list_names_is_not_forgotten(harness: Harness) -> None:
    one, other = harness.trainer(), harness.trainer()
    await harness.declared.declare(one, sample_list(5))
    await harness.declared.declare(other, sample_list(3))
    harness.trainers.detach(one)
    await harness.declared.let_go(0.0)
    assert [call[2] for call in harness.policy.calls if call[0] == "forget_job_dataset"] == [2]


async def test_what_another_job_declares_meanwhile_is_not_forgotten(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_A_TIME", 2)
    one = harness.trainer()
    await harness.declared.declare(one, sample_list(FILES))
    harness.trainers.detach(one)
    (job_dataset,) = harness.job_datasets
    beside = JobDataset(2, "another", job_dataset.list, tmp_path)
    forget_job_dataset = harness.policy.forget_job_dataset

    def meanwhile(job_dataset_id: str, keys: Iterable[Key]) -> None:
        forget_job_dataset(job_dataset_id, keys)
        if beside.job_dataset_id not in harness.job_datasets:
            harness.job_datasets.put(beside)

    harness.policy.forget_job_dataset = meanwhile  # type: ignore[method-assign]
    await harness.declared.let_go(0.0)
    assert [call[2] for call in harness.policy.calls] == [2, 0, 0]


async def test_a_list_is_forgotten_whole_although_it_is_declared_in_vain_meanwhile(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_A_TIME", 2)
    one, again = harness.trainer(), harness.trainer()
    await harness.declared.declare(one, sample_list(FILES))
    harness.trainers.detach(one)
    over = trio.Event()

    async def fails(*of: Any) -> None:
        await over.wait()
        raise ProtocolError("in vain")

    async def declare() -> None:
        with pytest.raises(ProtocolError, match="in vain"):
            await harness.declared.declare(again, sample_list(FILES))

    monkeypatch.setattr(module, "inodes_of", fails)
    async with trio.open_nursery() as nursery:
        forget_job_dataset = harness.policy.forget_job_dataset

        def meanwhile(job_dataset_id: str, keys: Iterable[Key]) -> None:
            forget_job_dataset(job_dataset_id, keys)
            if len(harness.policy.calls) == 1:
                nursery.start_soon(declare)

        harness.policy.forget_job_dataset = meanwhile  # type: ignore[method-assign]
        await harness.declared.let_go(0.0)
        over.set()
    assert [call[2] for call in harness.policy.calls] == [2, 2, 2]
    assert harness.redirects.withdrawn == [1]


async def test_a_list_stays_that_cannot_be_saved_or_is_declared_meanwhile(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    one = harness.trainer()
    await harness.declared.declare(one, sample_list(4))
    harness.trainers.detach(one)
    harness.scoring.full = True
    await harness.declared.let_go(0.0)
    assert harness.numbers == [1]
    harness.scoring.full = False
    again = harness.trainer()
    harness.scoring.meanwhile = lambda: harness.declared.declare(again, sample_list(4))
    await harness.declared.let_go(0.0)
    assert (harness.numbers, harness.redirects.withdrawn) == ([1], [])
    assert ["unused list (No space left on device)" in text for text in caplog.messages] == [True]


async def test_two_lists_that_come_at_once_do_not_take_the_same_room(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SAMPLES", 5)
    refused: list[int] = []

    async def declare(samples: int) -> None:
        try:
            await harness.declared.declare(harness.trainer(), sample_list(samples))
        except ProtocolError:
            refused.append(samples)

    async with trio.open_nursery() as nursery:
        for samples in (3, 4):
            nursery.start_soon(declare, samples)
    assert (len(harness.numbers), len(refused)) == (1, 1)
