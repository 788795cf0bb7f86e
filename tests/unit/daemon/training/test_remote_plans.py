"""What homes hear, over a real server, of the plans of jobs on other nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from several_managers import sharing
from test_service import Harness, listed
from waiting import eventually

from benchmarks.common.redis_server import RedisServer
from spiderfs import cluster
from spiderfs.cluster import PlanPiece, Stream, StreamEntry
from spiderfs.daemon.training.job_datasets import several_nodes
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.protocol import Hello, Plan, Progress, encode
from spiderfs.sources.members import Members

SAMPLES = 60
NAMES = ("http://n1:8443", "http://n2:8443")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "WAIT_S", 0.02)
    # On a busy machine a server may need more than two seconds, and what was on its way is not sent again.
    monkeypatch.setattr(cluster, "TIMEOUT_S", 20.0)
    monkeypatch.setattr(cluster, "PAUSE_S", 0.01)
    monkeypatch.setattr(cluster, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(several_nodes, "LOOK_S", 0.01)
    monkeypatch.setattr(several_nodes, "ROOM_LOOK_S", 0.02)


class Node:
    """A manager, and a job on its node that reads all samples."""

    def __init__(self, place: Path, number: int, cluster: str, salt: str = "") -> None:
        """All with one `salt` have a list of their own."""
        (place / str(number)).mkdir()
        self.homes = Members()
        self.have_homes(*NAMES, own=NAMES[number])
        self.harness = Harness(place / str(number), cluster=cluster, samples=SAMPLES, homes=self.homes)
        paths = [b"train/%03d" % sample for sample in range(SAMPLES)]
        self.list = listed(paths + [salt.encode()] * bool(salt))
        self.trainer = Trainer(os.getpid(), os.getuid(), Hello("test", f"job {number}"))
        self.training = self.harness.training

    def have_homes(self, *names: str, own: str) -> None:
        self.homes.change(dict.fromkeys(names, 1.0), (own,))

    async def attach(self) -> None:
        await self.training.attached(self.trainer)
        await self.training.samples(self.trainer, self.list)

    async def plan(self, epoch: int, order: list[int], begun: bool = True) -> None:
        await self.training.plan(self.trainer, Plan("train", epoch, 0, begun, np.array(order, np.uint32)))

    def comes_to(self, epoch: int, position: int) -> None:
        self.training.progressed(self.trainer, Progress("train", epoch, position, position))

    def list_stream(self, home: int) -> str:
        """What a home is told of its samples of this node's list goes by this stream."""
        (job_dataset,) = self.training.job_datasets
        return f"spiderfs:plans:{NAMES[home]}:{job_dataset.list.digest}"

    @property
    def own(self) -> list[int]:
        """The samples whose home this node is."""
        return [sample for sample, key in enumerate(self.keys) if key and not self.homes.is_remote(key)]

    @property
    def keys(self) -> list[int]:
        (job_dataset,) = self.training.job_datasets
        return job_dataset.list.keys

    @property
    def named(self) -> list[int]:
        """The samples of which a plan says when they are used, in the order of that."""
        schedule = self.harness.cache.engine.schedule
        uses = {sample: schedule.next_use_s(key) for sample, key in enumerate(self.keys)}
        known = {sample: use_s for sample, use_s in uses.items() if use_s is not None}
        return sorted(known, key=lambda sample: known[sample])

    @property
    def remote(self) -> several_nodes.RemotePlans:
        found = self.training._remote_plans
        assert found is not None
        return found

    @property
    def heard_s(self) -> float:
        """When it last heard something that keeps the plan of another node's reader."""
        return max(plan.at_s for plan in self.remote._incoming.values())

    def count(self, name: str) -> int:
        return self.harness.counters.totals()[f"cluster_{name}"]


def whole(reader: str, epoch: int, order: npt.NDArray[np.uint32]) -> PlanPiece:
    return PlanPiece(reader, epoch, 0, len(order), 0, order)


def order_of(seed: int) -> list[int]:
    order: list[int] = np.random.default_rng(seed).permutation(SAMPLES).tolist()
    return order


