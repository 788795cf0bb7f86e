"""The files of a declared list become other versions, or go: what jobs have learned stays, and plans follow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from test_service import SAMPLES, SIZE, Harness
from test_two_jobs import EPOCH, Job

from spiderfs.core.engine import Changes
from spiderfs.core.policy import Hub
from spiderfs.daemon.caching.cache_control import Superseded
from spiderfs.daemon.training.job_datasets import declared_lists
from spiderfs.protocol import Exchange, Plan
from spiderfs.vfs.catalogue import Catalogue

CHANGED, GONE, NEVER_SEEN = 3, 5, 7


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def _change_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one file of each list that is declared from now on be another version, and one be gone."""
    unchanged = declared_lists.inodes_of

    async def inodes_of(*of: Any) -> npt.NDArray[np.uint64]:
        inodes = await unchanged(*of)
        inodes[CHANGED] += np.uint64(1 << 40)
        inodes[GONE] = 0
        return inodes

    monkeypatch.setattr(declared_lists, "inodes_of", inodes_of)


async def _with_scores(harness: Harness) -> Job:
    job = Job(harness, "one", 1)
    await job.attach()
    for batch in EPOCH:
        await job.learn(batch)
    return job


async def test_a_rank_that_comes_after_a_file_has_changed_has_the_scores_of_the_others(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await _with_scores(harness)
    before, old = (await first.scores()).tolist(), first.job_dataset.list.keys
    _change_files(monkeypatch)
    rank = Job(harness, "one", 2, rank=1, world_size=2, resume=True)
    await rank.attach()
    assert rank.warnings == ()
    assert (await rank.scores()).tolist() == before
    # Both go on with one job dataset, by the files that there are now.
    await first.learn(EPOCH[0])
    assert first.job_dataset is rank.job_dataset
    assert (await rank.scores()).tolist() == (await first.scores()).tolist() != before
    now = first.job_dataset.list.keys
    assert [index for index, (a, b) in enumerate(zip(old, now, strict=True)) if a != b] == [CHANGED, GONE]


async def test_a_job_that_comes_back_after_a_file_has_changed_goes_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await _with_scores(harness)
    before = (await one.scores()).tolist()
    await one.leave()
    _change_files(monkeypatch)
    again = Job(harness, "one", 2, resume=True)
    await again.attach()
    assert (again.warnings, (await again.scores()).tolist()) == ((), before)
    await again.leave()
    await harness.training.declared_lists.let_go(0.0)
    late = Job(harness, "one", 3, resume=True)
    await late.attach()
    assert (late.warnings, (await late.scores()).tolist()) == ((), before)


async def test_files_that_are_gone_get_no_scores(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    one = await _with_scores(harness)
    told: list[int] = []
    feed = harness.training.feed
    hub_found, scored = feed.hub_found, feed.scored

    def noted_hub(hub: Hub) -> Changes:
        told.extend((hub.key, *hub.neighbours))
        return hub_found(hub)

    def noted_scores(job_dataset_id: str, keys: Sequence[int], scores: Sequence[float]) -> None:
        told.extend(keys)
        scored(job_dataset_id, keys, scores)

    _change_files(monkeypatch)
    await Job(harness, "one", 2, rank=1, world_size=2).attach()
    monkeypatch.setattr(feed, "hub_found", noted_hub)
    monkeypatch.setattr(feed, "scored", noted_scores)
    for batch in EPOCH:
        await one.learn(batch)
    assert len(told) > SAMPLES, "hubs too"
    assert 0 not in told


async def test_a_job_that_comes_back_before_it_has_learned_is_told_and_helped_again(harness: Harness) -> None:
    donor = await _with_scores(harness)
    for _ in range(2):
        lost = Job(harness, "two", 2, resume=True, scores_from="unknown")
        await lost.attach()
        assert len(lost.warnings) == 2, "each time that it comes back in vain"
        await lost.leave()
    found = Job(harness, "two", 2, scores_from="one")
    await found.attach()
    assert (found.warnings, (await found.scores()).tolist()) == ((), (await donor.scores()).tolist())


class Source:
    """What readers find when they look names up."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        training = harness.training
        self.catalogue = Catalogue(harness.records)
        self.superseded = Superseded(
            self.catalogue, harness.content, harness.cache, training.declared_lists.superseded, clock=lambda: 1e9
        )

    async def change(self, *samples: int) -> None:
        """Replace these files, have them looked up, and forget the earlier versions."""
        for sample in samples:
            path = b"train/%03d" % sample
            found = self.harness.source.change(path, bytes(SIZE + 1))
            self.catalogue.record(*self.catalogue.parent_of(path), found, 2e9)
        await self.superseded.turn()


async def _plan(harness: Harness, job: Job, epoch: int, begun: bool = True) -> None:
    order = np.arange(SAMPLES, dtype=np.uint32)
    await harness.training.plan(job.trainer, Plan(harness.list.name, epoch, 0, begun, order))


def _planned(harness: Harness) -> list[int]:
    (reader,) = harness.cache.engine.schedule.readers.values()
    return [int(reader.epoch.key(position)) for position in range(SAMPLES)]  # type: ignore[call-overload]


async def test_the_next_plan_names_the_versions_that_there_are(harness: Harness) -> None:
    source, job = Source(harness), Job(harness, "one", 1)
    await job.attach()
    for batch in EPOCH:
        await job.learn(batch)
    scores, old = (await job.scores()).tolist(), job.job_dataset.list.keys
    await _plan(harness, job, 0)
    await _plan(harness, job, 1, begun=False)
    await source.change(CHANGED)
    assert source.catalogue.known(old[CHANGED]) is None, "its path is known no more"
    await _plan(harness, job, 1)
    now = job.job_dataset.list.keys
    assert [index for index in range(SAMPLES) if now[index] != old[index]] == [CHANGED]
    assert source.catalogue.find(*source.catalogue.parent_of(b"train/%03d" % CHANGED)).inode == now[CHANGED]
    assert _planned(harness) == now
    assert (await job.scores()).tolist() == scores
    await _plan(harness, job, 2)
    assert job.job_dataset.list.keys is now, "nothing is looked up again"


async def test_what_is_gone_stays_as_it_was_until_it_comes_back(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, job = Source(harness), Job(harness, "one", 1)
    await job.attach()
    old = job.job_dataset.list.keys
    parent, name = source.catalogue.parent_of(b"train/%03d" % CHANGED)
    source.catalogue.record_gone(parent, name, 2e9)
    await source.superseded.turn()
    await _plan(harness, job, 0)
    assert job.job_dataset.list.keys is old
    await source.change(CHANGED)
    await _plan(harness, job, 1)
    assert job.job_dataset.list.keys is old, "it is not looked for with every plan"
    monkeypatch.setattr(declared_lists, "FOLLOW_AGAIN_S", 0.0)
    await _plan(harness, job, 1)
    assert job.job_dataset.list.keys[CHANGED] not in (0, old[CHANGED])


async def test_two_jobs_that_exchange_go_on_with_the_versions_that_there_are(harness: Harness) -> None:
    source, one, other = Source(harness), Job(harness, "one", 1), Job(harness, "other", 2)
    for job in (one, other):
        await job.attach()
        await _plan(harness, job, 0)
    nothing, some = np.empty(0, np.uint32), np.arange(4, dtype=np.uint32)
    question = Exchange(harness.list.name, 1, 0, 0, 0, nothing, some)
    for job in (one, other):
        assert len(harness.training.exchange(job.trainer, question)) == 4
    await source.change(CHANGED, NEVER_SEEN)
    await _plan(harness, one, 1)
    assert one.job_dataset.list is other.job_dataset.list
    assert not harness.cache.engine.exchange_pending.lists
    harness.training.exchange(one.trainer, Exchange(harness.list.name, 1, 1, 0, 0, nothing, some))
    (shared,) = harness.cache.engine.exchange_pending.lists.values()
    assert shared.keys is one.job_dataset.list.keys
    # The other one's epoch goes on by the files that it was planned with.
    later = Exchange(harness.list.name, 2, 0, 4, 0, some, some + np.uint32(4))
    assert len(harness.training.exchange(other.trainer, later)) == 4
    await harness.training.detached(one.trainer)
    await harness.training.detached(other.trainer)
    assert not harness.cache.engine.exchange_pending.lists


async def test_a_job_that_declared_the_present_versions_shares_its_list_with_who_follows(harness: Harness) -> None:
    source, one, other = Source(harness), Job(harness, "one", 1), Job(harness, "other", 2)
    await one.attach()
    await source.change(CHANGED)
    await other.attach()
    assert one.job_dataset.list is not other.job_dataset.list
    await _plan(harness, one, 0)
    assert one.job_dataset.list is other.job_dataset.list
