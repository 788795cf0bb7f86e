"""The engine's members, sections and shares, by example and against a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spiderfs.core.engine import BLOCKS, NOTHING, Changes, Engine
from spiderfs.core.policy import SAMPLES, Key, Policy
from spiderfs.core.rooms import NO_VIEWS, PINS, VIEWS, ViewsRoom, file_of
from spiderfs.policies import mountable_policies
from spiderfs.policies.baselines import LFU, LRU, MinIO


class HalfAndHalf(Policy):
    """A policy with a section of odd keys and one of even keys, and a movable border; the smallest key leaves first."""

    name = "half"
    sections = ("odd", "even")
    foreseen = "odd"

    def __init__(self) -> None:
        self.odd_share = 0.5
        self.also_odd: set[Key] = set()
        self._members: set[Any] = set()

    def limit(self, section: str, share_bytes: int, held_bytes: Mapping[str, int]) -> int:
        odd = int(share_bytes * self.odd_share)
        return odd if section == "odd" else share_bytes - odd

    def section_for(self, key: Key) -> str:
        return "odd" if key in self.also_odd or (isinstance(key, int) and key % 2) else "even"

    def hit(self, key: Key, size: int) -> None: ...

    def missed(self, key: Key, size: int) -> None: ...

    def inserted(self, key: Key, size: int) -> None:
        self._members.add(key)

    def removed(self, key: Key) -> None:
        self._members.remove(key)

    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        return iter(sorted(key for key in self._members if section in (None, self.section_for(key))))

    def victims_for(self, key: Any, size: int, full: str | None) -> Iterator[Key]:
        return (victim for victim in self.eviction_order(self.section_for(key)) if victim < key)

    def score(self, key: Key) -> float:
        return 1.0

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        self._members = set(members)


def test_keeps_while_there_is_room() -> None:
    engine = Engine(MinIO(), 100, landing_bytes=20)
    assert engine.budget_bytes == 80
    assert engine.opened(1, 50) == Changes(keep=((1, SAMPLES),))
    assert engine.opened(1, 50) == NOTHING
    assert engine.opened(2, 31) == NOTHING
    assert engine.opened(3, 30) == Changes(keep=((3, SAMPLES),))
    assert (engine.used_bytes, dict(engine.section_bytes)) == (80, {SAMPLES: 80, BLOCKS: 0})


def test_all_or_nothing() -> None:
    engine = Engine(HalfAndHalf(), 40)
    engine.opened(3, 10)
    engine.opened(7, 10)
    # Only 3 is worth less than 5, and its bytes are not enough.
    assert engine.opened(5, 20) == NOTHING
    assert engine.opened(5, 10) == Changes(((5, "odd"),), (3,))


def test_sections_have_their_own_limits_and_victims() -> None:
    engine = Engine(HalfAndHalf(), 40)
    for key in (2, 4, 1, 3):
        engine.opened(key, 10)
    assert engine.opened(5, 10) == Changes(((5, "odd"),), (1,))
    assert engine.opened(6, 10) == Changes(((6, "even"),), (2,))
    assert engine.section_bytes == {"odd": 20, "even": 20, BLOCKS: 0}


def test_place_moves_a_member_into_the_section_it_now_belongs_to() -> None:
    policy = HalfAndHalf()
    engine = Engine(policy, 40)
    for key in (2, 4, 1, 3):
        engine.opened(key, 10)
    assert engine.place(2, 10) == NOTHING
    # From now on the policy counts 4 and 2 as odd; no odd member is worth less than 2.
    policy.also_odd |= {2, 4}
    assert engine.place(4, 10) == Changes(((4, "odd"),), (1,))
    assert engine.section_bytes == {"odd": 20, "even": 10, BLOCKS: 0}
    assert engine.place(2, 10) == NOTHING
    assert engine.members[2].section == "even"


def test_a_moved_border_evicts_at_once() -> None:
    policy = HalfAndHalf()
    engine = Engine(policy, 40)
    for key in (2, 4, 1, 3):
        engine.opened(key, 10)
    policy.odd_share = 0.25
    assert engine.settle() == Changes(drop=(1,))


def test_blocks_fill_what_is_free_and_give_it_back() -> None:
    engine = Engine(MinIO(), 100, large_share=0.5)
    for block in range(10):
        assert engine.block_read((9, block), 10) == Changes(keep=(((9, block), BLOCKS),))
    engine.block_read((9, 0), 10)
    # The policy takes back what is beyond the blocks' share, the least recently read first, and no more.
    drops = [engine.opened(key, 10).drop for key in range(6)]
    assert drops == [((9, 1),), ((9, 2),), ((9, 3),), ((9, 4),), ((9, 5),), ()]
    assert engine.section_bytes == {SAMPLES: 50, BLOCKS: 50}


def test_growing_blocks_take_the_policys_share_down_to_its_floor() -> None:
    engine = Engine(MinIO(), 100, large_share=0.3)
    for key in range(10):
        engine.opened(key, 10)
    drops = [engine.block_read((9, block), 10).drop for block in range(4)]
    assert drops == [(9,), (8,), (7,), ((9, 0),)]
    assert engine.section_bytes == {SAMPLES: 70, BLOCKS: 30}


def test_resize_evicts_at_once_and_growth_lets_in() -> None:
    engine = Engine(MinIO(), 100)
    for key in range(10):
        engine.opened(key, 10)
    assert engine.resize(75, 10).drop == (9, 8, 7, 6)
    assert engine.opened(11, 10) == NOTHING
    assert engine.resize(75, 0) == NOTHING
    assert engine.opened(11, 10).keep == ((11, SAMPLES),)
    assert len(engine.resize(10, 20).drop) == 7


def test_resize_takes_borrowed_blocks_first() -> None:
    engine = Engine(MinIO(), 100, large_share=0.2)
    for key in range(5):
        engine.opened(key, 10)
        engine.block_read((9, key), 10)
    assert engine.resize(80, 0).drop == ((9, 0), (9, 1))
    assert engine.resize(50, 0).drop == ((9, 2), (9, 3), 4)


def test_change_of_policy_moves_to_its_sections_within_their_limits() -> None:
    engine = Engine(LRU(), 40)
    for key in (1, 3, 5, 2):
        engine.opened(key, 10)
    changes = engine.change_policy(HalfAndHalf())
    assert changes.drop == (1,)
    assert set(changes.keep) == {(3, "odd"), (5, "odd"), (2, "even")}
    assert engine.section_bytes == {"odd": 20, "even": 10, BLOCKS: 0}


def test_restore_goes_on_with_the_saved_order() -> None:
    engine = Engine(LRU(), 50)
    for key in (1, 2, 3, 1):
        engine.opened(key, 10)
    for block in (0, 1, 0):
        engine.block_read((9, block), 10)
    stored = [(key, member.size, member.section) for key, member in sorted(engine.members.items(), key=repr)]
    again = Engine(LRU(), 50)
    assert again.restore(stored, engine.state()) == NOTHING
    assert again.members == engine.members
    assert again.opened(4, 10).drop == (2,)
    assert again.resize(40, 0).drop == (3,)
    assert again.block_read((9, 2), 10).drop == ((9, 1),)


def shows_odd_ones_as_views(share: float) -> ViewsRoom:
    return ViewsRoom(share, lambda key: key % 2 == 1)  # type: ignore[operator]


def test_views_take_their_share_from_originals_and_no_more() -> None:
    engine = Engine(MinIO(), 100, views=shows_odd_ones_as_views(0.4))
    for key in range(0, 20, 2):
        assert engine.opened(key, 10).keep == ((key, SAMPLES),)
    assert engine.would_keep(1, 10)
    assert engine.opened(1, 10) == Changes(((1, VIEWS),), (18,))
    assert engine.opened(3, 30) == Changes(((3, VIEWS),), (16, 14, 12))
    assert not engine.would_keep(5, 10)
    assert engine.could_keep(5, 40)
    assert not engine.could_keep(5, 41)
    assert engine.opened(5, 10) == NOTHING
    assert engine.opened(30, 10) == NOTHING
    assert dict(engine.section_bytes) == {SAMPLES: 60, VIEWS: 40, BLOCKS: 0}


def test_a_later_mount_knows_views_by_their_names() -> None:
    named = {1}
    views = ViewsRoom(0.5, lambda key: key % 2 == 1 if key in named else None)  # type: ignore[operator]
    engine = Engine(MinIO(), 40, views=views)
    changes = engine.restore([(1, 10, VIEWS), (3, 10, VIEWS), (2, 10, SAMPLES)], {})
    # No one has looked for 3 yet, and perhaps no one ever will: it is an ordinary sample until then.
    assert changes == Changes(((3, SAMPLES),))
    assert engine.opened(3, 10) == NOTHING
    named.add(3)
    assert engine.opened(3, 10) == Changes(((3, VIEWS),))
    assert engine.opened(3, 10) == NOTHING


def test_a_pinned_sample_stays_whatever_comes() -> None:
    engine = Engine(LRU(), 40)
    for key in (1, 2, 3, 4):
        engine.opened(key, 10)
    assert engine.pin(1, 10)
    assert engine.place(1, 10) == Changes(((1, PINS),))
    assert engine.place(1, 10) == NOTHING
    # No one has it yet: it comes in as soon as someone opens it, though MIN or LRU would have others leave.
    assert engine.pin(9, 10)
    assert engine.would_keep(9, 10)
    assert engine.opened(9, 10) == Changes(((9, PINS),), (2,))
    for key in range(20, 30):
        engine.opened(key, 10)
    assert {1, 9} < engine.members.keys()
    assert engine.section_bytes == {SAMPLES: 20, PINS: 20, BLOCKS: 0}
    assert engine.change_policy(LFU()).drop == ()
    assert {1, 9} < engine.members.keys()


def test_pins_take_half_of_the_cache_and_no_more() -> None:
    engine = Engine(MinIO(), 40, landing_bytes=0)
    assert [engine.pin(key, 8) for key in (1, 2, 3)] == [True, True, False]
    assert engine.pin(1, 8), "it is pinned already"
    # What is pinned may turn out to be larger than was thought: it is an ordinary candidate then.
    engine.opened(1, 15)
    assert engine.opened(2, 10) == Changes(((2, SAMPLES),))
    assert engine.members[1].section == PINS
    assert not engine.could_keep(1, 41)


def test_blocks_of_a_pinned_file_stay() -> None:
    engine = Engine(LRU(), 40, large_share=0.5)
    assert engine.block_read((9, 1), 10).keep == (((9, 1), BLOCKS),)
    assert engine.pin(9, 20)
    assert engine.place((9, 1), 10) == Changes((((9, 1), PINS),))
    assert engine.block_read((9, 2), 10) == Changes((((9, 2), PINS),))
    for block in range(1, 9):
        engine.block_read((8, block), 10)
    assert {(9, 1), (9, 2)} < engine.members.keys()
    assert engine.block_read((9, 1), 10) == NOTHING
    engine.pins.discard(9)
    for block in (1, 2):
        engine.place((9, block), 10)
    assert engine.section_bytes[PINS] == 0
    assert engine.used_bytes <= 40


def test_pins_outlive_a_mount_and_leave_with_the_capacity_the_newest_first() -> None:
    engine = Engine(LRU(), 80)
    for key in (1, 2, 3):
        engine.pin(key, 10)
        engine.opened(key, 10)
    again = Engine(LFU(), 40)
    stored = [(key, member.size, member.section) for key, member in engine.members.items()]
    assert again.restore(stored, {}) == Changes(drop=(3,))
    assert list(again.pins) == [1, 2, 3]
    assert again.pins.bytes == 30
    # With room it comes back as one that is pinned.
    again.resize(80, 0)
    assert again.opened(3, 10) == Changes(((3, PINS),))
    # The user's word counts more than an earlier one.
    again.evict([1])
    assert list(again.pins) == [2, 3]


def test_a_large_file_of_which_a_part_was_kept_needs_room_for_all_of_it() -> None:
    engine = Engine(LRU(), 80)
    engine.restore([((9, 1), 10, PINS)], {})
    assert engine.pin(1, 25)
    assert not engine.pin(9, 20)
    engine.pins.discard(1)
    assert engine.pin(9, 20)
    assert engine.pins.bytes == 20


SUBJECTS: dict[str, type[Policy]] = {**mountable_policies(), "half": HalfAndHalf}
POLICY_NAMES = st.sampled_from(sorted(SUBJECTS))
SAMPLE_KEYS = st.integers(0, 30)
BLOCK_KEYS = st.tuples(st.integers(100, 102), st.integers(0, 6))
CAPACITIES = st.integers(0, 120)
LANDINGS = st.integers(0, 30)


def size_of(key: Key) -> int:
    """A size is a property of the key: a version never changes its bytes."""
    return 8 if isinstance(key, tuple) else hash(key) * 7 % 23


class EngineAgainstModel(RuleBasedStateMachine):
    """The model is a store: it does what each Changes says, and knows nothing else."""

    @initialize(
        policy=POLICY_NAMES,
        capacity=CAPACITIES,
        landing=LANDINGS,
        share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
        views_share=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    )
    def begin(self, policy: str, capacity: int, landing: int, share: float, views_share: float) -> None:
        self.share = share
        self.unnamed: set[Key] = set()
        self.views = ViewsRoom(views_share, self.is_view) if views_share else NO_VIEWS
        self.engine = Engine(SUBJECTS[policy](), capacity, landing, share, self.views)
        self.stored: dict[Key, str] = {}

    def is_view(self, key: Key) -> bool | None:
        return None if key in self.unnamed else hash(key) % 3 == 0

    def follow(self, changes: Changes, candidate: Key | None = None) -> None:
        kept = [key for key, _ in changes.keep]
        assert len({*kept, *changes.drop}) == len(kept) + len(changes.drop)
        for key in changes.drop:
            del self.stored[key]
        for key, section in changes.keep:
            assert key in self.stored or key == candidate
            self.stored[key] = section

    @rule(key=SAMPLE_KEYS)
    def opened(self, key: int) -> None:
        pinned = {one for one, section in self.stored.items() if section == PINS}
        self.follow(self.engine.opened(key, size_of(key)), key)
        assert pinned <= self.stored.keys()

    @rule(key=SAMPLE_KEYS)
    def looked_up(self, key: int) -> None:
        self.unnamed.discard(key)

    @rule(key=SAMPLE_KEYS)
    def place(self, key: int) -> None:
        self.follow(self.engine.place(key, size_of(key)), key)

    @rule(key=BLOCK_KEYS)
    def block_read(self, key: tuple[int, int]) -> None:
        changes = self.engine.block_read(key, size_of(key))
        self.follow(changes, key)
        if any(not isinstance(victim, tuple) for victim in changes.drop):
            assert self.engine.section_bytes[BLOCKS] <= self.engine.budget_bytes * self.share

    @rule(inode=st.one_of(SAMPLE_KEYS, st.integers(100, 102)))
    def pin(self, inode: int) -> None:
        if self.engine.pin(inode, size_of(inode)):
            self.place_all(inode)

    @rule(inode=st.one_of(SAMPLE_KEYS, st.integers(100, 102)))
    def unpin(self, inode: int) -> None:
        self.engine.pins.discard(inode)
        self.place_all(inode)
        assert all(self.engine.members[key].section != PINS for key in self.engine.members if file_of(key) == inode)

    def place_all(self, inode: int) -> None:
        for key in [key for key in self.stored if file_of(key) == inode]:
            if key in self.engine.members:
                self.follow(self.engine.place(key, size_of(key)))

    @rule(keys=st.lists(st.one_of(SAMPLE_KEYS, BLOCK_KEYS), max_size=4))
    def evict(self, keys: list[Key]) -> None:
        changes = self.engine.evict(keys)
        self.follow(changes)
        assert not set(keys) & set(self.engine.members)

    @rule(key=st.one_of(SAMPLE_KEYS, BLOCK_KEYS))
    def forget(self, key: Key) -> None:
        self.engine.forget(key)
        self.stored.pop(key, None)

    @rule(capacity=CAPACITIES, landing=LANDINGS)
    def resize(self, capacity: int, landing: int) -> None:
        self.follow(self.engine.resize(capacity, landing))
        assert self.engine.budget_bytes == max(0, capacity - landing)

    @rule(policy=POLICY_NAMES)
    def change_policy(self, policy: str) -> None:
        self.follow(self.engine.change_policy(SUBJECTS[policy]()))

    @rule(policy=POLICY_NAMES, capacity=CAPACITIES, remembers=st.booleans(), lost=SAMPLE_KEYS, named=st.booleans())
    def remount(self, policy: str, capacity: int, remembers: bool, lost: int, named: bool) -> None:
        self.unnamed = set() if named else set(self.stored)
        state = self.engine.state() if remembers else {}
        self.stored.pop(lost, None)
        self.engine = Engine(SUBJECTS[policy](), capacity, 0, self.share, self.views)
        self.follow(self.engine.restore([(key, size_of(key), place) for key, place in self.stored.items()], state))

    @invariant()
    def books_agree(self) -> None:
        members = self.engine.members
        assert {key: member.section for key, member in members.items()} == self.stored
        sums = dict.fromkeys(self.engine.section_bytes, 0)
        for key, member in members.items():
            assert member.size == size_of(key)
            sums[member.section] += member.size
        assert sums == self.engine.section_bytes
        assert self.engine.used_bytes == sum(sums.values()) <= self.engine.budget_bytes
        assert self.engine.section_bytes[PINS] <= self.engine.pins_limit_bytes

    @invariant()
    def policy_knows_exactly_the_members(self) -> None:
        samples = {key for key, member in self.engine.members.items() if member.section not in (BLOCKS, PINS, VIEWS)}
        order = list(self.engine.policy.eviction_order())
        assert len(order) == len(samples)
        assert set(order) == samples


TestEngineAgainstModel = EngineAgainstModel.TestCase
TestEngineAgainstModel.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