async def test_a_home_knows_when_other_jobs_read_its_samples(tmp_path: Path, server: RedisServer) -> None:
    one, two = (Node(tmp_path, number, server.url, "knows") for number in (0, 1))
    async with sharing(one, two):
        order = order_of(1)
        its = [sample for sample in order if sample in two.own]
        await one.plan(0, order)
        await eventually(lambda: two.named == its)
        assert 0 < len(its) < SAMPLES
        assert not two.harness.cache.engine.schedule.readers, "nothing is fetched ahead by it"
        assert not two.harness.cache.engine.schedule.active
        one.comes_to(0, 30)
        left = [sample for sample in order[30:] if sample in two.own]
        await eventually(lambda: two.named == left)
        following = order_of(2)
        # Of an epoch that has not begun no one is told.
        await one.plan(1, following, begun=False)
        await one.plan(1, following)
        await eventually(lambda: two.named == [sample for sample in following if sample in two.own])
        # Its own plan counts beside, and has all samples.
        await two.plan(0, order_of(3))
        assert set(two.named) == set(range(SAMPLES))
        # No one is told of a sample that only reads it itself.
        await eventually(lambda: set(one.named) >= set(one.own))


async def test_a_home_receives_an_order_that_exchanges_have_changed(tmp_path: Path, server: RedisServer) -> None:
    one, two = (Node(tmp_path, number, server.url, "exchanges") for number in (0, 1))
    async with sharing(one, two):
        order = order_of(1)
        await one.plan(0, order)
        (reader,) = one.harness.cache.engine.schedule.readers.values()

        def its_rest() -> list[int]:
            return [sample for sample in reader.epoch.order[reader.dispatched :].tolist() if sample in two.own]

        reader.exchanges = True
        for position in (6, 18):
            for later in range(12):
                assert reader.epoch.swap(position + later, order[59 - position - later])
            one.comes_to(0, position)
            await eventually(lambda: two.named == its_rest())
        reader.exchanges = False
        one.comes_to(0, 40)
        await eventually(lambda: two.named == its_rest())
        assert two.count("plans_received") == 3


async def test_homes_that_come_and_go_hear_of_the_plans_that_name_their_samples(
    tmp_path: Path, server: RedisServer
) -> None:
    one, two = (Node(tmp_path, number, server.url, "come and go") for number in (0, 1))
    async with sharing(one, two):
        order = order_of(1)
        await one.plan(0, order)
        await eventually(lambda: two.named == [sample for sample in order if sample in two.own])
        # Alone, it has no one to tell; what was told before goes on being told to whom it was told.
        one.have_homes(NAMES[0], own=NAMES[0])
        one.comes_to(0, 30)
        await eventually(lambda: two.named == [sample for sample in order[30:] if sample in two.own])
        before = set(two.own)
        for node in (one, two):
            node.have_homes(*NAMES, "http://n3:8443", own=NAMES[node is two])
        assert set(two.own) < before
        await one.plan(1, order)
        await eventually(lambda: two.named == [sample for sample in order if sample in two.own])


@pytest.mark.parametrize("how", ["of other homes", "withdrawn"])
async def test_a_home_that_an_epoch_does_not_name_forgets_the_one_before(
    tmp_path: Path, server: RedisServer, how: str
) -> None:
    one, two = (Node(tmp_path, number, server.url, how) for number in (0, 1))
    async with sharing(one, two):
        await one.plan(0, order_of(1))
        await eventually(lambda: two.named)
        await one.plan(*((1, one.own) if how == "of other homes" else (0, [])))
        await eventually(lambda: not two.named)
        await one.plan(2, order_of(2))
        await eventually(lambda: two.named == [sample for sample in order_of(2) if sample in two.own])
        assert two.count("plans_lost") == 0


async def test_a_home_keeps_what_another_job_reads_next(tmp_path: Path, server: RedisServer) -> None:
    one, two = (Node(tmp_path, number, server.url, "keeps") for number in (0, 1))
    async with sharing(one, two):
        its = [sample for sample in order_of(1) if sample in two.own]
        engine = two.harness.cache.engine
        for sample in reversed(its):
            engine.opened(two.keys[sample], 100)
        await one.plan(0, order_of(1))
        await eventually(lambda: two.named == its)
        for sample in reversed(its):
            engine.opened(two.keys[sample], 100)
        assert len(engine.members) >= 9
        assert {two.keys[sample] for sample in its[: len(engine.members)]} == set(engine.members)


