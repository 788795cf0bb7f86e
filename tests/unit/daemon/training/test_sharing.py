"""The manager's side of exchange: ranks ask, and their plans in the schedule follow what they are given."""

from __future__ import annotations

import random

import numpy as np
import pytest

from spiderfs.core.engine import Engine
from spiderfs.core.plans.exchange import Exchanged
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.daemon.training.plans import Rank, Sharing
from spiderfs.daemon.training.trainer import KnownList, SampleList
from spiderfs.policies.baselines import LRU
from spiderfs.protocol import Exchange, Plan, Progress

FILES = 12


def listed(digest: str) -> KnownList:
    paths = b"".join(b"%d\0" % number for number in range(FILES))
    samples = SampleList("train", "train", paths, np.zeros(FILES, np.int32))
    return KnownList(digest, samples, np.arange(1, FILES + 1, dtype=np.uint64))


class Mount:
    """An engine that follows plans and holds four files of a list, whose sample n is the file n + 1."""

    def __init__(self) -> None:
        self.list = listed("digest")
        self.engine = Engine(LRU(), 4)
        self.sharing = Sharing(self.engine, random.Random(1).random, lambda key: True)

    def plan(self, rank: Rank, order: list[int], epoch: int = 0, position: int = 0) -> None:
        drawn = np.array(order, np.uint32)
        planned = PlannedEpoch(epoch, self.list.keys, self.list.index_of, drawn, position)
        self.engine.plan(*rank, planned, 0.0)
        self.sharing.planned(rank, Plan(rank[1], epoch, position, True, drawn))

    def ask(
        self, rank: Rank, wanted: list[int], position: int = 0, dispatched: tuple[int, ...] = (), epoch: int = 0
    ) -> list[int]:
        indices = np.array(dispatched, np.uint32), np.array(wanted, np.uint32)
        question = Exchange(rank[1], 1, epoch, position, 0, *indices)
        given: list[int] = self.sharing.ask(rank, f"job {rank[0]}", self.list, question).tolist()
        return given

    def planned(self, rank: Rank) -> list[int]:
        order: list[int] = self.engine.schedule.readers[rank].epoch.order.tolist()
        return order


A, B = (1, "train"), (2, "train")


@pytest.fixture
def mount() -> Mount:
    mount = Mount()
    for rank in (A, B):
        mount.plan(rank, list(range(FILES)))
    for key in (9, 10, 11, 12):
        mount.engine.opened(key, 1)
    return mount


def test_a_plan_is_put_right_when_an_answer_was_not_taken(mount: Mount) -> None:
    mount.ask(A, [0])
    mount.ask(B, [5])
    mount.ask(B, [6], 1, (5,))
    assert mount.planned(B)[0] == 5
    assert sorted(mount.planned(B)) == list(range(FILES))
    assert mount.sharing.counts("job 2").asked == 2


def test_the_news_of_what_was_taken_may_come_before_that_of_what_was_dispatched(mount: Mount) -> None:
    mount.ask(B, [])
    mount.ask(A, [8])
    mount.sharing.progressed(A, Progress("train", 0, 1, 1))
    mount.ask(A, [9], 1, (8,))
    shared = mount.engine.exchange_pending.lists["digest"]
    assert not shared.reserved(8)
    assert shared.wanted_by(8) == 1, "it is pending for the other job"


def test_what_was_dispatched_while_questions_were_lost_is_pending_no_more(mount: Mount) -> None:
    mount.ask(B, [])
    mount.ask(A, [8])
    mount.ask(A, [3], 3, (2,))
    shared = mount.engine.exchange_pending.lists["digest"]
    assert [shared.wanted_by(sample) for sample in (8, 1, 2, 3)] == [1, 1, 2, 2]


def test_what_was_exchanged_saves_the_bytes_of_what_was_cached(mount: Mount) -> None:
    mount.ask(A, [])
    given = mount.ask(B, [0])
    assert given[0] >= 8
    assert mount.sharing.counts("job 2").exchanged == 0, "the answer may come too late"
    mount.ask(B, [1], 1, tuple(given))
    mount.ask(B, [2], 2, (1,))
    mount.sharing.trainer_left(2)
    counts = mount.sharing.counts("job 2")
    assert (counts.exchanged, counts.saved_bytes) == (1, 1)
    mount.sharing.keep_only({"job 1"})
    assert mount.sharing.counts("job 2") == Exchanged()


def test_a_name_that_means_another_list_leaves_nothing_of_the_former_one(mount: Mount) -> None:
    mount.ask(A, [0])
    mount.list = listed("another digest")
    mount.ask(A, [0])
    assert list(mount.engine.exchange_pending.lists) == ["another digest"]


def test_a_rank_goes_on_with_a_new_manager(mount: Mount) -> None:
    order = [11, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0]
    mount.plan(A, order, position=1)
    mount.ask(A, [3], 3, (1, 2))
    shared = mount.engine.exchange_pending.lists["digest"]
    assert [shared.wanted_by(sample) for sample in (11, 1, 3, 0)] == [0, 1, 1, 1]
    assert shared.reserved(1)
