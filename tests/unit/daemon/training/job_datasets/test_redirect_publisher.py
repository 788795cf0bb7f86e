"""Redirects of a policy become rows of the table, for the job datasets that are in memory."""

from __future__ import annotations

import pytest
import trio
from recording_policy import recorded_cache
from short_lists import job_dataset

from spiderfs.core.feed import PolicyFeed
from spiderfs.daemon.training.job_datasets.declared_lists import RedirectPublisher
from spiderfs.daemon.training.job_datasets.job_datasets import JobDatasets
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs.catalogue import TABLES
from spiderfs.vfs.redirects import each_redirect, redirect_row


class Harness:
    def __init__(self) -> None:
        self.cache, self.policy = recorded_cache()
        feed = PolicyFeed(self.cache.engine, self.cache.size_of)
        self.records, self.job_datasets = MemoryRecords(TABLES), JobDatasets()
        self.job_datasets.put(job_dataset(1, [10, 11, 12]))
        self.job_datasets.put(job_dataset(2, [11, 12, 13]))
        self.redirects = RedirectPublisher(feed, self.records, self.job_datasets)

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """Wanted inode, job dataset, substitute."""
        return sorted(each_redirect(self.records))


@pytest.fixture
def harness() -> Harness:
    return Harness()


async def test_changes_are_written_once_and_those_of_unknown_job_datasets_never(harness: Harness) -> None:
    harness.policy.changes = [("job/digest 1", 10, 11), ("job/digest 2", 12, 13), ("job/digest 3", 10, 12)]
    await harness.redirects.publish()
    assert harness.rows == [(10, 1, 11), (12, 2, 13)]
    harness.policy.changes = [("job/digest 1", 10, None)]
    await harness.redirects.publish()
    assert harness.rows == [(12, 2, 13)]


async def test_an_earlier_managers_rows_go_and_all_redirects_can_be_written_again(harness: Harness) -> None:
    harness.records.put([redirect_row(7, 10, 12)])
    harness.redirects.begin()
    assert harness.rows == []
    harness.policy.substitutes = {("job/digest 1", 10): 11}
    await harness.redirects.publish()
    assert harness.rows == [], "the policy has told of it before"
    harness.records.put([redirect_row(7, 10, 12)])
    await harness.redirects.publish_all()
    assert harness.rows == [(10, 1, 11)]


async def test_a_job_dataset_that_leaves_takes_its_rows_along(harness: Harness) -> None:
    harness.policy.changes = [("job/digest 1", 12, 11), ("job/digest 2", 12, 13)]
    await harness.redirects.publish()
    first = harness.job_datasets.get("job/digest 1")
    await harness.redirects.withdraw(first)
    assert harness.rows == [(12, 2, 13)]


async def test_changes_that_were_drawn_first_are_written_first(harness: Harness) -> None:
    """While one writer waits for its thread, another draws what has changed since: the later word must last."""
    put, order = harness.records.put, list[object]()

    def slowly(rows: object) -> None:
        if not order:
            order.append("slow")
            trio.from_thread.run_sync(setattr, harness.policy, "changes", [("job/digest 1", 10, None)])
            trio.from_thread.run(trio.sleep, 0.05)
        put(rows)  # type: ignore[arg-type]

    harness.records.put = slowly  # type: ignore[method-assign]
    harness.policy.changes = [("job/digest 1", 10, 11)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(harness.redirects.publish)
        while not order:
            await trio.sleep(0.001)
        nursery.start_soon(harness.redirects.publish)
    assert harness.rows == []


async def test_a_file_has_a_substitute_if_some_job_dataset_in_memory_has_one_for_it(harness: Harness) -> None:
    harness.policy.substitutes = {("job/digest 2", 12): 13, ("job/digest 3", 10): 11}
    assert [harness.redirects.has_substitute(inode) for inode in (10, 12)] == [False, True]
    harness.cache.set_policy("lru")
    assert not harness.redirects.has_substitute(12)
    await harness.redirects.publish()
