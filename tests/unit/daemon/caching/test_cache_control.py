"""From events through the engine into the store: the two agree after every step."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from benchmarks.fakes import MemoryContent
from spiderfs.core.engine import BLOCKS
from spiderfs.core.events import FETCHED, HIT, OPENED, REFUSED, WARMED, Access
from spiderfs.core.partials import PARTIALS
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Hub, HubLimits
from spiderfs.core.rooms import LANDING_FILES, LANDING_MAX_BYTES, LANDING_SHARE, PINS
from spiderfs.daemon.caching.cache_control import LANDING_MOST_SHARE, CacheControl
from spiderfs.errors import StoreFull
from spiderfs.metrics import SharedCounters
from spiderfs.policies import mountable_policies
from spiderfs.protocol.partials import FIRST_PARTIAL
from spiderfs.store.store import LANDING, ContentKey, Keep

CAPACITY = 10_000


def event(inode: int, size: int, where: int = FETCHED, block: int = 0) -> Access:
    return Access(1.0, inode, inode, size, block, 1, 0, where)


class Harness:
    def __init__(self, policy: str = "lru", capacity: int = CAPACITY, content: MemoryContent | None = None) -> None:
        self.content = content or MemoryContent()
        self.counters = SharedCounters(1)
        self.cache = CacheControl(self.content, policy, 0.5, self.counters.row(0))
        self.cache.restore(capacity, None)

    def fetched(self, *inodes: int, size: int = 500, block: int = 0) -> None:
        """Land records and tell the cache, one event each."""
        for inode in inodes:
            landed = self.content.land(ContentKey(inode, block), bytes(size))
            self.cache.fold([event(inode, size, FETCHED if landed else REFUSED, block)])

    def kept(self, section: str | None = None) -> list[int]:
        """The inodes in a section, or in those that hold small files."""
        return sorted(
            member.key.inode
            for member in self.content.members()
            if (member.section == section if section else member.section not in (LANDING, BLOCKS))
        )

    def counted(self, *names: str) -> list[int]:
        totals = self.counters.totals()
        return [totals[name] for name in names]

    def check(self) -> None:
        """Engine and store hold the same records in the same sections, within the budget."""
        kept = {
            member.key if member.key.block else member.key.inode: (member.size, member.section)
            for member in self.content.members()
            if member.section != LANDING
        }
        assert kept == {key: tuple(member) for key, member in self.cache.engine.members.items()}
        usage = self.content.usage()
        assert usage.used_bytes <= usage.capacity_bytes
        assert usage.kept_bytes == self.cache.engine.used_bytes


class FullContent(MemoryContent):
    """A store whose disk has no room for so many writes."""

    failing = 0

    def apply(self, drop: Iterable[ContentKey], keep: Iterable[Keep]) -> list[ContentKey]:
        self._fail()
        return super().apply(drop, keep)

    def set_capacity(self, capacity_bytes: int) -> None:
        self._fail()
        super().set_capacity(capacity_bytes)

    def _fail(self) -> None:
        if self.failing:
            self.failing -= 1
            raise StoreFull("no space left for the cache")


def test_limits_of_hubs_hold_at_once_and_for_policies_that_are_chosen_later() -> None:
    harness = Harness("spider")
    for limits in (HubLimits(substitutions=0), HubLimits(substitutions=None, neighbours=None)):
        harness.cache.limit_hubs(limits)
        for _ in range(2):
            spider = harness.cache.engine.policy
            spider.hub_found(Hub(1, "train", range(100, 300), [0.1] * 200))
            harness.fetched(1)
            given = [spider.substitute_for("train", key) for key in range(100, 300)]
            assert given == [None if limits.substitutions == 0 else 1] * 200
            harness.cache.evict([ContentKey(1)])
            harness.cache.set_policy("lru")
            harness.cache.set_policy("spider")


def test_what_the_store_could_not_do_is_undone_and_can_be_tried_again() -> None:
    content = FullContent()
    harness = Harness(content=content)
    harness.fetched(*range(1, 16))
    before = harness.kept()
    for change in (
        lambda: harness.cache.set_capacity(3000),
        lambda: harness.cache.set_policy("spider"),
        lambda: harness.cache.evict([ContentKey(before[0])]),
    ):
        content.failing = 1
        with pytest.raises(StoreFull):
            change()
        assert harness.kept() == before
        assert harness.cache.engine.policy.name == "lru"
        harness.check()
    harness.cache.set_capacity(3000)
    assert harness.content.usage().used_bytes <= 3000
    harness.check()
    harness.cache.set_policy("spider")
    harness.check()


# -- folding


def test_a_keep_that_comes_too_late_is_undone() -> None:
    harness = Harness()
    harness.cache.fold([event(1, 500), event(2, 500, HIT)])
    harness.check()
    assert harness.kept() == []
    assert harness.counted("admitted", "landing_lost") == [0, 2]
    harness.fetched(1)
    assert harness.kept() == [1]


def test_what_was_warmed_is_a_candidate() -> None:
    harness = Harness()
    harness.content.land(ContentKey(1), bytes(500))
    harness.cache.fold([event(1, 500, WARMED)])
    assert harness.kept() == [1]


def test_a_file_that_landing_refused_enlarges_it() -> None:
    harness = Harness(policy="minio")
    harness.fetched(*range(1, 100), size=100)
    before = harness.content.usage()
    assert CAPACITY - before.kept_bytes < 900
    harness.fetched(200, size=900)
    assert harness.counted("evicted") != [0]
    harness.check()
    assert harness.content.land(ContentKey(200), bytes(900)), "the next reader finds room for it"
    assert CAPACITY - harness.content.usage().kept_bytes >= LANDING_FILES * 900
    evicted = harness.counted("evicted")
    harness.cache.fold([event(201, 900, REFUSED), event(202, 800, REFUSED)])
    assert harness.counted("evicted") == evicted, "there is room enough now"


def test_landing_is_a_small_share_and_bounded() -> None:
    assert Harness().cache.engine.budget_bytes == CAPACITY - int(CAPACITY * LANDING_SHARE)
    large = Harness(capacity=1 << 40)
    assert large.cache.engine.budget_bytes == (1 << 40) - LANDING_MAX_BYTES


@pytest.mark.parametrize("policy", mountable_policies())
def test_landing_needs_less_room_while_it_is_known_what_lands(policy: str) -> None:
    harness = Harness(policy, capacity=100_000)
    harness.fetched(*range(1, 300), size=500)
    budget = harness.cache.engine.budget_bytes
    assert budget == 95_000
    harness.cache.expect(3)
    harness.check()
    assert harness.cache.engine.budget_bytes == 98_500
    harness.cache.expect(1_000_000)
    assert harness.cache.engine.budget_bytes == budget
    harness.cache.expect(3)
    harness.fetched(*range(300, 310), size=500)
    harness.check()
    harness.cache.expect(None)
    harness.check()
    assert harness.cache.engine.budget_bytes == budget
    # However few, some of the largest size met find room.
    harness.cache.fold([event(999, 2000, REFUSED)])
    harness.cache.expect(1)
    assert harness.cache.engine.budget_bytes == 100_000 - LANDING_FILES * 2000


def test_landing_grows_while_it_loses_what_was_expected_to_stay() -> None:
    harness = Harness(capacity=100_000)
    harness.fetched(*range(1, 300), size=500)
    harness.cache.expect(4)
    harness.fetched(*range(700, 710), size=500)
    harness.check()

    def burst(first: int) -> int:
        """Twelve records land before the manager hears of the first; returns how many it could not keep."""
        before = harness.counted("landing_lost")[0]
        for inode in range(first, first + 12):
            assert harness.content.land(ContentKey(inode), bytes(500))
        harness.cache.fold([event(inode, 500) for inode in range(first, first + 12)])
        harness.cache.expect(4)
        harness.check()
        return harness.counted("landing_lost")[0] - before

    assert burst(300) > 4
    assert burst(400) == 0
    # However many are lost, a tenth of the cache is the most.
    for inode in range(500, 600):
        harness.content.land(ContentKey(inode), bytes(500))
    harness.cache.fold([event(inode, 500) for inode in range(500, 600)])
    harness.cache.expect(4)
    assert harness.cache.engine.budget_bytes == 100_000 - int(100_000 * LANDING_MOST_SHARE)
    harness.cache.expect(None)
    assert harness.cache.engine.budget_bytes == 100_000 - int(100_000 * LANDING_SHARE)


def test_opening_a_large_file_is_a_step_of_the_plan_and_no_candidate() -> None:
    harness = Harness()
    order = np.array([0, 1, 2], np.uint32)
    epoch = PlannedEpoch(0, [11, 12, 13], {11: 0, 12: 1, 13: 2}, order)
    harness.cache.engine.plan(7, "train", epoch, 0.0)
    opened = Access(1.0, 11, 11, 0, 0, 1, 7, OPENED)
    harness.cache.fold([opened])
    (reader,) = harness.cache.engine.schedule.trusted
    assert (reader.epoch.pending(0), reader.opens, reader.late) == (False, 1, 0)
    assert harness.counted("planned_opens", "planned_late", "admitted") == [1, 0, 0]


# -- from one mount to the next


@pytest.mark.parametrize("policy", mountable_policies())
def test_a_restart_knows_what_is_cached_and_in_which_order(policy: str) -> None:
    first = Harness(policy)
    first.fetched(*range(1, 10))
    first.fetched(50, block=1)
    first.cache.fold([event(2, 500, HIT), event(2, 500, HIT), event(1, 500, HIT)])
    first.content.land(ContentKey(77), bytes(500))
    state = first.cache.saved_state()
    order = list(first.cache.engine.policy.eviction_order())

    second = Harness(policy, content=first.content)
    second.cache.restore(CAPACITY, state)
    second.check()
    assert second.kept() == [*range(1, 10), 77], "what waited in landing is a candidate still"
    again = [key for key in second.cache.engine.policy.eviction_order() if key != 77]
    assert again == order


def test_a_pinned_file_stays_and_outlives_the_mount() -> None:
    harness = Harness("minio", 2000)
    harness.fetched(1, 2, 3, 4)
    harness.check()
    # Landed, and refused: no one would offer it again.
    assert harness.content.member(ContentKey(4)) is not None
    assert harness.kept() == [1, 2, 3]
    assert harness.cache.pin(4, 500)
    assert harness.kept(PINS) == [4]
    assert not harness.cache.pin(1, 501)
    harness.check()
    again = Harness("lru", 2000, harness.content)
    again.fetched(*range(10, 20))
    again.check()
    assert again.kept(PINS) == [4]
    limit_bytes = again.cache.engine.pins_limit_bytes
    assert again.cache.status()["pins"] == {"files": 1, "bytes": 500, "limit_bytes": limit_bytes}
    again.cache.unpin([4, 99])
    assert again.kept(PINS) == []
    again.check()
    again.fetched(*range(20, 30))
    assert 4 not in again.kept()


@pytest.mark.parametrize("state", [b"", b"\xc1", b"garbage", b"\x01", msgpack.packb([1, 2])])
def test_a_state_that_cannot_be_read_begins_a_new_order(state: bytes, caplog: pytest.LogCaptureFixture) -> None:
    first = Harness()
    first.fetched(1, 2)
    second = Harness(content=first.content)
    with caplog.at_level(logging.WARNING):
        second.cache.restore(CAPACITY, state)
    assert [record.message for record in caplog.records] == [
        "the order of the cached files could not be read: starting a new one"
    ]
    second.check()
    assert second.kept() == [1, 2]


def test_taking_stock_when_the_store_holds_something_else(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    harness.fetched(1, 2, 3)
    harness.cache.fold([event(2, 500, HIT)])
    with caplog.at_level(logging.WARNING):
        harness.cache.reconcile()
        assert caplog.records == []
        harness.content.apply([ContentKey(3)], ())
        harness.cache.reconcile()
    assert len(caplog.records) == 1
    harness.check()
    assert list(harness.cache.engine.policy.eviction_order()) == [1, 2], "the order is kept"


# -- against the store, at random

INODES = st.integers(1, 12)


def test_partial_samples_take_their_room_from_the_policy():
    harness = Harness()
    harness.fetched(*range(1, 19))
    assert len(harness.kept()) == 18
    for number in range(8):
        inode = FIRST_PARTIAL + number
        if not harness.content.land(ContentKey(inode), bytes(1000)):
            harness.cache.make_room_for(1000)
            assert harness.content.land(ContentKey(inode), bytes(1000))
        assert harness.cache.keep_partial(inode, 1000, None)
        usage = harness.content.usage()
        assert usage.used_bytes <= usage.capacity_bytes
        assert usage.kept_bytes == harness.cache.engine.used_bytes + harness.cache.partials.bytes
    # Half of the capacity, which is 10,000.
    assert harness.kept(PARTIALS) == [FIRST_PARTIAL + number for number in range(3, 8)]
    # Five samples make 2,500, and landing has room for four records of 1,000, which is most of the other half.
    assert len(harness.cache.engine.members) == 2
    assert harness.cache.score(ContentKey(FIRST_PARTIAL + 3)) == 0
    # Partial samples are cached in no form of a file.
    assert harness.cache.samples == harness.cache.status()["entries"] - 5 == 2
    harness.cache.reconcile()
    assert len(harness.cache.partials) == 5
    harness.cache.set_capacity(4_000)
    assert harness.kept(PARTIALS) == [FIRST_PARTIAL + number for number in (6, 7)]


def test_partial_samples_outlive_a_manager_and_those_that_had_only_landed_do_not_become_samples():
    harness = Harness()
    for number in range(3):
        harness.content.land(ContentKey(FIRST_PARTIAL + number), bytes(1000))
    assert harness.cache.keep_partial(FIRST_PARTIAL, 1000, None)
    assert harness.cache.keep_partial(FIRST_PARTIAL + 1, 1000, FIRST_PARTIAL)
    again = Harness(content=harness.content)
    assert again.kept(PARTIALS) == [FIRST_PARTIAL + 1]
    assert (len(again.cache.partials), len(again.cache.engine.members)) == (1, 0)


def test_a_partial_sample_without_room_leaves_landing():
    harness = Harness()
    harness.content.land(ContentKey(FIRST_PARTIAL), bytes(6_000))
    assert not harness.cache.keep_partial(FIRST_PARTIAL, 6_000, None)
    assert list(harness.content.members()) == []
    # What was pushed out of landing is no member.
    assert not harness.cache.keep_partial(FIRST_PARTIAL + 1, 500, None)
    assert len(harness.cache.partials) == 0


class KeeperMachine(RuleBasedStateMachine):
    """Workers land and are pushed out, events are lost and come late: store and engine agree after every fold."""

    @initialize(policy=st.sampled_from(sorted(mountable_policies())), capacity=st.integers(500, 8000))
    def begin(self, policy: str, capacity: int) -> None:
        self.harness = Harness(policy, capacity)
        self.capacity = capacity
        self.waiting: list[tuple[object, ...]] = []

    @rule(inode=INODES, block=st.integers(0, 1), told=st.booleans())
    def read(self, inode: int, block: int, told: bool) -> None:
        size = 100 * inode
        key = ContentKey(inode, block)
        where = HIT if self.harness.content.has(key) else FETCHED
        if where == FETCHED and not self.harness.content.land(key, bytes(size)):
            where = REFUSED
        if told:
            self.waiting.append(event(inode, size, where, block))

    @rule()
    def fold(self) -> None:
        self.harness.cache.fold(self.waiting)
        self.waiting = []
        self.harness.check()

    @rule(capacity=st.integers(0, 8000))
    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.harness.cache.set_capacity(capacity)
        self.harness.check()

    @rule(policy=st.sampled_from(sorted(mountable_policies())))
    def switch(self, policy: str) -> None:
        self.harness.cache.set_policy(policy)
        self.harness.check()

    @rule(inodes=st.lists(INODES, max_size=3), block=st.integers(0, 1))
    def evict(self, inodes: list[int], block: int) -> None:
        self.harness.cache.evict([ContentKey(inode, block) for inode in inodes])
        self.harness.check()

    @rule(policy=st.sampled_from(sorted(mountable_policies())), saved=st.booleans())
    def restart(self, policy: str, saved: bool) -> None:
        state = self.harness.cache.saved_state() if saved else None
        self.harness = Harness(policy, self.capacity, self.harness.content)
        self.harness.cache.restore(self.capacity, state)
        self.harness.check()

    @invariant()
    def the_budget_is_held(self) -> None:
        usage = self.harness.content.usage()
        sizes = sum(member.size for member in self.harness.content.members())
        assert usage.used_bytes == sizes <= usage.capacity_bytes == self.capacity


TestKeeperModel = KeeperMachine.TestCase
TestKeeperModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
