"""From what trainers say to scores, hubs and redirects, with everything in memory."""

from __future__ import annotations

import gc
import math
import os
import random
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
import trio.testing
from mount_options import options_in

from benchmarks.fakes import MemoryContent, MemorySource
from spiderfs.core.engine import Changes
from spiderfs.core.events import FETCHED, HIT, OPENED, REFUSED, WARMED, Access, Candidates, Epoch, Labels, Ratio, Scored
from spiderfs.core.homes import Homes
from spiderfs.core.policy import PINNED, Hub
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training import service
from spiderfs.daemon.training.job_datasets.declared_lists import GRACE_S
from spiderfs.daemon.training.job_datasets.job_datasets import KEPT_JOB_DATASETS
from spiderfs.daemon.training.service import Training
from spiderfs.daemon.training.trainer import Declared, SampleList, Trainer
from spiderfs.errors import ProtocolError
from spiderfs.linux import steady_clock
from spiderfs.metrics import SharedCounters
from spiderfs.protocol import Batch, EpochEnd, Hello, Plan, Progress
from spiderfs.scorer.scoring import ScorerOptions
from spiderfs.shared.published import publish_trainers, published_trainers
from spiderfs.simulation import rescored
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.store.store import ContentKey
from spiderfs.trace import Recording, TracedBatch, read_trace
from spiderfs.vfs.catalogue import TABLES, Catalogue
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.on_demand import Supply
from spiderfs.vfs.redirects import each_redirect

SAMPLES, SIZE = 40, 100


class Harness:
    def __init__(
        self,
        directory: Path,
        policy: str = "spider",
        recording: Recording | None = None,
        immutable: bool = False,
        cluster: str = "",
        samples: int = SAMPLES,
        homes: Homes | None = None,
    ) -> None:
        self.source = MemorySource()
        for number in range(samples):
            self.source.add(b"train/%03d" % number, bytes(SIZE))
        records = MemoryRecords(TABLES)
        catalogue = Catalogue(records)
        client = SourceClient(self.source, SourceLimits(), rng=random.Random(1), on_event=lambda event: None)
        self.counters = SharedCounters(1)
        counters = self.counters.row(0)
        self.records, self.content = records, MemoryContent()
        self.names_asked = True
        self.cache = CacheControl(self.content, policy, 0.5, counters, homes=homes)
        self.cache.restore(10 * SIZE, None)
        self.trainers_file = directory / "trainers"
        options = options_in(directory, immutable=immutable, cluster=cluster)
        self.options = options
        # Nothing of a training fetches.
        fetcher: Any = None
        self.training = Training(
            Supply(self.content, records, client, catalogue, Lister(catalogue, client), fetcher, counters),
            self.cache,
            partial(publish_trainers, self.trainers_file),
            directory / "scores",
            options,
            recording,
            lambda: None,
            lambda: self.names_asked,
        )
        self.trainer = Trainer(os.getpid(), os.getuid(), Hello("test", "test"))
        self.list = listed([b"train/%03d" % number for number in range(samples)])

    @property
    def inodes(self) -> list[int]:
        (job_dataset,) = self.training.job_datasets
        found: list[int] = job_dataset.list.inodes.tolist()
        return found

    async def declare(self, sends_batches: bool = False) -> Declared:
        await self.training.attached(self.trainer)
        return await self.training.samples(self.trainer, replace(self.list, sends_batches=sends_batches))

    async def batch(
        self, rng: np.random.Generator, indices: list[int], losses: npt.NDArray[np.float16] | None = None
    ) -> None:
        """A batch in which samples of all labels lie so close together that only labels tell them apart."""
        await self.batches(rng, [indices], losses)

    async def batches(
        self, rng: np.random.Generator, waiting: list[list[int]], losses: npt.NDArray[np.float16] | None = None
    ) -> None:
        """Such batches that wait together, each with these losses."""
        made = []
        for indices in waiting:
            for index in indices:
                self.content.land(ContentKey(self.inodes[index]), bytes(SIZE))
                self.cache.fold(_events(self.inodes[index]))
            vectors = (np.ones((len(indices), 8)) + 0.1 * rng.standard_normal((len(indices), 8))).astype(np.float16)
            made.append(Batch(self.list.name, 0, 0, np.array(indices, np.uint32), vectors, losses))
        await self.training.learn(self.trainer, self.list.name, made)