@pytest.mark.parametrize("how", ["leaves", "dies"])
async def test_the_plan_of_a_node_that_leaves_or_dies_is_forgotten(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(several_nodes, "AGAIN_S", 0.02)
    monkeypatch.setattr(several_nodes, "SILENT_S", 3600.0)

    one, two = (Node(tmp_path, number, server.url, how) for number in (0, 1))
    async with sharing(two):
        async with sharing(one) as nursery:
            await one.plan(0, order_of(1))
            await eventually(lambda: two.named)
            # A training that pauses is told of again and again.
            heard_s = two.heard_s
            await eventually(lambda: two.heard_s > heard_s)
            assert two.named
            if how == "leaves":
                await one.training.detached(one.trainer)
                await eventually(lambda: not two.named)
            nursery.cancel_scope.cancel()
        if how == "dies":
            monkeypatch.setattr(several_nodes, "SILENT_S", 0.5)
        await eventually(lambda: not two.named)


@pytest.mark.parametrize("how", ["silent", "withdrawn"])
async def test_members_are_ranked_again_when_plans_end(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(several_nodes, "SILENT_S", 3600.0)

    node = Node(tmp_path, 1, server.url, how)
    async with sharing(node):
        engine, remote = node.harness.cache.engine, node.remote
        for sample in node.own:
            engine.opened(node.keys[sample], 100)
        by_hash = list(engine._foresight.eviction_order())
        known_list, order = next(iter(node.training.job_datasets)).list, np.array(order_of(1), np.uint32)
        await remote.receive(known_list, [whole(f"reader {one}", 0, order) for one in range(5)])
        its = [node.keys[sample] for sample in order_of(1) if node.keys[sample] in engine.members]
        await eventually(lambda: list(engine._foresight.eviction_order()) == its[::-1])
        if how == "withdrawn":
            await remote.receive(known_list, [whole(f"reader {one}", 0, order[:0]) for one in range(5)])
        else:
            monkeypatch.setattr(several_nodes, "SILENT_S", 0.1)
        await eventually(lambda: not node.named)
        await eventually(lambda: list(engine._foresight.eviction_order()) == by_hash)


async def test_a_plan_is_kept_by_progress_in_its_epoch_alone(tmp_path: Path, server: RedisServer) -> None:
    node = Node(tmp_path, 1, server.url, "alone")
    async with sharing(node):
        known_list, order = next(iter(node.training.job_datasets)).list, np.array(order_of(1), np.uint32)

        async def comes_to(epoch: int) -> None:
            await node.remote.receive(known_list, [Progress("reader", epoch, 1, 1)])

        await node.remote.receive(known_list, [whole("reader", 3, order)])
        heard_s = node.heard_s
        await comes_to(3)
        assert node.heard_s > heard_s
        assert node.named
        # The word that epoch 4 has begun was lost.
        for _ in range(3):
            await comes_to(4)
        assert not node.named
        assert node.count("plans_lost") == 1, "once, however long it goes on"


async def test_pieces_wait_until_a_home_has_received_those_before_and_push_out_nothing(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_nodes, "PIECE_DRAWS", 4)
    monkeypatch.setattr(several_nodes, "FEW", 3)

    one, two = (Node(tmp_path, number, server.url, "room") for number in (0, 1))
    async with sharing(one):
        await two.attach()
        await one.plan(0, order_of(1))
        stream, told = Stream(server.url), one.list_stream(1)
        await eventually(lambda: len(stream.read({told: "0-0"}, 0.01).get(told, ())) == 3)
        await trio.sleep(0.1)
        assert len(stream.read({told: "0-0"}, 0.01)[told]) == 3
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.training.share_with_other_nodes)
            await eventually(lambda: two.named == [sample for sample in order_of(1) if sample in two.own])
            await eventually(lambda: two.count("plans_received") == 1)
            nursery.cancel_scope.cancel()
        assert two.count("plans_lost") == 0


async def test_a_home_that_receives_nothing_keeps_no_other_waiting_and_is_sent_no_more(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_nodes, "PIECE_DRAWS", 2)
    monkeypatch.setattr(several_nodes, "FEW", 2)
    monkeypatch.setattr(several_nodes, "ROOM_S", 3600.0)
    silent = "http://n0:8443"

    one, two = (Node(tmp_path, number, server.url, "deaf") for number in (0, 1))
    for number, node in enumerate((one, two)):
        node.have_homes(silent, *NAMES, own=NAMES[number])
    async with sharing(one, two):
        await one.plan(0, order_of(1))
        (told,) = one.remote._outgoing.values()
        assert set(told.positions) == {silent, NAMES[1]}
        await eventually(lambda: two.named == [sample for sample in order_of(1) if sample in two.own])
        monkeypatch.setattr(several_nodes, "ROOM_S", 0.1)
        await eventually(lambda: set(told.positions) == {NAMES[1]})
        monkeypatch.setattr(several_nodes, "ROOM_S", 3600.0)
        one.comes_to(0, 30)
        await eventually(lambda: two.named == [sample for sample in order_of(1)[30:] if sample in two.own])
        assert one.count("plans_lost") == 0, "no one there has wanted it"


async def test_a_stream_without_room_is_seldom_asked_while_others_take_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_nodes, "PIECE_DRAWS", 1)
    monkeypatch.setattr(several_nodes, "ROOM_LOOK_S", 60.0)
    full, offered = "http://n0:8443", list[str]()

    node = Node(tmp_path, 0, "redis://127.0.0.1:1")
    node.have_homes(full, *NAMES, own=NAMES[0])
    await node.attach()

    async def offer(stream: str, *_: object) -> bool:
        offered.append(stream)
        await trio.lowlevel.checkpoint()
        return full not in stream

    monkeypatch.setattr(node.remote._link, "offer", offer)
    async with trio.open_nursery() as nursery:
        await node.plan(0, order_of(1))
        nursery.start_soon(node.remote.run)
        await eventually(lambda: len(offered) > 10)
        await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    assert [full in stream for stream in offered].count(True) == 1


