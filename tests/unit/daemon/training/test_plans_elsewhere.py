"""What homes hear, over a real server, of the plans of jobs on other nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import trio
from several_managers import eventually, sharing
from test_service import Harness, listed

from benchmarks.common.redis_server import RedisServer
from spiderfs.cluster import link
from spiderfs.cluster.stream import Entry, Stream
from spiderfs.core.plans.schedule import LATER_EPOCHS
from spiderfs.daemon.training.courses import plans_elsewhere
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.protocol import Hello, Plan, Progress, encode
from spiderfs.sources.members import Members
from spiderfs.sources.node_names import HERE

SAMPLES = 60
NAMES = ("http://n1:8443", "http://n2:8443")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "WAIT_S", 0.02)
    monkeypatch.setattr(link, "PAUSE_S", 0.01)
    monkeypatch.setattr(link, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(plans_elsewhere, "LOOK_S", 0.01)


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

    @property
    def own(self) -> list[int]:
        """The samples whose home this node is."""
        return [sample for sample, key in enumerate(self.keys) if key and not self.homes.is_elsewhere(key)]

    @property
    def keys(self) -> list[int]:
        (course,) = self.training.courses
        return course.list.keys

    @property
    def named(self) -> list[int]:
        """The samples of which a plan says when they are used, in the order of that."""
        schedule = self.harness.cache.engine.schedule
        uses = {sample: schedule.next_use_s(key) for sample, key in enumerate(self.keys)}
        known = {sample: use_s for sample, use_s in uses.items() if use_s is not None}
        return sorted(known, key=lambda sample: known[sample])

    @property
    def elsewhere(self) -> plans_elsewhere.PlansElsewhere:
        found = self.training._plans_elsewhere
        assert found is not None
        return found

    def count(self, name: str) -> int:
        return self.harness.counters.totals()[f"cluster_{name}"]


def order_of(seed: int) -> list[int]:
    order: list[int] = np.random.default_rng(seed).permutation(SAMPLES).tolist()
    return order


def test_a_home_knows_when_other_jobs_read_its_samples(tmp_path: Path, server: RedisServer) -> None:
    async def test() -> None:
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
            await one.plan(1, following, begun=False)
            await eventually(lambda: two.count("plans_heard") == 2 and two.named[: len(left)] == left)
            await one.plan(1, following)
            await eventually(lambda: two.named == [sample for sample in following if sample in two.own])
            # Its own plan counts beside, and has all samples.
            await two.plan(0, order_of(3))
            assert set(two.named) == set(range(SAMPLES))
            # Nobody is told of a sample that only reads it itself.
            await eventually(lambda: set(one.named) >= set(one.own))

    trio.run(test)


def test_a_home_hears_of_an_order_that_exchanges_have_changed(tmp_path: Path, server: RedisServer) -> None:
    async def test() -> None:
        one, two = (Node(tmp_path, number, server.url, "exchanges") for number in (0, 1))
        async with sharing(one, two):
            order = order_of(1)
            await one.plan(0, order)
            await one.plan(1, order_of(2), begun=False)
            (reader,) = one.harness.cache.engine.schedule.readers.values()
            following = [sample for sample in order_of(2) if sample in two.own]

            def its_rest() -> list[int]:
                left = [sample for sample in reader.epoch.order[reader.dispatched :].tolist() if sample in two.own]
                return left + [sample for sample in following if sample not in left]

            reader.exchanges = True
            for position in (6, 18):
                for later in range(12):
                    assert reader.epoch.swap(position + later, order[59 - position - later])
                one.comes_to(0, position)
                await eventually(lambda: two.named == its_rest())
            reader.exchanges = False
            one.comes_to(0, 40)
            await eventually(lambda: two.named == its_rest())
            assert two.count("plans_heard") == 4

    trio.run(test)


def test_homes_that_come_and_go_hear_of_the_plans_that_name_their_samples(tmp_path: Path, server: RedisServer) -> None:
    async def test() -> None:
        one, two = (Node(tmp_path, number, server.url, "come and go") for number in (0, 1))
        async with sharing(one, two):
            order = order_of(1)
            await one.plan(0, order)
            await eventually(lambda: two.named == [sample for sample in order if sample in two.own])
            # Alone, it has nobody to tell; what was told before goes on being told to whom it was told.
            one.have_homes(NAMES[0], own=NAMES[0])
            one.comes_to(0, 30)
            await eventually(lambda: two.named == [sample for sample in order[30:] if sample in two.own])
            before = set(two.own)
            for node in (one, two):
                node.have_homes(*NAMES, "http://n3:8443", own=NAMES[node is two])
            assert set(two.own) < before
            await one.plan(1, order)
            await eventually(lambda: two.named == [sample for sample in order if sample in two.own])

    trio.run(test)


def test_where_homes_are_no_nodes_nobody_is_told(tmp_path: Path, server: RedisServer) -> None:
    async def test() -> None:
        one, two = (Node(tmp_path, number, server.url, "servers") for number in (0, 1))
        for node in (one, two):
            node.have_homes("redis://n1:6379/data", HERE, own=HERE)
        async with sharing(one, two):
            await one.plan(0, order_of(1))
            await trio.sleep(0.1)
            assert not two.named
            assert not two.count("plans_heard")

    trio.run(test)


def test_a_home_keeps_what_another_job_reads_next(tmp_path: Path, server: RedisServer) -> None:
    async def test() -> None:
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

    trio.run(test)


@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_the_plan_of_a_node_that_leaves_or_dies_is_forgotten(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(plans_elsewhere, "AGAIN_S", 0.02)
    monkeypatch.setattr(plans_elsewhere, "SILENT_S", 0.5 if how == "dies" else 3600.0)

    async def test() -> None:
        one, two = (Node(tmp_path, number, server.url, how) for number in (0, 1))
        async with sharing(two):
            async with sharing(one) as nursery:
                await one.plan(0, order_of(1))
                await eventually(lambda: two.named)
                # A training that pauses is told of again and again.
                await trio.sleep(0.7)
                assert two.named
                if how == "leaves":
                    await one.training.detached(one.trainer)
                    await eventually(lambda: not two.named)
                nursery.cancel_scope.cancel()
            await eventually(lambda: not two.named)

    trio.run(test)


@pytest.mark.parametrize("how", ["silent", "withdrawn"])
def test_plans_that_end_together_rank_the_members_once(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(plans_elsewhere, "SILENT_S", 0.1 if how == "silent" else 3600.0)

    async def test() -> None:
        node = Node(tmp_path, 1, server.url, how)
        async with sharing(node):
            ranked = 0
            rank_anew = node.harness.cache.engine.rank_anew

            def counted() -> None:
                nonlocal ranked
                ranked += 1
                rank_anew()

            monkeypatch.setattr(node.harness.cache.engine, "rank_anew", counted)
            elsewhere, known_list = node.elsewhere, next(iter(node.training.courses)).list
            order = np.array(order_of(1), np.uint32)
            await elsewhere.hear(known_list, [Plan(f"reader {one}", 0, 0, True, order) for one in range(5)])
            assert (ranked, len(node.named)) == (1, len(node.own))
            if how == "withdrawn":
                await elsewhere.hear(known_list, [Plan(f"reader {one}", 0, 0, True, order[:0]) for one in range(5)])
            await eventually(lambda: not node.named)
            assert ranked == 2
            await elsewhere.hear(known_list, [Plan("nobody", 0, 0, True, order[:0])])
            assert ranked == 2

    trio.run(test)


def test_a_plan_is_kept_by_progress_in_its_epoch_alone(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans_elsewhere, "SILENT_S", 0.3)

    async def test() -> None:
        node = Node(tmp_path, 1, server.url, "alone")
        async with sharing(node):
            known_list, order = next(iter(node.training.courses)).list, np.array(order_of(1), np.uint32)

            async def go_on(epoch: int, for_s: float) -> None:
                with trio.move_on_after(for_s):
                    while True:
                        await node.elsewhere.hear(known_list, [Progress("reader", epoch, 1, 1)])
                        await trio.sleep(0.02)

            await node.elsewhere.hear(known_list, [Plan("reader", 3, 0, True, order)])
            # That the next epoch is planned does not begin it.
            await node.elsewhere.hear(known_list, [Plan("reader", 4, 0, False, order)])
            await go_on(3, 0.6)
            assert node.named
            # The word that epoch 4 has begun was lost.
            await go_on(4, 0.6)
            assert not node.named

    trio.run(test)


def test_no_more_plans_of_later_epochs_are_told_than_a_home_keeps(tmp_path: Path, server: RedisServer) -> None:
    async def test() -> None:
        one, two = (Node(tmp_path, number, server.url, "later") for number in (0, 1))
        async with sharing(one, two):
            await one.plan(0, order_of(0))
            for epoch in range(1, 30):
                await one.plan(epoch, order_of(epoch), begun=False)
            (told,) = one.elsewhere._told.values()
            assert list(told.epochs) == list(range(1 + LATER_EPOCHS))
            await eventually(lambda: two.count("plans_heard") == 1 + LATER_EPOCHS)
            # One that was too late to be told of is told of when it begins.
            await one.plan(29, order_of(29))
            assert list(told.epochs) == [29]
            await eventually(lambda: two.named == [sample for sample in order_of(29) if sample in two.own])
            assert two.count("plans_heard") == 2 + LATER_EPOCHS

    trio.run(test)


def test_parts_of_plans_wait_for_room_on_the_link_and_push_out_nothing(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A part of one plan takes more than half of the room that is theirs.
    monkeypatch.setattr(link, "WAITING_BYTES", 300)

    async def test() -> None:
        one, two = (Node(tmp_path, number, server.url, "room") for number in (0, 1))
        async with sharing(one, two):
            for epoch in range(9):
                await one.plan(epoch, order_of(epoch), begun=not epoch)
            await eventually(lambda: two.count("plans_heard") == 9)
            assert one.count("plans_lost") == 0

    trio.run(test)


def test_parts_of_plans_that_find_no_room_are_given_up_and_keep_no_trainer_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "WAITING_BYTES", 300)
    monkeypatch.setattr(plans_elsewhere, "ROOM_S", 0.5)

    async def test() -> None:
        node = Node(tmp_path, 0, "redis://127.0.0.1:1")
        async with sharing(node):
            await node.plan(0, order_of(0))
            await eventually(lambda: (status := node.training.link_status()) and not status.up)
            with trio.fail_after(0.4):
                for epoch in range(1, 4):
                    await node.plan(epoch, order_of(epoch), begun=False)
            assert node.count("plans_lost") == 0
            # What the link has when the server fails stays in it: progress, or one of them.
            await eventually(lambda: node.count("plans_lost") >= 2)

    trio.run(test)


def test_a_server_that_is_killed_costs_what_is_not_known_meanwhile(tmp_path: Path) -> None:
    async def test() -> None:
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

    trio.run(test)


def test_who_has_another_list_hears_nothing_of_it(tmp_path: Path, server: RedisServer) -> None:
    async def test() -> None:
        one, two = (Node(tmp_path, number, server.url, salt) for number, salt in enumerate(("this", "another")))
        async with sharing(one, two):
            await one.plan(0, order_of(1))
            digest = next(iter(one.training.courses)).list.digest
            key = f"spiderfs:plans:{NAMES[1]}:{digest}"
            await eventually(lambda: Stream(server.url).read({key: "0-0"}, 0.01))
            await trio.sleep(0.1)
            assert not two.named
            assert two.count("plans_heard") == 0

    trio.run(test)


def test_stale_and_wrong_plans_do_no_harm(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plans_elsewhere, "SILENT_S", 0.3)

    async def test() -> None:
        node = Node(tmp_path, 1, server.url, "stale")
        async with sharing(node):
            digest = next(iter(node.training.courses)).list.digest
            key, stream = f"spiderfs:plans:{NAMES[1]}:{digest}", Stream(server.url)
            whole = np.array(order_of(1), np.uint32)
            said = [
                b"?",
                encode(Plan("wrong", 0, 0, True, np.array([SAMPLES + 1], np.uint32))),
                # Of no plan.
                encode(Progress("nobody", 0, 3, 3)),
                encode(Progress("gone", 0, 3, 3)),
                # All samples: its node goes by another list of members.
                encode(Plan("gone", 7, 0, True, whole)),
                # Of another epoch, and beyond the end.
                encode(Progress("gone", 6, 3, 3)),
                encode(Progress("gone", 7, 10**6, 10**6)),
                encode(Plan("gone", 8, 0, False, whole)),
            ]
            stream.append([Entry(key, message) for message in said])
            await eventually(lambda: node.count("plans_heard") == 2)
            assert set(node.named) == set(node.own)
            await eventually(lambda: not node.named)
            await eventually(lambda: stream.read({key: "0-0"}, 0.01) == {})

    trio.run(test)
    assert ["of no use" in record.getMessage() for record in caplog.records] == [True]
