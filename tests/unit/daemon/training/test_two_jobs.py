"""Two jobs on one list: what one learns, ends and saves is not the other's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from test_service import Harness

from spiderfs.daemon.training.job_datasets.job_datasets import JobDataset
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.protocol import Batch, EpochEnd, Hello, ProtocolError
from spiderfs.scorer.scorer import Scorer

EPOCH = [list(range(first, first + 10)) for first in range(0, 40, 10)]


class Job:
    """A training whose model makes what its seed says of each sample."""

    def __init__(self, harness: Harness, name: str, seed: int, **told: Any) -> None:
        self.harness = harness
        self.trainer = Trainer(os.getpid(), os.getuid(), Hello("test", name, **told))
        self.rng = np.random.default_rng(seed)
        self.warnings: tuple[str, ...] = ()

    async def attach(self) -> None:
        await self.harness.training.attached(self.trainer)
        self.warnings = tuple((await self.harness.training.samples(self.trainer, self.harness.list)).warnings)

    async def learn(self, indices: list[int]) -> None:
        vectors = self.rng.standard_normal((len(indices), 8)).astype(np.float16)
        batch = Batch("train", 0, 0, np.array(indices, np.uint32), vectors)
        await self.harness.training.learn(self.trainer, self.harness.list.name, [batch])

    async def end(self, epoch: int, accuracy: float | None = None) -> None:
        await self.harness.training.epoch_end(self.trainer, EpochEnd(epoch, accuracy))

    async def leave(self) -> None:
        await self.harness.training.detached(self.trainer)

    async def scores(self) -> npt.NDArray[np.float32]:
        return await self.harness.training.scores(self.trainer, self.harness.list.name)

    @property
    def job_dataset(self) -> JobDataset:
        return self.harness.training.trainers.job_dataset_of(self.trainer, "train")

    @property
    def scorer(self) -> Scorer:
        return self.harness.training.scoring.of(self.job_dataset)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


async def learned_alone(directory: Path, name: str, seed: int, epochs: int) -> list[float]:
    directory.mkdir()
    job = Job(Harness(directory), name, seed)
    await job.attach()
    for epoch in range(epochs):
        for batch in EPOCH:
            await job.learn(batch)
        await job.end(epoch)
    return (await job.scores()).tolist()  # type: ignore[no-any-return]


async def test_each_job_has_the_scores_that_it_has_alone(tmp_path: Path) -> None:
    alone = await learned_alone(tmp_path / "one", "one", 1, 3), await learned_alone(tmp_path / "two", "two", 2, 1)
    assert alone[0] != alone[1]

    (tmp_path / "both").mkdir()
    harness = Harness(tmp_path / "both")
    one, two = Job(harness, "one", 1), Job(harness, "two", 2)
    await one.attach()
    await two.attach()
    assert one.job_dataset.list is two.job_dataset.list, "files and labels are there once"
    # One ends three epochs while the other ends its first.
    for epoch in range(3):
        for batch in EPOCH:
            await one.learn(batch)
            if epoch == 1:
                await two.learn(batch)
        await one.end(epoch)
    await two.end(0)
    assert [(await one.scores()).tolist(), (await two.scores()).tolist()] == list(alone)


async def test_the_end_of_an_epoch_is_that_of_one_job_only(harness: Harness) -> None:
    one, two = Job(harness, "one", 1, epochs=10), Job(harness, "two", 2, epoch=4, epochs=10)
    for job in (one, two):
        await job.attach()
        for batch in EPOCH:
            await job.learn(batch)

    def state(name: str) -> tuple[object, ...]:
        (found,) = (job for job in harness.training.feed.status().jobs if job.job_id == name)
        return found.epochs_done, found.sigma, found.beta, found.delta, found.u, found.ratio

    before, radius, scores = state("two"), two.scorer.radius, (await two.scores()).tolist()
    for epoch in range(3):
        await one.end(epoch, 0.1 * epoch)
    assert state("one")[0] == 3
    assert state("two") == before
    assert (two.scorer.radius, (await two.scores()).tolist()) == (radius, scores)
    assert before[0] == 4, "a job goes on with the epoch that it names"


async def _learned(harness: Harness, name: str, **told: Any) -> Job:
    job = Job(harness, name, 1, **told)
    await job.attach()
    for batch in EPOCH:
        await job.learn(batch)
    await job.end(0, 0.5)
    return job


async def test_a_job_that_comes_back_goes_on_and_a_new_one_starts_afresh(harness: Harness) -> None:
    one = await _learned(harness, "one", epochs=9)
    scores = (await one.scores()).tolist()
    (state,) = harness.training.feed.status().jobs
    for grace_s in (60.0, 0.0):
        await one.leave()
        await harness.training.declared_lists.let_go(grace_s)
        assert len(harness.training.job_datasets) == (grace_s > 0)
        new = Job(harness, f"new {grace_s}", 5)
        await new.attach()
        assert (await new.scores()).tolist() == []
        assert [job.epochs_done for job in harness.training.feed.status().jobs if "new" in job.job_id] == [0]
        await new.leave()
        await harness.training.declared_lists.let_go(0.0 if grace_s == 0 else 60.0)
        one = Job(harness, "one", 6, epochs=9, resume=True)
        await one.attach()
        assert one.warnings == ()
        assert (await one.scores()).tolist() == scores
        assert [job for job in harness.training.feed.status().jobs if job.job_id == "one"] == [state]


async def test_scores_of_another_job_are_taken_on_purpose_only(harness: Harness) -> None:
    one = await _learned(harness, "one")
    scores = (await one.scores()).tolist()
    heir = Job(harness, "heir", 2, scores_from="one")
    await heir.attach()
    assert (heir.warnings, (await heir.scores()).tolist()) == ((), scores), "of a job that runs"
    await heir.learn(EPOCH[0])
    assert (await one.scores()).tolist() == scores, "a copy"
    own = (await heir.scores()).tolist()
    assert own != scores
    for job in (one, heir):
        await job.leave()
    await harness.training.declared_lists.let_go(0.0)
    late = Job(harness, "late", 3, scores_from="one")
    await late.attach()
    assert (late.warnings, (await late.scores()).tolist()) == ((), scores), "of a job that is over"
    # A job that has scores of its own keeps them.
    heir = Job(harness, "heir", 2, scores_from="one")
    await heir.attach()
    assert (heir.warnings, (await heir.scores()).tolist()) == ((), own)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), shutil.Error([("a", "b", "[Errno 28] No")])])
async def test_scores_that_cannot_be_copied_leave_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    await _learned(harness, "one")

    def full(source: Path, target: Path) -> None:
        target.mkdir(parents=True)
        (target / "half").write_bytes(b"of it")
        raise error

    heir = Job(harness, "heir", 2, scores_from="one")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copytree", full)
        await heir.attach()
    (warning,) = heir.warnings
    assert warning.startswith("the scores of job one cannot be copied (")
    assert (await heir.scores()).tolist() == []
    assert not heir.job_dataset.directory.exists()
    await heir.learn(EPOCH[0])


async def test_there_may_be_so_many_job_datasets(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spiderfs.daemon.training.job_datasets.declared_lists.MAX_JOB_DATASETS", 2)
    one, two, three = (Job(harness, name, 1) for name in ("one", "two", "three"))
    await one.attach()
    await two.attach()
    with pytest.raises(ProtocolError, match="in 2 lists at most; close the hooks of trainings that are over"):
        await three.attach()
    await one.leave()
    # A job that no one uses leaves memory for it, without waiting.
    await harness.training.samples(three.trainer, harness.list)
    assert {job_dataset.job_id for job_dataset in harness.training.job_datasets} == {"two", "three"}


async def test_pins_of_an_earlier_mount_end_with_the_epoch_of_their_job(harness: Harness) -> None:
    harness.cache.set_policy("impact")
    await harness.training.policy_changed()
    one, two = Job(harness, "one", 1), Job(harness, "two", 2)
    for job in (one, two):
        await job.attach()
    policy: Any = harness.cache.engine.policy
    inodes = one.job_dataset.list.inodes
    for job_dataset_id in (one.job_dataset.job_dataset_id, two.job_dataset.job_dataset_id, "gone/digest"):
        list(policy.pin(job_dataset_id, [int(inodes[0])]))
    await one.end(0)
    assert {job_dataset_id for job_dataset_id, pinned in policy.pinned.items() if pinned} == {
        two.job_dataset.job_dataset_id
    }
    await two.end(0)
    assert not any(policy.pinned.values())