def _events(inode: int) -> list[Access]:
    return [Access(1.0, inode, inode, SIZE, 0, 1, 0, FETCHED)]


def listed(paths: list[bytes], name: str = "train") -> SampleList:
    labels = np.arange(len(paths), dtype=np.int32) % 3
    return SampleList(name, name, b"".join(path + b"\0" for path in paths), labels)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


async def test_unknown_paths_are_counted_and_the_others_are_found(harness: Harness) -> None:
    harness.list = listed([b"train/003", b"train/gone", b"nowhere/1", b"", b"train/001"])
    # The empty path lies outside of the mount, which the hook has said.
    assert await harness.declare() == Declared(2)
    assert [inode > 0 for inode in harness.inodes] == [True, False, False, False, True]
    (attached,) = published_trainers(harness.trainers_file)
    assert (attached.pid, attached.job_dataset_numbers) == (os.getpid(), ())
    await harness.training.detached(harness.trainer)
    assert published_trainers(harness.trainers_file) == []


async def test_a_list_is_declared_when_workers_have_the_kernel_ask_for_names(tmp_path: Path) -> None:
    """Else the kernel would drop what was pushed for the plan that comes next."""
    harness = Harness(tmp_path, immutable=True)

    async def declare() -> None:
        await harness.training.samples(harness.trainer, harness.list)

    await harness.training.attached(harness.trainer)
    harness.names_asked = False
    with trio.fail_after(20):
        await declare()
    harness.list = replace(harness.list, sends_batches=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(declare)
        await trio.testing.wait_all_tasks_blocked(0.002)
        assert len(nursery.child_tasks) == 1
        harness.names_asked = True
    harness.names_asked = False
    with trio.fail_after(20):
        await declare()


async def test_the_first_batch_of_a_list_that_announced_none_waits_for_that_too(tmp_path: Path) -> None:
    harness = Harness(tmp_path, immutable=True)
    scored: list[bool] = []

    async def learn(*_: object) -> None:
        scored.append(harness.names_asked)

    harness.training.scoring.learn = learn  # type: ignore[method-assign]
    await harness.declare()
    harness.names_asked = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(harness.batch, np.random.default_rng(3), [*range(8)])
        await trio.testing.wait_all_tasks_blocked(0.002)
        (attached,) = published_trainers(harness.trainers_file)
        assert (attached.sends_batches, scored) == (True, [])
        harness.names_asked = True
    assert scored == [True]


async def test_a_list_with_other_labels_is_declared_when_workers_give_no_substitutes_by_the_old_ones(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_ASKED_S", math.inf)
    await harness.declare(sends_batches=True)
    await harness.batch(np.random.default_rng(3), [*range(8)])
    harness.names_asked = False
    with trio.fail_after(20):
        await harness.training.samples(harness.trainer, harness.list)
    harness.list = replace(harness.list, labels=harness.list.labels[::-1].copy())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(harness.training.samples, harness.trainer, harness.list)
        with trio.fail_after(20):
            while published_trainers(harness.trainers_file)[0].job_dataset_numbers:
                await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked(0.002)
        assert len(nursery.child_tasks) == 1
        harness.names_asked = True


@pytest.mark.parametrize(("policy", "immutable"), [("lru", True), ("spider", False)])
async def test_where_no_one_will_be_given_substitutes_nothing_is_waited_for(
    tmp_path: Path, policy: str, immutable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_ASKED_S", math.inf)
    harness = Harness(tmp_path, policy, immutable=immutable)
    harness.names_asked = False
    with trio.fail_after(20):
        await harness.declare(sends_batches=True)
    (attached,) = published_trainers(harness.trainers_file)
    assert attached.sends_batches == (policy == "spider")


async def test_only_who_sends_batches_of_a_list_is_given_substitutes_by_it(harness: Harness) -> None:
    """A plan never changes what a reader gets, also where an earlier hook's scores and hubs are of the same list."""
    await harness.declare()
    await harness.batch(np.random.default_rng(3), [*range(8)])
    (attached,) = published_trainers(harness.trainers_file)
    assert attached.job_dataset_numbers == (1,)
    await harness.training.detached(harness.trainer)
    await harness.declare()
    await harness.training.plan(harness.trainer, planned([5, 3]))
    await harness.training.epoch_end(harness.trainer, EpochEnd(0, 0.5))
    (attached,) = published_trainers(harness.trainers_file)
    assert attached.job_dataset_numbers == ()
    assert await harness.training.scores(harness.trainer, harness.list.name) is not None


async def test_reads_of_rows_that_are_left_out_are_done_with_too(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next batch would be filed under what an earlier read of its samples was given."""
    monkeypatch.setattr("spiderfs.daemon.training.job_datasets.scoring.ROWS_AT_ONCE", 1)
    await harness.declare()
    one, other = harness.inodes[1], harness.inodes[4]
    number = published_trainers(harness.trainers_file)[0].number
    ones = np.ones((1, 8), np.float16)

    def read(wanted: int, given: int) -> None:
        harness.training.record_accesses([Access(1.0, wanted, given, SIZE, 0, 1, number, HIT)])

    read(one, other)
    read(harness.inodes[0], harness.inodes[0])
    # Of two batches of one row, one row is scored: that of sample 0, which comes first.
    batches = [Batch("train", 0, step, np.array([index], np.uint32), ones, None) for step, index in enumerate((0, 1))]
    await harness.training.learn(harness.trainer, harness.list.name, batches)
    read(one, one)
    await harness.training.learn(harness.trainer, harness.list.name, batches[1:])
    (job_dataset,) = harness.training.job_datasets
    scoring = harness.training.scoring.of(job_dataset)
    assert (job_dataset.thinning.rows_left_out, round(scoring.scored_share * SAMPLES)) == (1, 2)
    assert sorted(scoring.index.present().tolist()) == [0, 1]


async def test_every_redirect_is_of_one_label_and_of_the_list(harness: Harness) -> None:
    await harness.declare()
    harness.training.pin_ratio(0.5)
    rng, seen = np.random.default_rng(3), 0
    label = dict(zip(harness.inodes, harness.list.labels.tolist(), strict=True))
    for epoch in range(4):
        for _ in range(10):
            await harness.batch(rng, rng.permutation(SAMPLES)[:8].tolist())
            rows = list(each_redirect(harness.records))
            seen += len(rows)
            assert all(job_dataset == 1 and label[wanted] == label[given] for wanted, job_dataset, given in rows)
            members = harness.cache.engine.members
            assert all(given in members and wanted not in members for wanted, _, given in rows)
        await harness.training.epoch_end(harness.trainer, EpochEnd(epoch, 0.5))
    assert seen > 0
    scores = await harness.training.scores(harness.trainer, harness.list.name)
    assert len(scores) == SAMPLES
    assert (scores > 0).all()
    harness.training.redirects.begin()
    assert list(each_redirect(harness.records)) == []


LOSSES = np.array([0.5, 4.0, 2.0, 1.0], np.float16)


async def test_batches_without_losses_say_nothing_to_a_policy_that_needs_them(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "shade")
    await harness.declare()
    await harness.batch(np.random.default_rng(1), [3, 4])
    assert [harness.cache.engine.score(harness.inodes[index]) for index in (3, 4)] == [0, 0]
    (job_dataset,) = harness.training.job_datasets
    assert dict(harness.training.scoring.of(job_dataset).described())["without losses"].startswith("1 ")
    assert "recall" not in dict(await harness.training.scoring.described(job_dataset, 10))


async def test_each_kind_of_scores_is_kept_while_another_policy_uses_its_own(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "shade")

    async def change(name: str) -> None:
        harness.cache.set_policy(name)
        await harness.training.policy_changed()

    await harness.declare()
    rng = np.random.default_rng(1)
    await harness.batch(rng, [3, 4, 5, 6], LOSSES)
    ranks = await harness.training.scores(harness.trainer, harness.list.name)
    await change("spider")
    assert len(await harness.training.scores(harness.trainer, harness.list.name)) == 0
    await harness.batch(rng, list(range(16)))
    assert harness.cache.engine.score(harness.inodes[4]) not in (0, ranks[4])
    await change("shade")
    assert (await harness.training.scores(harness.trainer, harness.list.name)).tolist() == ranks.tolist()
    assert harness.cache.engine.score(harness.inodes[4]) == pytest.approx(np.log(13))
    # All that was learned is there after a remount, whichever policy is the first to ask.
    harness.training.scoring.save()
    (job_dataset,) = harness.training.job_datasets
    job_dataset.scorings.clear()
    await change("spider")
    assert harness.cache.engine.score(harness.inodes[4]) > 0
    await change("shade")
    assert harness.cache.engine.score(harness.inodes[4]) == pytest.approx(np.log(13))


async def test_scores_of_lists_long_unused_are_deleted(harness: Harness, tmp_path: Path) -> None:
    await harness.declare()
    await harness.batch(np.random.default_rng(1), list(range(16)))
    harness.training.scoring.save()
    scores = tmp_path / "scores"
    (job,) = scores.iterdir()
    (in_use,) = job.iterdir()
    for number in range(KEPT_JOB_DATASETS + 2):
        # Two of them are of one job.
        saved = scores / f"{number // 2:032x}" / f"{number}"
        saved.mkdir(parents=True)
        (saved / "scores.npz").write_bytes(b"of an earlier training")
        os.utime(saved, (1e9 + number, 1e9 + number))
    # What an older version has saved had no directory for a job.
    (scores / "0123456789abcdef").mkdir()
    (scores / "0123456789abcdef" / "scores.npz").write_bytes(b"of an older version")
    # Even if it were the oldest of all: it is not written again if that fails.
    (job_dataset,) = harness.training.job_datasets
    job_dataset.scorings.clear()
    os.utime(in_use, (1.0, 1.0))
    harness.training.scoring.save()
    latest = {str(number) for number in range(2, KEPT_JOB_DATASETS + 2)}
    assert {path.name for path in scores.glob("*/*")} == {in_use.name, *latest}
    assert len(list(scores.iterdir())) == 1 + KEPT_JOB_DATASETS // 2


def known_scores(harness: Harness, inodes: list[int]) -> int:
    return sum(harness.cache.engine.score(inode) > 0 for inode in inodes)


@pytest.fixture
def clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(rate=1.0)


@pytest.mark.parametrize("policy", ["spider", "shade", "impact"])
async def test_a_list_that_no_one_uses_is_let_go_after_a_while(
    tmp_path: Path, policy: str, clock: trio.testing.MockClock
) -> None:
    harness = Harness(tmp_path, policy)
    await harness.declare()
    inodes, job_dataset_id = harness.inodes, next(iter(harness.training.job_datasets)).job_dataset_id
    await harness.batch(np.random.default_rng(1), list(range(30)), np.ones(30, np.float16))
    scores = [harness.cache.engine.score(inode) for inode in inodes[:30]]
    members = set(harness.cache.engine.members)
    assert known_scores(harness, inodes) > len(members)
    clock.jump(10 * GRACE_S)
    await harness.training.declared_lists.let_go()
    assert [job_dataset.job_dataset_id for job_dataset in harness.training.job_datasets] == [job_dataset_id], (
        "a trainer uses it"
    )
    await harness.training.detached(harness.trainer)
    for _ in range(3):
        await harness.training.declared_lists.let_go()
        clock.jump(GRACE_S / 4)
    # Who comes again in time finds it as it was.
    kept = harness.training.job_datasets.get(job_dataset_id)
    await harness.declare()
    assert harness.training.job_datasets.get(job_dataset_id) is kept
    clock.jump(10 * GRACE_S)
    await harness.training.declared_lists.let_go()
    assert harness.training.job_datasets.get(job_dataset_id) is kept
    await harness.training.detached(harness.trainer)
    gone = weakref.ref(kept)
    del kept
    await harness.training.declared_lists.let_go()
    clock.jump(GRACE_S)
    await harness.training.declared_lists.let_go()
    gc.collect()
    assert gone() is None
    assert list(harness.training.job_datasets) == []
    assert list(each_redirect(harness.records)) == []
    assert known_scores(harness, inodes) <= len(members)
    assert set(harness.cache.engine.members) == members
    # And finds what was learned when it is declared again, under its old number.
    await harness.declare()
    assert [job_dataset.number for job_dataset in harness.training.job_datasets] == [1]
    assert [harness.cache.engine.score(inode) for inode in inodes[:30]] == pytest.approx(scores)


async def test_all_lists_together_may_have_so_many_samples(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spiderfs.daemon.training.job_datasets.declared_lists.MAX_SAMPLES", SAMPLES + 10)
    await harness.declare()
    other = Trainer(os.getpid(), os.getuid(), Hello("other", "test"))
    await harness.training.attached(other)
    await harness.training.samples(other, harness.list)
    part = listed([b"train/%03d" % number for number in range(11)], "part")
    with pytest.raises(ProtocolError, match="all jobs of this mount together") as refused:
        await harness.training.samples(other, part)
    assert refused.value.code == "too-large"
    # Those that no one uses are let go for it, without waiting.
    await harness.training.detached(other)
    await harness.training.detached(harness.trainer)
    await harness.training.attached(other)
    await harness.training.samples(other, part)
    assert [len(job_dataset.list.keys) for job_dataset in harness.training.job_datasets] == [11]


async def test_other_policies_still_give_scores(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "lru")
    await harness.declare()
    await harness.batch(np.random.default_rng(1), list(range(16)))
    assert len(await harness.training.scores(harness.trainer, harness.list.name)) == SAMPLES
    assert list(each_redirect(harness.records)) == []


# -- plans


def planned(order: list[int], epoch: int = 0, position: int = 0, begun: bool = True) -> Plan:
    return Plan("train", epoch, position, begun, np.array(order, np.uint32))


@pytest.mark.parametrize("immutable", [True, False])
async def test_what_the_page_cache_answered_is_an_access_where_opens_are_not_seen(
    tmp_path: Path, immutable: bool
) -> None:
    recording = Recording(tmp_path / "trace")

    harness = Harness(tmp_path, "lru", recording, immutable=immutable)
    await harness.declare()
    guide, (first, second, third) = harness.training, harness.inodes[:3]
    await guide.plan(harness.trainer, planned([0, 1, 2]))
    guide.progressed(harness.trainer, Progress("train", 0, 0, 0))
    # One is seen, one is a member that is read unseen, and one is not in the cache.
    for inode in (first, second):
        harness.content.land(ContentKey(inode), bytes(SIZE))
    harness.cache.fold([*_events(second), Access(1.0, first, first, SIZE, 0, 1, 1, FETCHED)])
    guide.progressed(harness.trainer, Progress("train", 0, 3, 3))
    await guide.detached(harness.trainer)
    recording.flush()
    columns = read_trace(tmp_path / "trace").columns
    unseen = columns["unseen"] != 0
    assert columns["given"][unseen].tolist() == ([second, third] if immutable else [])
    assert set(columns["given_size"][unseen].tolist()) == ({SIZE} if immutable else set())
    assert set(harness.cache.engine.members) == {first, second}
    order = list(harness.cache.engine.policy.eviction_order())
    assert order == ([first, second] if immutable else [second, first]), "the policy heard of the unseen read"
    recording.close()


async def test_who_asks_for_jobs_sees_what_was_read_unseen_until_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tmp_path, immutable=True)
    await harness.declare()
    guide = harness.training
    await guide.plan(harness.trainer, planned([0, 1, 2]))
    guide.progressed(harness.trainer, Progress("train", 0, 0, 0))
    guide.progressed(harness.trainer, Progress("train", 0, 3, 2))
    assert [job["page_cache_reads"] for job in harness.training.jobs()] == [0]
    later_s = steady_clock.now() + 2
    monkeypatch.setattr(steady_clock, "now", lambda: later_s)
    assert [job["page_cache_reads"] for job in harness.training.jobs()] == [2]


async def test_plans_are_not_acted_on_while_the_option_is_off(harness: Harness) -> None:
    await harness.declare()
    schedule = harness.cache.engine.schedule
    await harness.training.plan(harness.trainer, planned([5, 3]))
    assert schedule.active
    harness.training.change(harness.options.changed("plan", "off"))
    assert (schedule.active, schedule.readers) == (False, {})
    await harness.training.plan(harness.trainer, planned([5, 3]))
    assert not schedule.active
    harness.training.change(harness.options)
    await harness.training.plan(harness.trainer, planned([5, 3], position=1))
    assert schedule.active
    assert schedule.next_use_s(harness.inodes[5]) is None


async def test_a_full_disk_is_no_reason_to_fail(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    await harness.declare()
    assert len(published_trainers(harness.trainers_file)) == 1
    # A name that is taken stands for a disk that is full.
    harness.trainers_file.with_suffix(".new").mkdir()
    await harness.training.detached(harness.trainer)
    assert published_trainers(harness.trainers_file) == [], "rather no one than who has left"
    harness.training.begin(None)
    assert harness.cache.engine.schedule.readers == {}
    assert [record.getMessage() for record in caplog.records] == [
        "workers do not learn of trainers (Is a directory): their plans and substitutes rest"
    ] * 2


async def test_the_lowest_rank_on_a_mount_ends_the_epochs_of_its_job(harness: Harness) -> None:
    """Of a training on several nodes, one mount has rank 0, and the others have higher ranks alone."""
    ranks = [Trainer(os.getpid(), os.getuid(), Hello("job", "test", rank=rank, world_size=8)) for rank in (6, 4, 5)]
    for trainer in ranks:
        await harness.training.attached(trainer)
        await harness.training.samples(trainer, harness.list)
    higher, lowest, between = ranks
    feed, told = harness.training.feed, []
    end = feed.epoch_ended

    def note(job_id: str, epoch: int, *rest: Any) -> Changes:
        told.append(epoch)
        return end(job_id, epoch, *rest)

    feed.epoch_ended = note  # type: ignore[method-assign]
    for trainer, epoch in ((higher, 0), (lowest, 0), (between, 0), (lowest, 1)):
        await harness.training.epoch_end(trainer, EpochEnd(epoch, 0.5))
    assert told == [0, 1]
    await harness.training.detached(lowest)
    for trainer, epoch in ((between, 1), (higher, 1), (between, 2), (higher, 2)):
        await harness.training.epoch_end(trainer, EpochEnd(epoch, 0.5))
    assert told == [0, 1, 2]
    # A training that begins again.
    await harness.training.epoch_end(between, EpochEnd(0, 0.5))
    assert told == [0, 1, 2, 0]


@pytest.mark.parametrize(("policy", "scoring"), [("spider", "graph"), ("shade", "rank"), ("lru", "graph")])
async def test_what_is_recorded_gives_the_same_scores_again(tmp_path: Path, policy: str, scoring: str) -> None:
    path = tmp_path / "trace"

    recording = Recording(path)
    harness = Harness(tmp_path, policy, recording)
    # Some that are unknown, and one that is named twice.
    names = [b"train/%03d" % number for number in range(SAMPLES)]
    harness.list = listed([b"gone/1", *names[:9], b"train/gone", *names[9:], b"gone/2", names[3]])
    await harness.declare()
    rng = np.random.default_rng(2)
    known = np.flatnonzero(harness.inodes)
    for epoch in range(3):
        for together in (1, 2, 1, 3, 1):
            served, wanted = rng.choice(known, 2)
            harness.training.record_accesses(
                [Access(1.0, harness.inodes[served], harness.inodes[wanted], SIZE, 0, 1, 1, HIT)]
            )
            waiting = [rng.permutation(known)[:8].tolist() for _ in range(together)]
            waiting[0][0] = int(wanted)
            await harness.batches(rng, waiting, rng.random(8).astype(np.float16))
        await harness.training.epoch_end(harness.trainer, EpochEnd(epoch, epoch / 4))
    recording.close()
    trace = read_trace(path)
    assert trace.accuracies() == {"1": [0, 0.25, 0.5]}
    assert sum(isinstance(event, TracedBatch) for _, event in trace.events) == 24
    hints = rescored(trace, scoring, ScorerOptions()).hints
    assert sum(len(hint.scores) for _, hint in hints if isinstance(hint, Scored)) > 15 * 7
    if policy != "lru":
        kinds = Labels, Scored, Epoch, Ratio
        found, recorded = ([some for some in both if isinstance(some[1], kinds)] for both in (hints, trace.hints()))
        assert found == recorded
        candidates = [(at, hub) for at, hint in hints if isinstance(hint, Candidates) for hub in hint.hubs]
        hubs = [some for some in trace.hints() if isinstance(some[1], Hub)]
        assert all(hub in candidates for hub in hubs)
        assert bool(hubs) == (policy == "spider")


def pinned(harness: Harness) -> list[int]:
    """The samples whose files are in that section, by their places in the list."""
    members = harness.cache.engine.members
    return [
        place for place, inode in enumerate(harness.inodes) if inode in members and members[inode].section == PINNED
    ]


async def said(harness: Harness, *indices: int) -> int:
    return await harness.training.pin(harness.trainer, harness.list.name, np.array(indices, np.uint32))


async def test_the_cache_is_static_while_a_trainer_says_that_it_warms_up(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "impact")
    await harness.declare()
    guide, rng = harness.training, np.random.default_rng(1)
    await guide.warm_up(harness.trainer, harness.list.name, True)
    for epoch in range(2):
        for first in (0, 10, 20):
            losses = np.arange(first, first + 10).astype(np.float16) + 1
            await harness.batch(rng, [*range(first, first + 10)], losses)
        await guide.epoch_end(harness.trainer, EpochEnd(epoch))
        kept = {harness.inodes.index(inode) for inode in harness.cache.engine.members if isinstance(inode, int)}
        assert kept <= {*range(10)}
    await guide.warm_up(harness.trainer, harness.list.name, False)
    await harness.batch(rng, [29])
    assert harness.inodes[29] in harness.cache.engine.members


async def test_pins_end_with_the_trainer_and_with_the_policy(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "impact")
    await harness.declare()
    await harness.batch(np.random.default_rng(1), [*range(10)], np.ones(10, np.float16))
    await said(harness, 5, 4)
    harness.cache.set_policy("icache")
    await harness.training.policy_changed()
    assert pinned(harness) == []
    await said(harness, 5, 4)
    assert pinned(harness) == [4, 5]
    await harness.training.detached(harness.trainer)
    assert pinned(harness) == []


async def test_pins_end_with_a_trainer_although_there_is_no_time_to_unpin_them(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "impact")
    await harness.declare()
    again = replace(harness.list, name="again")
    await harness.training.samples(harness.trainer, again)
    await harness.batch(np.random.default_rng(1), [*range(10)], np.ones(10, np.float16))
    await said(harness, 5)
    assert await harness.training.pin(harness.trainer, again.name, np.array([4], np.uint32)) == 1
    assert pinned(harness) == [4, 5]
    with trio.CancelScope() as scope:
        scope.cancel()
        await harness.training.detached(harness.trainer)
    await harness.declare()
    await harness.training.epoch_end(harness.trainer, EpochEnd(0, 0.5))
    assert pinned(harness) == []


async def test_a_trace_has_every_access_of_a_reader(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "trace")

    harness = Harness(tmp_path, recording=recording)
    await harness.declare()
    one, two = harness.inodes[:2]
    for where, block in ((FETCHED, 0), (HIT, 0), (WARMED, 0), (OPENED, 0), (REFUSED, 0), (HIT, 4)):
        access = Access(1.0, one, one, SIZE, block, 4321, 0, where)
        harness.training.on_access(access, offered=where != REFUSED)
    harness.training.on_access(Access(1.0, two, one, 70, 0, 4321, 1, HIT), offered=True)
    recording.close()
    trace = read_trace(tmp_path / "trace")
    accesses = trace.accesses()
    one = accesses.keys[0]
    assert accesses.keys == [one, one, one, (one, 4), one]
    assert accesses.sizes == [SIZE] * 5
    assert accesses.job_dataset_ids == ["", "", "", "", "1"]
    assert (trace.columns["given"] == trace.columns["key"]).tolist() == [True] * 4 + [False]
    assert trace.columns["given_size"].tolist() == [SIZE] * 4 + [70]
    assert trace.columns["unoffered"].tolist() == [0, 0, 1, 0, 0]
    assert trace.served_ratio() == pytest.approx(3 / 5)