async def test_a_slow_home_counts_the_plan_that_was_given_up_for_it(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_nodes, "FEW", 1)
    monkeypatch.setattr(several_nodes, "ROOM_S", 0.1)

    one, two = (Node(tmp_path, number, server.url, "slow") for number in (0, 1))
    async with sharing(one):
        await two.attach()
        await one.plan(0, order_of(1))
        await one.plan(1, order_of(2))
        await eventually(lambda: not next(iter(one.remote._outgoing.values())).positions)
        monkeypatch.setattr(several_nodes, "ROOM_S", 3600.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.training.share_with_other_nodes)
            await eventually(lambda: two.count("plans_lost") == 1)
            # What it knows of the epoch before is over.
            await eventually(lambda: not two.named)
            await one.plan(2, order_of(3))
            await eventually(lambda: two.named == [sample for sample in order_of(3) if sample in two.own])
            nursery.cancel_scope.cancel()
        assert (one.count("plans_lost"), two.count("plans_lost")) == (0, 1)


async def test_plans_that_the_server_does_not_take_are_given_up_and_keep_no_trainer_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_nodes, "ROOM_S", 0.2)

    node = Node(tmp_path, 0, "redis://127.0.0.1:1")
    async with sharing(node):
        for epoch in range(3):
            with trio.fail_after(20):
                await node.plan(epoch, order_of(epoch))
            await eventually(lambda epoch=epoch: node.count("plans_lost") == 1 + epoch)


async def test_a_home_counts_the_plans_that_it_has_not_received_in_full(tmp_path: Path, server: RedisServer) -> None:
    node = Node(tmp_path, 1, server.url, "count")
    async with sharing(node):
        known_list, order = next(iter(node.training.job_datasets)).list, np.array(order_of(1), np.uint32)

        async def hear(*said: PlanPiece | Progress) -> int:
            await node.remote.receive(known_list, said)
            return node.count("plans_lost")

        def piece(epoch: int, first: int, end: int) -> PlanPiece:
            return PlanPiece("reader", epoch, 0, SAMPLES, first, order[first:end])

        assert await hear(piece(0, 0, 20), piece(0, 20, 60)) == 0
        assert set(node.named) == set(node.own)
        # A piece between, once for each plan.
        assert await hear(piece(1, 0, 20), piece(1, 30, 40), piece(1, 40, 60), Progress("reader", 1, 9, 9)) == 1
        # The beginning, the end, and all.
        assert await hear(piece(2, 20, 60)) == 2
        assert await hear(piece(3, 0, 20), piece(4, 0, 60)) == 3
        assert await hear(Progress("reader", 5, 9, 9), Progress("reader", 5, 10, 10)) == 4
        # What is late is not lost.
        assert await hear(Progress("reader", 4, 60, 60)) == 4
        assert node.count("plans_received") == 2


