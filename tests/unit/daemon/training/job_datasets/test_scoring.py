"""Batches become scores, hubs and places in the cache, each under the sample whose bytes were served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mount_options import options_in
from recording_policy import RecordingPolicy, recorded_cache
from short_lists import job_dataset

from benchmarks.fakes import MemoryContent
from spiderfs.core.events import HIT, Access
from spiderfs.core.feed import PolicyFeed
from spiderfs.daemon.training.job_datasets.job_datasets import JobDataset, JobDatasets
from spiderfs.daemon.training.job_datasets.scoring import BatchScoring
from spiderfs.daemon.training.job_datasets.several_nodes import SeveralNodes
from spiderfs.daemon.training.job_datasets.trainers import Trainers
from spiderfs.metrics import SharedCounters
from spiderfs.protocol import Batch
from spiderfs.scorer.scoring import ScorerOptions

SIZE = 100
# Sample i of the list is this file; the last one is unknown.
INODES = [*range(10, 18), 0]
TRAINER = 1


class Harness:
    def __init__(self, directory: Path, **options: Any) -> None:
        self.content, self.counters = MemoryContent(), SharedCounters(1)
        self.cache, self.policy = recorded_cache(self.content, self.counters.row(0), 100 * SIZE)
        chosen = options_in(directory, **options)
        self.lists, self.scores = JobDatasets(), directory / "scores"
        self.list = self.declare()
        self.feed = PolicyFeed(self.cache.engine, self.cache.size_of)
        no_trainers = Trainers(lambda attached: None, lambda: False)
        counters, alone = self.counters.row(0), SeveralNodes(None, self.lists, no_trainers, self.counters.row(0))
        self.scoring = BatchScoring(
            self.cache, self.feed, self.lists, counters, self.scores, chosen, recording=None, nodes=alone
        )

    def declare(self) -> JobDataset:
        """The list, as a new training declares it."""
        declared = job_dataset(1, INODES, self.scores)
        self.lists.put(declared)
        return declared

    async def learn(self, *indices: int) -> None:
        await self.scoring.learn(TRAINER, self.list, [batch(indices)])

    def calls(self, what: str) -> list[tuple[object, ...]]:
        return [call[1:] for call in self.policy.calls if call[0] == what]

    def scored(self) -> list[object]:
        """The files that the policy has got scores of, in their order, since the last call."""
        keys = [key for key, _ in self.calls("scored")]
        self.policy.calls.clear()
        return keys


def batch(indices: tuple[int, ...]) -> Batch:
    """All samples lie close together."""
    vectors = np.ones((len(indices), 8)) + 0.01 * np.random.default_rng(1).standard_normal((len(indices), 8))
    return Batch("train", 0, 0, np.array(indices, np.uint32), vectors.astype(np.float16), None)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


async def test_scores_go_to_the_samples_whose_bytes_were_served(harness: Harness) -> None:
    harness.scoring.record_accesses(
        [Access(1.0, 15, 11, SIZE, 0, 1, TRAINER, HIT), Access(1.0, 16, 12, SIZE, 0, 1, 0, HIT)]
    )
    await harness.learn(0, 1, 2)
    assert harness.scored() == [10, 12, 15], "what no trainer has read says nothing"
    await harness.learn(0, 1, 2)
    assert harness.scored() == [10, 11, 12]
    harness.scoring.record_accesses([Access(1.0, 15, 11, SIZE, 0, 1, TRAINER, HIT)])
    harness.scoring.forget_reads(TRAINER)
    await harness.learn(1)
    assert harness.scored() == [11]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ScorerOptions()),
        ({"neighbours": 500, "radius": 0.5}, ScorerOptions(neighbours=500, radius=0.5)),
        ({"radius": "class", "radius_share": 0.1}, ScorerOptions(radius="class", radius_share=0.1)),
        ({"embeddings": "raw", "radius": 1.42}, ScorerOptions(radius=1.42, embeddings="raw")),
    ],
    ids=["defaults", "as the mount says", "of a class", "released program"],
)
async def test_samples_are_scored_with_the_options_of_the_mount(
    options: dict[str, Any], expected: ScorerOptions, tmp_path: Path
) -> None:
    harness = Harness(tmp_path, **options)
    await harness.learn(*range(8))
    (scoring,) = harness.list.scorings.values()
    assert scoring.options == expected


async def test_samples_of_no_file_are_left_out(harness: Harness) -> None:
    await harness.learn(8)
    assert harness.policy.calls == []
    harness.scoring.record_accesses([Access(1.0, 99, 10, SIZE, 0, 1, TRAINER, HIT)])
    await harness.learn(0, 1, 8)
    assert harness.scored() == [11], "the first was served a file that the list does not have"


async def test_each_of_the_batches_that_are_scored_together_has_a_hub(harness: Harness) -> None:
    await harness.learn(*range(8))
    harness.policy.calls.clear()
    batches = [batch(tuple(range(4))), batch(tuple(range(4, 8))), batch((8,))]
    await harness.scoring.learn(TRAINER, harness.list, batches)
    hubs = [hub for (hub,) in harness.calls("hub_found")]
    assert len(hubs) == 2, "the file of the third batch is gone"
    assert {hub in INODES[:4] for hub in hubs} == {True, False}


async def test_waiting_rows_that_leave_are_those_whose_scores_are_youngest(harness: Harness) -> None:
    await harness.learn(0, 1)
    assert harness.scored() == [10, 11]
    harness.scoring.record_accesses([Access(1.0, 15, 12, SIZE, 0, 1, TRAINER, HIT)])
    kept = harness.scoring.thinned(TRAINER, harness.list, np.array([0, 1, 2, 3, 2], np.uint32), 2)
    assert kept.tolist() == [3, 4], "samples 3 and 2 were never scored; of two rows of sample 2 the newer is kept"
    assert harness.counters.totals()["hook_rows_left_out"] == 3
    await harness.learn(2)
    assert harness.scored() == [12], "the read of the row that left is done with"


async def test_a_policy_that_was_chosen_while_a_batch_was_scored_does_not_get_it(harness: Harness) -> None:
    class Other(RecordingPolicy):
        scoring = "loss"

    other = Other()
    scoring = harness.list.scoring_for("graph", 8, harness.scoring._options)
    score = scoring.batch

    def meanwhile(*rows: Any) -> object:
        harness.cache.engine.change_policy(other)
        return score(*rows)

    scoring.batch = meanwhile  # type: ignore[method-assign, assignment]
    await harness.learn(0, 1)
    assert (harness.policy.calls, other.calls) == ([], [])
    assert scoring.scored_share > 0


async def test_a_job_dataset_that_leaves_memory_while_it_is_introduced_is_begun_no_more(harness: Harness) -> None:
    """When the policy is changed all job datasets are introduced to the new one, and some may be over by then."""
    await harness.learn(*range(8))
    remember = harness.list.remember

    def meanwhile(name: str, options: ScorerOptions) -> None:
        harness.lists.remove(harness.list)
        remember(name, options)

    harness.list.remember = meanwhile  # type: ignore[method-assign]
    harness.policy.calls.clear()
    await harness.scoring.introduce(harness.list)
    assert (harness.policy.calls, harness.feed.status().jobs) == ([], [])


async def test_batches_that_wait_together_are_ranked_each_by_itself(harness: Harness) -> None:
    harness.cache.set_policy("shade")
    waiting = [
        replace(batch(indices), losses=np.array(losses, np.float16))
        for indices, losses in (((0, 1, 2), (1, 2, 3)), ((3, 4, 5), (40, 60, 50)))
    ]
    await harness.scoring.learn(TRAINER, harness.list, waiting)
    scores = harness.list.scorings["rank"].scores[:6]
    np.testing.assert_allclose(np.exp(scores), [10, 11, 12, 10, 12, 11], rtol=1e-5)
