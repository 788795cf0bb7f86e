"""One training on several mounts: the one with rank 0 scores the rows of all, over a real server."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import trio
from several_managers import sharing
from test_service import SIZE, Harness
from waiting import PATIENCE_S, eventually

from benchmarks.common.embeddings import Embeddings
from benchmarks.common.redis_server import RedisServer
from spiderfs import cluster
from spiderfs.cluster import SharedHub, SharedScores, Stream, StreamEntry
from spiderfs.core.events import FETCHED, Access
from spiderfs.daemon.training.job_datasets import several_nodes
from spiderfs.daemon.training.job_datasets.job_datasets import JobDataset
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.protocol import Batch, EpochEnd, Hello, encode
from spiderfs.scorer.scoring import Scoring
from spiderfs.store.store import ContentKey

SAMPLES, WIDTH = 400, 16

Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "WAIT_S", 0.02)


class Node:
    """A manager, and the trainers on its node, which are these ranks of a job."""

    def __init__(
        self, place: Path, cluster: str, ranks: list[int], world_size: int, job: str, policy: str = "spider"
    ) -> None:
        place.mkdir()
        self.harness = Harness(place, policy, cluster=cluster, samples=SAMPLES)
        self.training = self.harness.training
        hellos = [Hello("test", job, rank=rank, world_size=world_size) for rank in ranks]
        self.trainers = {hello.rank: Trainer(os.getpid(), os.getuid(), hello) for hello in hellos}

    async def attach(self) -> None:
        for trainer in self.trainers.values():
            await self.training.attached(trainer)
            await self.training.samples(trainer, self.harness.list)

    async def learn(self, rank: int, indices: npt.NDArray[np.int64], vectors: Floats, epoch: int = 0) -> None:
        """A batch of this rank, whose samples have been read."""
        for inode in self.job_dataset.list.inodes[indices].tolist():
            self.harness.content.land(ContentKey(inode), bytes(SIZE))
            self.harness.cache.fold([Access(1.0, inode, inode, SIZE, 0, 1, 0, FETCHED)])
        losses = np.linalg.norm(vectors, axis=1).astype(np.float16)
        batch = Batch("train", epoch, 0, indices.astype(np.uint32), vectors.astype(np.float16), losses)
        await self.training.learn(self.trainers[rank], "train", [batch])

    async def end_epoch(self, rank: int, epoch: int) -> None:
        await self.training.epoch_end(self.trainers[rank], EpochEnd(epoch))

    @property
    def job_dataset(self) -> JobDataset:
        (job_dataset,) = self.training.job_datasets
        return job_dataset

    @property
    def scoring(self) -> Scoring:
        return self.training.scoring.of(self.job_dataset)

    @property
    def scores(self) -> Floats:
        return self.scoring.scores

    def count(self, name: str) -> int:
        return self.harness.counters.totals()[f"cluster_{name}"]


class Epochs:
    """The batches of all ranks, in turns, as a model makes them in an epoch."""

    def __init__(self, ranks: int, batch: int) -> None:
        self._embeddings = Embeddings(SAMPLES, WIDTH, 3, seed=1)
        # As the labels of the harness's list are.
        self._rng = np.random.default_rng(1)
        self._ranks, self._batch = ranks, batch

    def steps(self, epoch: int) -> Iterator[list[tuple[int, npt.NDArray[np.int64], Floats]]]:
        order = self._rng.permutation(SAMPLES)
        for first in range(0, SAMPLES, self._ranks * self._batch):
            step = order[first : first + self._ranks * self._batch]
            yield [
                (rank, step[rank :: self._ranks], self._embeddings.of(step[rank :: self._ranks], epoch))
                for rank in range(self._ranks)
            ]


@pytest.mark.parametrize("policy", ["spider", "shade"])
async def test_for_one_order_of_messages_the_scores_are_those_of_one_mount(
    tmp_path: Path, server: RedisServer, policy: str
) -> None:
    alone = Node(tmp_path / "alone", "", [0, 1], 2, policy, policy)
    first, second = (Node(tmp_path / str(rank), server.url, [rank], 2, policy, policy) for rank in (0, 1))
    await alone.attach()
    async with sharing(first, second):
        epochs = Epochs(2, 50)
        for epoch in range(2):
            for step in epochs.steps(epoch):
                for rank, indices, vectors in step:
                    before = first.count("rows_received")
                    await alone.learn(rank, indices, vectors, epoch)
                    await (first, second)[rank].learn(rank, indices, vectors, epoch)
                    if rank == 1:
                        await eventually(lambda before=before: first.count("rows_received") == before + 50)
                    await eventually(lambda: np.array_equal(first.scores, alone.scores))
            await eventually(lambda: np.array_equal(second.scores, alone.scores))
            for node in (alone, first, second):
                for rank in node.trainers:
                    await node.end_epoch(rank, epoch)
            await eventually(partial(is_at, first, epoch + 1))
        assert second.count("rows_sent") == first.count("rows_received") == SAMPLES
        assert second.count("scores_received") == 2 * SAMPLES
        drawn_by = await second.training.scores(second.trainers[1], "train")
        assert np.array_equal(drawn_by, await alone.training.scores(alone.trainers[0], "train"))
        assert second.scoring.sigma == first.scoring.sigma > 0
        ratios = [node.training.feed.status().ratio for node in (alone, first, second)]
        assert ratios[0] == ratios[1] == ratios[2]


def is_at(node: Node, epoch: int) -> bool:
    """Whether a node scores rows of this epoch now."""
    return node.training._nodes._jobs[node.job_dataset.job_id].epoch == epoch


async def test_an_epoch_ends_when_the_rows_of_all_nodes_have_come(tmp_path: Path, server: RedisServer) -> None:
    alone = Node(tmp_path / "alone", "", [0, 1], 2, "late")
    first, second = (Node(tmp_path / str(rank), server.url, [rank], 2, "late") for rank in (0, 1))
    await alone.attach()
    (now,) = Epochs(2, SAMPLES // 2).steps(0)
    (later,) = Epochs(2, SAMPLES // 2).steps(1)
    for epoch, step in enumerate((now, later)):
        for rank, indices, vectors in step:
            await alone.learn(rank, indices, vectors, epoch)
        await alone.end_epoch(0, epoch)
    async with sharing(first, second), trio.open_nursery() as nursery:
        await first.learn(*now[0])
        await first.end_epoch(0, 0)
        assert await first.training.scores(first.trainers[0], "train") is not None, "no one waits for it"
        nursery.start_soon(first.learn, *later[0], 1)
        await second.learn(*now[1])
        await second.end_epoch(1, 0)
        await eventually(lambda: is_at(first, 1) and np.array_equal(first.scores, second.scores))
        await second.learn(*later[1], 1)
        await second.end_epoch(1, 1)
        await eventually(lambda: first.count("rows_received") == SAMPLES)
        await first.end_epoch(0, 1)
        await eventually(lambda: is_at(first, 2))
        assert first.scoring.described() == alone.scoring.described()
        assert np.array_equal(first.scores, alone.scores)


async def test_rows_that_come_before_rank_0_ends_their_last_epoch_wait_for_it(
    tmp_path: Path, server: RedisServer
) -> None:
    first, second = (Node(tmp_path / str(rank), server.url, [rank], 2, "early") for rank in (0, 1))
    (now,) = Epochs(2, SAMPLES // 2).steps(0)
    async with sharing(first, second):
        await first.learn(*now[0])
        await second.learn(*now[1])
        await second.end_epoch(1, 0)
        await second.learn(*now[1], 1)
        await eventually(lambda: first.training._nodes._jobs["early"].early and first.count("rows_received"))
        assert first.count("rows_received") == SAMPLES // 2
        began = trio.current_time()
        await first.end_epoch(0, 0)
        await eventually(lambda: first.count("rows_received") == SAMPLES)
        assert trio.current_time() - began < several_nodes.LATE_S / 2, "rank 1 has ended it already"


async def test_rank_0_that_begins_again_at_an_earlier_epoch_waits_for_the_others(
    tmp_path: Path, server: RedisServer
) -> None:
    first, second = (Node(tmp_path / str(rank), server.url, [rank], 2, "again") for rank in (0, 1))
    (now,) = Epochs(2, SAMPLES // 2).steps(0)
    async with sharing(first, second):
        for epoch in range(2):
            await first.learn(*now[0], epoch)
            await second.learn(*now[1], epoch)
            await second.end_epoch(1, epoch)
            await first.end_epoch(0, epoch)
            await eventually(partial(is_at, first, epoch + 1))
        for node in (first, second):
            await node.training.detached(next(iter(node.trainers.values())))
        for node in (first, second):
            await node.attach()
        await first.learn(*now[0], 0)
        await first.end_epoch(0, 0)
        await trio.sleep(0.2)
        assert is_at(first, 0), "rank 1 has not ended it this time"
        heard = first.count("rows_received")
        await second.learn(*now[1], 0)
        await second.end_epoch(1, 0)
        await eventually(partial(is_at, first, 1))
        assert first.count("rows_received") == heard + SAMPLES // 2


async def test_what_a_full_disk_does_not_take_of_other_nodes_ends_nothing(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (Node(tmp_path / str(rank), server.url, [rank], 2, "full") for rank in (0, 1))
    (now,) = Epochs(2, SAMPLES // 2).steps(0)
    takes, failed = first.training.scoring.learn, 0

    async def is_full(*_: object) -> None:
        nonlocal failed
        failed += 1
        raise OSError(errno.ENOSPC, "no space")

    async with sharing(first, second):
        await first.learn(*now[0])
        monkeypatch.setattr(first.training.scoring, "learn", is_full)
        for times in (1, 2):
            await second.learn(*now[1])
            await eventually(lambda times=times: failed == times)
        assert caplog.text.count("are left out") == 1
        monkeypatch.setattr(first.training.scoring, "learn", takes)
        await second.learn(*now[1])
        await eventually(lambda: first.count("rows_received") == SAMPLES // 2)


@pytest.mark.parametrize("ends", [True, False])
async def test_no_end_of_an_epoch_is_waited_for_long(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """A node dies before it says that it has ended one; or rank 0 ends none."""
    monkeypatch.setattr(several_nodes, "LATE_S", 0.3)
    job = f"no-end-{ends}"
    first, second = (Node(tmp_path / str(rank), server.url, [rank], 2, job) for rank in (0, 1))
    (now,) = Epochs(2, SAMPLES // 2).steps(0)
    async with sharing(first, second):
        await first.learn(*now[0])
        await second.learn(*now[1])
        await eventually(lambda: first.count("rows_received") == SAMPLES // 2)
        if ends:
            for epoch in range(3):
                with trio.fail_after(PATIENCE_S):
                    await first.end_epoch(0, epoch)
                    await first.learn(*now[0], epoch + 1)
                # Rows of the next epoch come after the end.
                assert is_at(first, epoch + 1)
        else:
            await second.learn(*now[1], 1)
            await eventually(lambda: first.count("rows_received") == SAMPLES)


async def test_a_mount_that_has_received_nothing_scores_its_own_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = Node(tmp_path / "alone", "", [1], 2, "no node")
    node = Node(tmp_path / "node", "redis://127.0.0.1:1", [1], 2, "no node")
    await alone.attach()
    async with sharing(node):
        for step in Epochs(1, 100).steps(0):
            for _, indices, vectors in step:
                await alone.learn(1, indices, vectors)
                await node.learn(1, indices, vectors)
        assert np.array_equal(node.scores, alone.scores)
        await eventually(lambda: node.count("rows_lost"))
        assert not node.training.link_status().up
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "said once"


async def test_a_mount_that_loses_the_server_keeps_the_scores_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "PAUSE_S", 0.01)
    monkeypatch.setattr(cluster, "LONGEST_PAUSE_S", 0.05)
    with RedisServer(tmp_path) as server:
        first, second = (Node(tmp_path / str(rank), server.url, [rank], 2, "lost") for rank in (0, 1))
        async with sharing(first, second):
            epochs = Epochs(2, 50)
            steps = list(epochs.steps(0))
            for rank, indices, vectors in steps[0]:
                await (first, second)[rank].learn(rank, indices, vectors)
            await eventually(lambda: second.count("scores_received") == 100)
            server.kill()
            kept = second.scores.copy()
            for rank, indices, vectors in steps[1]:
                await (first, second)[rank].learn(rank, indices, vectors)
            await eventually(lambda: second.count("rows_lost") == 50)
            assert np.array_equal(second.scores, kept), "the scores of a part of the rows would say less"
            assert not np.array_equal(first.scores, kept), "the mount with rank 0 hears its own ranks"
            server.start()
            await eventually(lambda: (status := second.training.link_status()) and status.up)
            await eventually(lambda: (status := first.training.link_status()) and status.up)
            for rank, indices, vectors in steps[2]:
                await (first, second)[rank].learn(rank, indices, vectors)
            heard = steps[2][1][1]
            await eventually(lambda: np.array_equal(second.scores[heard], first.scores[heard]))


async def test_who_has_all_ranks_sends_nothing(tmp_path: Path, server: RedisServer) -> None:
    node = Node(tmp_path / "node", server.url, [0, 1], 2, "whole")
    async with sharing(node):
        for step in Epochs(2, 50).steps(0):
            for rank, indices, vectors in step:
                await node.learn(rank, indices, vectors)
        await trio.sleep(0.1)
        streams = {f"spiderfs:{what}:graph:{node.job_dataset.job_dataset_id}": "0-0" for what in ("rows", "scores")}
        assert Stream(server.url).read(streams, 0.01) == {}


async def test_what_others_send_wrongly_is_said_once_and_harms_no_one(
    tmp_path: Path, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (Node(tmp_path / str(rank), server.url, [rank], 2, "wrong") for rank in (0, 1))
    async with sharing(first, second):
        good = encode(Batch("", 0, 0, np.array([3, 4]), np.eye(2, WIDTH)))
        beyond = encode(Batch("", 0, 0, np.array([SAMPLES]), np.eye(1, WIDTH)))
        wrong = [b"?", b"\xff" * 50, beyond, good[:-1], encode(Hello("test", "test"))]
        stream, key = Stream(server.url), "spiderfs:rows:graph:" + first.job_dataset.job_dataset_id
        stream.append([StreamEntry(key, message) for message in [*wrong, good, *wrong]])
        await eventually(lambda: first.count("rows_received") == 2)
        await eventually(lambda: second.count("scores_received") == 2)
        scores = "spiderfs:scores:graph:" + first.job_dataset.job_dataset_id
        stream.append([StreamEntry(scores, message) for message in wrong])
        await eventually(lambda: len(caplog.records) == 2)
        await eventually(lambda: stream.read({key: "0-0"}, 0.01) == {})
    assert all("is invalid" in record.getMessage() for record in caplog.records)


async def test_a_hub_of_another_node_stands_in_for_its_own_label_alone(tmp_path: Path, server: RedisServer) -> None:
    node = Node(tmp_path / "node", server.url, [1], 2, "hub")
    async with sharing(node):
        labels = node.job_dataset.list.labels
        near = np.arange(1, 8)
        scores = SharedScores(WIDTH, np.arange(8), np.ones(8))
        hub = SharedHub(0, near, np.linspace(0.1, 0.2, len(near)))
        key = "spiderfs:scores:graph:" + node.job_dataset.job_dataset_id
        Stream(server.url).append([StreamEntry(key, encode(scores) + encode(hub))])
        await eventually(lambda: node.count("scores_received") == 8)
        policy, inodes = node.harness.cache.engine.policy, node.job_dataset.list.inodes
        await eventually(lambda: int(inodes[0]) in policy._waiting)
        (found,) = policy._waiting[int(inodes[0])].values()
        assert set(found.neighbours) == set(inodes[near[labels[near] == labels[0]]].tolist())