async def test_a_server_that_is_killed_costs_what_is_not_known_meanwhile(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        one, two = (Node(tmp_path, number, server.url) for number in (0, 1))
        async with sharing(one, two):
            await one.plan(0, order_of(1))
            await eventually(lambda: two.named)
            server.kill()
            await one.plan(1, order_of(2))
            await eventually(lambda: (status := one.training.link_status()) and not status.up)
            server.start()
            for node in (one, two):
                await eventually(lambda node=node: (status := node.training.link_status()) and status.up)
            await one.plan(2, order_of(3))
            await eventually(lambda: two.named == [sample for sample in order_of(3) if sample in two.own])


async def test_an_outage_of_the_server_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_nodes, "AGAIN_S", 0.02)
    monkeypatch.setattr(several_nodes, "SILENT_S", 3600.0)

    with RedisServer(tmp_path) as server:
        one, two = (Node(tmp_path, number, server.url) for number in (0, 1))
        async with sharing(one, two):
            await one.plan(0, order_of(1))
            await eventually(lambda: two.named)
            server.kill()
            await eventually(lambda: (status := two.training.link_status()) and not status.up)
            with monkeypatch.context() as silence:
                silence.setattr(several_nodes, "SILENT_S", 0.0)
                heard_s = two.heard_s
                await eventually(lambda: two.heard_s > heard_s)
                assert two.named
            server.start()
            for node in (one, two):
                await eventually(lambda node=node: (status := node.training.link_status()) and status.up)
            heard_s = two.heard_s
            await eventually(lambda: two.heard_s > heard_s)
            assert two.named
            one.comes_to(0, 30)
            await eventually(lambda: two.named == [sample for sample in order_of(1)[30:] if sample in two.own])


async def test_a_reader_that_is_forgotten_while_its_plan_is_sorted_has_none(
    tmp_path: Path, server: RedisServer
) -> None:
    node = Node(tmp_path, 1, server.url, "sorted")
    async with sharing(node):
        remote, order = node.remote, np.array(order_of(1), np.uint32)
        known_list = next(iter(node.training.job_datasets)).list
        planned = remote._planned

        def slowly(*what: Any) -> Any:
            trio.from_thread.run_sync(remote._forget, "reader")
            return planned(*what)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(remote, "_planned", slowly)
            await remote.receive(known_list, [whole("reader", 0, order)])
        assert not node.named
        await remote.receive(known_list, [whole("reader", 1, order)])
        assert set(node.named) == set(node.own)


async def test_progress_counts_the_draws_that_a_node_with_another_list_of_members_names(
    tmp_path: Path, server: RedisServer
) -> None:
    node = Node(tmp_path, 1, server.url, "members")
    async with sharing(node):
        known_list, order = next(iter(node.training.job_datasets)).list, order_of(1)

        def its_rest(first: int) -> list[int]:
            return [sample for sample in order[first:] if sample in node.own]

        draws = np.array(order, np.uint32)
        await node.remote.receive(known_list, [PlanPiece("reader", 0, 10, SAMPLES, 0, draws)])
        assert node.named == its_rest(10)
        for position in (20, 45, SAMPLES):
            await node.remote.receive(known_list, [Progress("reader", 0, position, position)])
            assert node.named == its_rest(position)


async def test_stale_and_wrong_plans_do_no_harm(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(several_nodes, "SILENT_S", 3600.0)

    node = Node(tmp_path, 1, server.url, "stale")
    async with sharing(node):
        key, stream = node.list_stream(1), Stream(server.url)
        said = [
            b"?",
            encode(PlanPiece("wrong", 0, 0, 1, 0, np.array([SAMPLES + 1], np.uint32))),
            # Of no plan.
            encode(Progress("unknown", 0, 3, 3)),
            encode(Progress("gone", 0, 3, 3)),
            # All samples: its node goes by another list of members.
            encode(whole("gone", 7, np.array(order_of(1), np.uint32))),
            # Of another epoch, and beyond the end.
            encode(Progress("gone", 6, 3, 3)),
            encode(whole("beyond", 7, np.array(order_of(2), np.uint32))),
            encode(Progress("beyond", 7, 10**6, 10**6)),
        ]
        stream.append([StreamEntry(key, message) for message in said])
        await eventually(lambda: node.count("plans_received") == 2)
        assert set(node.named) == set(node.own)
        monkeypatch.setattr(several_nodes, "SILENT_S", 0.1)
        await eventually(lambda: not node.named)
        await eventually(lambda: stream.read({key: "0-0"}, 0.01) == {})
    assert ["is invalid" in record.getMessage() for record in caplog.records] == [True]
