"""A job that declares its list again keeps what it has learned, whatever has become of the list's files meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from test_service import SAMPLES, Harness
from test_two_jobs import EPOCH, Job

from spiderfs.core.engine import Changes
from spiderfs.core.policy import Hub
from spiderfs.daemon.training.job_datasets import declared_lists

CHANGED, GONE = 3, 5


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


async def _learned(harness: Harness) -> Job:
    job = Job(harness, "one", 1)
    await job.attach()
    for batch in EPOCH:
        await job.learn(batch)
    return job


async def test_a_rank_that_comes_after_a_file_has_changed_has_the_scores_of_the_others(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await _learned(harness)
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
    one = await _learned(harness)
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
    one = await _learned(harness)
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
    donor = await _learned(harness)
    for _ in range(2):
        lost = Job(harness, "two", 2, resume=True, scores_from="unknown")
        await lost.attach()
        assert len(lost.warnings) == 2, "each time that it comes back in vain"
        await lost.leave()
    found = Job(harness, "two", 2, scores_from="one")
    await found.attach()
    assert (found.warnings, (await found.scores()).tolist()) == ((), (await donor.scores()).tolist())
