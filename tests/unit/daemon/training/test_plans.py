"""Plans of trainers on their way into the engine's schedule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mount_options import options_in
from recording_policy import recorded_cache
from short_lists import known_list

from spiderfs.core.feed import PLANNED_RATIO, PolicyFeed, PolicyFeedOptions
from spiderfs.daemon.training.plans import Plans
from spiderfs.protocol import Plan, Progress


class Harness:
    def __init__(self, directory: Path) -> None:
        self.cache, self.policy = recorded_cache()
        self.options = options_in(directory, substitute_when="late")
        self.woken = 0
        self.feed = PolicyFeed(self.cache.engine, self.cache.size_of, PolicyFeedOptions(only_late=True))
        self.unseen: list[tuple[int, int]] = []
        self.plans = Plans(self.cache, self.feed, self.options, self._wake, self.unseen.extend, lambda inode: 1)
        self.list = known_list([10, 11, 12, 10])
        self.feed.begin("job_dataset", "job", self.list.label_of)

    def _wake(self) -> None:
        self.woken += 1

    async def plan(self, trainer: int, *order: int, epoch: int = 0) -> None:
        plan = Plan("train", epoch, 0, True, np.array(order, np.uint32))
        await self.plans.take(trainer, self.list, plan)

    @property
    def readers(self) -> list[object]:
        return sorted(trainer for trainer, _ in self.cache.engine.schedule.readers)  # type: ignore[type-var]


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


async def test_a_plan_wakes_the_prefetcher_and_shares_the_cache_in_another_way(harness: Harness) -> None:
    await harness.plan(1, 0, 1, 3, 2)
    assert (harness.readers, harness.woken) == ([1], 1)
    assert harness.policy.ratio == PLANNED_RATIO
    (reader,) = harness.cache.engine.schedule.trusted
    assert [key for _, key in reader.coming(9)] == [10, 11, 10, 12], "one file is two samples of the list"
    harness.plans.trainer_left(1)
    harness.feed.schedule_changed()
    assert (harness.readers, harness.policy.ratio) == ([], 0.9)


@pytest.mark.parametrize("ends_by", ["the trainer leaves", "plan=off"])
async def test_progress_wakes_the_prefetcher_and_what_no_one_opened_is_reported_once(
    harness: Harness, ends_by: str
) -> None:
    await harness.plan(1, 0, 1, 3, 2)
    harness.plans.progressed(1, Progress("train", 0, 0, 0))
    harness.plans.progressed(1, Progress("train", 0, 4, 2))
    assert harness.woken == 3
    (reader,) = harness.cache.engine.schedule.trusted
    assert (reader.dispatched, reader.taken, [key for _, key in reader.coming(9)]) == (4, 2, [10, 12])
    assert harness.unseen == [], "news of opens may be on its way"
    harness.cache.engine.wanted(1, 11, 0.0)
    if ends_by == "plan=off":
        harness.plans.change(harness.options.changed("plan", "off"))
    harness.plans.trainer_left(1)
    assert harness.unseen == [(1, 10)]
