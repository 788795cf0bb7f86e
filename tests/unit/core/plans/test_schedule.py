"""The schedule of readers' plans, against a model that keeps plain sets of positions."""

from __future__ import annotations

import sys
from collections import Counter
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spiderfs.core.events import HIT, Access
from spiderfs.core.plans import schedule as module
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.plans.remote import FIRST_PACE_S
from spiderfs.core.plans.schedule import (
    AWAITED,
    EARLY_S,
    LATER_EPOCHS,
    PROVEN_OPENS,
    TRUSTED_ABOVE,
    UNOPENED_MOST,
    UNPROVEN_SAMPLES,
    UNSEEN_AFTER_S,
    Draw,
    PlannedReader,
    Schedule,
)
from spiderfs.core.policy import Key

FILES = 12
# The files of two samples are not known.
KEYS = [0, *range(101, 101 + FILES - 2), 0]
INDEX_OF = {key: index for index, key in enumerate(KEYS) if key}
STRANGER = 999
ORDERS = st.one_of(
    st.permutations(range(FILES)),
    st.lists(st.integers(0, FILES - 1), min_size=1, max_size=40),
)


def planned(number: int, order: list[int], start: int = 0) -> PlannedEpoch:
    return PlannedEpoch(number, KEYS, INDEX_OF, np.array(order, np.uint32), start)


def of_files(number: int, order: list[int], start: int = 0, files: int = 0) -> PlannedEpoch:
    """An epoch over files 1 to n by their numbers, all of them known."""
    keys = list(range(1, max(files, *order) + 1))
    return PlannedEpoch(number, keys, {key: key - 1 for key in keys}, np.array(order, np.uint32) - np.uint32(1), start)


# -- one epoch


@given(order=ORDERS, data=st.data())
def test_next_position_is_the_first_pending_one(order: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(order)))
    epoch = planned(0, order, start)
    left = set(range(start, len(order)))
    assert epoch.repeats == (len(set(order[start:])) < len(order) - start)
    for _ in range(len(left)):
        for sample, key in enumerate(KEYS):
            positions = [position for position in left if order[position] == sample]
            assert epoch.next_position(key) == (min(positions) if key and positions else None)
        assert [epoch.pending(position) for position in range(start, len(order))] == [
            position in left for position in range(start, len(order))
        ]
        # Only the first of a sample's positions can be used up.
        position = data.draw(st.sampled_from(sorted(left)))
        position = min(other for other in left if order[other] == order[position])
        assert epoch.use_up(position) == KEYS[order[position]]
        left.remove(position)
    assert all(epoch.next_position(key) is None for key in KEYS)


@given(order=ORDERS, data=st.data())
def test_what_is_served_is_no_use(order: list[int], data: st.DataObject) -> None:
    epoch = planned(0, order)
    left = set(range(len(order)))
    served: set[int] = set()
    for _ in order:
        position = data.draw(st.integers(0, len(order) - 1))
        assert epoch.serve(position) == (KEYS[order[position]] if position in left else None)
        served.add(position)
        for sample, key in enumerate(KEYS):
            positions = [other for other in left - served if order[other] == sample]
            assert epoch.next_use(key) == (min(positions) if key and positions else None)
        position = data.draw(st.sampled_from(sorted(left)))
        position = min(other for other in left if order[other] == order[position])
        epoch.use_up(position)
        left.remove(position)


# -- one reader against a model


class ReaderAgainstModel(RuleBasedStateMachine):
    """The model keeps sets of positions. Limits are small here, so that all of them are met."""

    limits = patch.multiple(module, LOOK_AHEAD=6, SLACK_S=4 * FIRST_PACE_S, SLACK_SHARE=1 / 8)

    def __init__(self) -> None:
        super().__init__()
        self.limits.start()

    def teardown(self) -> None:
        self.limits.stop()

    @initialize(order=ORDERS, start=st.integers(0, 5))
    def first(self, order: list[int], start: int) -> None:
        start = min(start, len(order))
        self.reader = PlannedReader(planned(0, order, start), 0.0)
        self.number = 0
        self.orders = {0: order}
        self.starts = {0: start}
        self.left = {0: set(range(start, len(order)))}
        self.dispatched = self.taken = self.reached = start
        self.seen_to = start + 6
        self.early: list[int] = []
        self.since_report = 0

    def later(self) -> list[int]:
        return sorted(number for number in self.orders if number > self.number)

    def slack(self) -> float:
        length = len(self.orders[self.number])
        # Time stands still here, so no pace is ever known.
        return min(self.since_report, length / 4) + max(4, length / 8)

    def first_left(self, number: int, sample: int) -> int | None:
        order = self.orders[number]
        return min((position for position in self.left[number] if order[position] == sample), default=None)

    def next_use(self, sample: int) -> float | None:
        """Positions from the start of this epoch on; infinite if a later epoch reads the sample too far ahead."""
        before = 0
        for number in (self.number, *self.later()):
            position, order = self.first_left(number, sample), self.orders[number][self.starts[number] :]
            if position is not None:
                in_view = number == self.number or len(set(order)) < len(order) or before + position < self.seen_to
                return before + position if in_view else AWAITED
            before += len(self.orders[number])
        return None

    @rule(sample=st.integers(0, FILES - 1))
    def opened(self, sample: int) -> None:
        key = KEYS[sample]
        before = {other: self.reader.next_use_s(other) for other in INDEX_OF}
        # Opened after what was taken: the clock of progress stands at 0.
        changed = self.reader.opened(key, 1.0, False)
        after = {other: self.reader.next_use_s(other) for other in INDEX_OF}
        assert {other for other in INDEX_OF if before[other] != after[other]} <= set(changed)
        if not key:
            assert changed == []
            return
        self.since_report += 1
        here, later = self.first_left(self.number, sample), self.later()
        if here is not None:
            first = min((at for at in self.left[self.number] if at >= self.taken), default=None)
            if here < self.dispatched + self.slack() or here == first:
                self.left[self.number].remove(here)
                self._reach(here + 1)
        elif self.dispatched == len(self.orders[self.number]):
            there = self.first_left(later[0], sample) if later else None
            if there is not None and there < self.slack():
                self.left[later[0]].remove(there)
            else:
                self.early = [*(other for other in self.early if other != sample), sample]

    def _reach(self, position: int) -> None:
        if position > self.reached:
            self.reached = position
            self.seen_to = max(self.seen_to, position + 6)

    @rule()
    def stranger(self) -> None:
        opens = self.reader.opens
        assert self.reader.opened(STRANGER, 0.0, True) == []
        assert self.reader.opens == opens

    @precondition(lambda self: self.dispatched < len(self.orders[self.number]))
    @rule(jitter=st.integers(0, 5))
    def opened_about_as_planned(self, jitter: int) -> None:
        order = self.orders[self.number]
        self.opened(order[min(self.dispatched + jitter, len(order) - 1)])

    @rule(more=st.integers(-2, 6), in_hand=st.integers(-1, 8))
    def progressed(self, more: int, in_hand: int) -> None:
        told = self.dispatched + more
        before = {other: self.reader.next_use_s(other) for other in INDEX_OF}
        changed = self.reader.progressed(told, told - in_hand, 0.0)
        after = {other: self.reader.next_use_s(other) for other in INDEX_OF}
        assert {other for other in INDEX_OF if before[other] != after[other]} <= set(changed)
        order = self.orders[self.number]
        first, self.dispatched = self.dispatched, max(self.dispatched, min(told, len(order)))
        if self.dispatched > first:
            self.since_report = 0
        for position in range(first, self.dispatched):
            if order[position] in self.early and self.first_left(self.number, order[position]) == position:
                self.early.remove(order[position])
                self.left[self.number].remove(position)
        self.taken = max(self.taken, min(told - in_hand, self.dispatched))
        self.left[self.number] -= set(range(self.taken))
        self._reach(self.dispatched)

    @rule(order=ORDERS, ahead=st.integers(1, 3))
    def follow_with(self, order: list[int], ahead: int) -> None:
        number = self.number + ahead
        self.reader.follow_with(planned(number, order))
        self.orders[number], self.starts[number], self.left[number] = order, 0, set(range(len(order)))

    @rule(drawn_ahead=st.booleans(), order=ORDERS, start=st.integers(0, 3))
    def begin(self, drawn_ahead: bool, order: list[int], start: int) -> None:
        later = self.later()
        number = later[0] if later else self.number + 1
        if drawn_ahead and later:
            order, start = self.orders[number], 0
        else:
            start = min(start, len(order))
        if number in later and order != self.orders[number]:
            for mistaken in later[1:]:
                del self.orders[mistaken]
        if (order, start) != (self.orders.get(number), self.starts.get(number)):
            self.left[number] = set(range(start, len(order)))
        self.reader.begin(planned(number, order, start), 0.0)
        self.number, self.orders[number], self.starts[number] = number, order, start
        self.dispatched = self.taken = self.reached = start
        self.seen_to = start + 6
        self.since_report = 0

    @rule(ahead=st.integers(-1, 1))
    def end(self, ahead: int) -> None:
        number = self.number + ahead
        self.reader.end(number)
        for gone in [other for other in self.later() if other <= number]:
            del self.orders[gone]
        if self.number <= number:
            self.left[self.number] = set()
            self.dispatched = self.taken = self.reached = len(self.orders[self.number])
            self.seen_to = self.reached + 6

    @invariant()
    def agrees(self) -> None:
        assert (self.reader.dispatched, self.reader.taken) == (self.dispatched, self.taken)
        assert self.taken <= self.dispatched <= self.reached == self.reader.reached
        assert self.reader.in_hand == len([position for position in self.left[self.number] if position < self.reached])
        anchored = self.reader.time_of(0)
        for key, sample in INDEX_OF.items():
            use_s, position = self.reader.next_use_s(key), self.next_use(sample)
            assert (use_s is None) == (position is None)
            if use_s is not None and position is not None:
                assert use_s == pytest.approx(anchored + position * FIRST_PACE_S)

    @invariant()
    def what_comes_is_what_is_left(self) -> None:
        coming, before = [], 0
        for number in (self.number, *self.later()):
            order = self.orders[number]
            coming += [
                (before + position, KEYS[order[position]])
                for position in sorted(self.left[number])
                if before + position < self.reached + 9
            ]
            before += len(order)
        assert list(self.reader.coming(9)) == coming
        after = self.reached + 2
        assert list(self.reader.coming(9, after)) == [row for row in coming if row[0] >= after]


TestReaderAgainstModel = ReaderAgainstModel.TestCase
TestReaderAgainstModel.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, derandomize=True, database=None
)


# -- each draw is seen, or unseen, and never both


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    orders=st.lists(ORDERS, min_size=1, max_size=3),
    in_hand=st.integers(1, 9),
    lag=st.integers(0, 6),
    seed=st.integers(0, 1 << 30),
    known_ahead=st.booleans(),
)
def test_each_draw_is_counted_once(
    orders: list[list[int]], in_hand: int, lag: int, seed: int, known_ahead: bool
) -> None:
    """A loader opens what it was given in any order, and the kernel answers some of it; all news comes late."""
    rng = np.random.default_rng(seed)
    reader: PlannedReader | None = None
    seen = 0
    late: list[tuple[int, int, float]] = []
    now, step = 0.0, 0.01
    unseen: list[int] = []
    expected = 0
    told: Counter[tuple[int, Key]] = Counter()

    def tell(draw: Draw, unseen: bool) -> None:
        told[draw.epoch, draw.key] += 1
        assert unseen == (draw.access is None)

    def hear(until: int) -> None:
        nonlocal late
        assert reader is not None
        for _, key, at_s in [one for one in late if one[0] <= until]:
            reader.opened(key, at_s, False, Access(at_s, 1, 1, 1, 0, 1, 1, HIT))
        late = [one for one in late if one[0] > until]

    ticks = 0
    for number, order in enumerate(orders):
        epoch = planned(number, order)
        if reader is None:
            reader = PlannedReader(epoch, now, drawn=tell)
            # What a new reader has in hand when it is first heard of is left out of the account.
            reader.progressed(0, 0, now)
        else:
            reader.begin(epoch, now)
        if known_ahead and number + 1 < len(orders):
            reader.follow_with(planned(number + 1, orders[number + 1]))
        held: list[int] = []
        dispatched = taken = 0
        while taken < len(order):
            now, ticks = now + step, ticks + 1
            while dispatched < min(len(order), taken + in_hand):
                held.append(dispatched)
                dispatched += 1
            reader.progressed(dispatched, taken, now)
            rng.shuffle(held)
            # All that the loop takes next has been opened by then.
            for position in sorted(held)[: int(rng.integers(1, len(held) + 1))]:
                held.remove(position)
                key = KEYS[order[position]]
                if key and rng.random() < 0.5:
                    seen += 1
                    late.append((ticks + int(rng.integers(0, lag + 1)), key, now))
                elif key:
                    expected += 1
            taken = min(held, default=dispatched)
            now += step / 2
            reader.progressed(dispatched, taken, now)
            hear(ticks)
            unseen += reader.unseen(now)
    hear(ticks + lag)
    unseen += reader.unseen(now + 2 * UNSEEN_AFTER_S)
    assert len(unseen) == expected
    assert reader.opens == seen
    drawn = [(number, KEYS[sample]) for number, order in enumerate(orders) for sample in order]
    assert told == Counter(draw for draw in drawn if draw[1]), "each once, in its epoch"


def test_what_was_in_hand_at_a_readers_first_report_is_not_counted() -> None:
    """A hook that connects again, to a manager that was started again: its loader workers opened it long ago."""
    reader = PlannedReader(of_files(0, list(range(1, 101)), start=40), 0.0)
    reader.progressed(72, 40, 0.0)
    reader.progressed(100, 100, 1.0)
    assert reader.unseen(1.0) == []
    assert reader.unseen(1.0 + UNSEEN_AFTER_S) == list(range(73, 101))
    assert reader.unseen(9.0) == []
    assert reader.unseen_draws == 28


@pytest.mark.parametrize("known_ahead", [False, True])
def test_an_epoch_may_be_over_at_its_readers_first_report(known_ahead: bool) -> None:
    """A few samples, read in a millisecond: their opens are heard of later, and are of no later epoch."""
    told: list[tuple[int, Key, bool]] = []
    files = [1, 2, 3]
    reader = PlannedReader(of_files(0, files), 0.0, drawn=lambda draw, _: told.append(_named(draw)))
    for number in range(3):
        if number:
            reader.begin(of_files(number, files), float(number))
        if known_ahead:
            reader.follow_with(of_files(number + 1, files))
        reader.progressed(3, 3, number + 0.1)
        # One was opened before anybody knew whose opens to hear of.
        for key in files[not number :]:
            reader.opened(key, number + 0.05, False, Access(number + 0.05, 1, 1, 1, 0, 1, 1, HIT))
    assert reader.unseen(9.0) == []
    heard = [(number, key, True) for number in range(3) for key in files[not number :]]
    assert sorted(told) == [(0, 1, False), *heard]


def _named(draw: Draw) -> tuple[int, int, bool]:
    assert isinstance(draw.key, int)
    return draw.epoch, draw.key, draw.access is not None


def test_an_open_far_beyond_what_was_dispatched_is_that_of_its_draw_all_the_same() -> None:
    """A training without loader workers, whose files are in memory, reads faster than its hook tells of it."""
    reader = PlannedReader(of_files(0, list(range(1, 801))), 0.0)
    reader.progressed(8, 8, 0.0)
    assert reader.opened(700, 0.04, False) == []
    # The next epoch's first draws, too, are opened before the end of this one is told.
    assert reader.opened(8, 0.06, False) == []
    reader.progressed(800, 800, 0.1)
    reader.begin(of_files(1, list(range(1, 801))), 0.1)
    reader.progressed(800, 800, 0.2)
    unseen = reader.unseen(0.3 + UNSEEN_AFTER_S)
    assert len(unseen) == 2 * 800 - 8 - 2
    assert (unseen.count(700), unseen.count(8)) == (1, 0)


def test_opens_that_are_reported_before_the_plan_of_their_epoch_are_of_that_epoch() -> None:
    reader = PlannedReader(of_files(0, [1, 2, 3, 4]), 0.0)
    reader.progressed(4, 4, 0.0)
    reader.unseen(2.0)
    for key, at_s in ((1, 3.0), (3, 20.0), (2, 20.1)):
        reader.opened(key, at_s, False)
    reader.begin(of_files(1, [3, 2, 1, 4]), 3.1 + EARLY_S)
    assert reader.progressed(4, 0, 20.2) == [3, 2]
    assert [key for _, key in reader.coming(9)] == [1, 4]


# -- whether opens follow the plan


def opens(reader: PlannedReader, files: list[int], in_hand: int = 32) -> int:
    """Hand on the plan, and open files, until the plan is no longer trusted; returns the number of opens that took."""
    at = reader.taken
    for count, file in enumerate(files):
        reader.progressed(at + count + in_hand, at + count, 0.0)
        reader.opened(file, 0.0, False)
        if not reader.trusted:
            return count + 1
    return len(files)


def test_opens_in_the_jittered_order_of_loader_workers_are_followed() -> None:
    rng = np.random.default_rng(1)
    order = (rng.permutation(8000) + 1).tolist()
    reader = PlannedReader(of_files(0, order), 0.0)
    batches = [order[first : first + 64] for first in range(0, 8000, 64)]
    # Eight workers with a batch each; which of them reads next is chance.
    working: list[list[int]] = []
    dispatched = 0
    while batches or working:
        while len(working) < 8 and batches:
            working.append(list(batches.pop(0)))
            dispatched += 64
        reader.progressed(dispatched, max(0, dispatched - 8 * 64), 0.0)
        batch = working[int(rng.integers(len(working)))]
        reader.opened(batch.pop(0), 0.0, False)
        working = [batch for batch in working if batch]
    assert reader.trusted
    assert reader.followed_share > 0.999
    assert list(reader.coming(100)) == []


def test_a_short_epoch_that_is_over_before_any_progress_is_reported_has_followed_its_plan() -> None:
    order = list(range(1, 401))
    in_order, from_the_end = PlannedReader(of_files(0, order), 0.0), PlannedReader(of_files(0, order), 0.0)
    for number, key in enumerate(order):
        in_order.opened(key, number / 10_000, late=False)
    assert in_order.trusted
    for number, key in enumerate(order[:-201:-1]):
        from_the_end.opened(key, number / 10_000, late=False)
    assert not from_the_end.trusted


def test_opens_that_are_reported_a_moment_before_their_dispatch_follow_the_plan() -> None:
    """Two thousand samples a second, of which the manager hears 20 times a second."""
    reader = PlannedReader(of_files(0, list(range(1, 50_001))), 0.0)
    for file in range(1, 50_001):
        if file % 100 == 0:
            reader.progressed(file, file - 64, file / 2000)
        reader.opened(file, file / 2000, False)
    assert reader.followed_share == 1.0


def test_a_fast_reader_may_open_a_quarter_of_a_short_epoch_between_two_messages() -> None:
    reader = PlannedReader(of_files(0, list(range(1, 801))), 0.0)
    for told in range(0, 800, 200):
        reader.progressed(told + 8, told, 0.05 + told / 4000)
        for position in range(told, told + 200):
            reader.opened(position + 1, 0.05 + position / 4000, False)
    assert reader.followed_share == 1.0


def test_a_reader_whose_opens_are_not_reported_goes_on_in_its_plan() -> None:
    reader = PlannedReader(of_files(0, list(range(1, 10_001))), 0.0)
    reader.progressed(0, 0, 0.0)
    assert reader.progressed(96, 64, 1.0) == list(range(1, 65))
    assert [key for _, key in reader.coming(4)] == list(range(65, 101))
    assert (reader.trusted, reader.proven, reader.opens) == (True, False, 0)


@pytest.mark.parametrize("files", [1000, 5000, 50_000])
def test_a_plan_is_distrusted_while_it_is_not_followed_and_trusted_again_afterwards(files: int) -> None:
    rng = np.random.default_rng(2)
    order = (rng.permutation(files) + 1).tolist()
    reader = PlannedReader(of_files(0, order), 0.0)
    took = opens(reader, (rng.permutation(files) + 1).tolist())
    assert 80 < took < 500
    reader.begin(of_files(1, order), 0.0)
    for count, file in enumerate(order[:300]):
        reader.progressed(count + 32, count, 0.0)
        reader.opened(file, 0.0, False)
    assert reader.trusted
    assert reader.followed_share > TRUSTED_ABOVE


@pytest.mark.slow
@pytest.mark.parametrize("files", [2000, 50_000])
def test_a_wrong_plan_is_not_trusted_again_as_it_comes_to_its_end(files: int) -> None:
    rng = np.random.default_rng(2)
    reader = PlannedReader(of_files(0, (rng.permutation(files) + 1).tolist()), 0.0)
    opened = (rng.permutation(files) + 1).tolist()
    trusted = set()
    for count, file in enumerate(opened):
        reader.progressed(count + 32, count, count / 1000)
        reader.opened(file, (count + 0.5) / 1000, False)
        if count >= 500:
            trusted.add((reader.trusted, reader.proven))
    assert trusted == {(False, False)}


def test_a_plan_is_proven_by_opens_that_follow_it() -> None:
    reader = PlannedReader(of_files(0, list(range(1, 1001))), 0.0)
    reader.progressed(64, 0, 0.0)
    for file in range(1, PROVEN_OPENS):
        reader.opened(file, 0.0, False)
    assert not reader.proven
    reader.opened(PROVEN_OPENS, 0.0, False)
    assert reader.proven


def test_each_epoch_is_proven_where_opens_are_reported() -> None:
    files = list(range(1, 1001))
    reached = []
    for heard in (True, False):
        reader = PlannedReader(of_files(0, files), 0.0, heard)
        for epoch in range(3):
            if epoch:
                reader.begin(of_files(epoch, files), 0.0)
            before = reader.fetched_to
            for file in files:
                reader.progressed(file, file - 1, 0.0)
                reader.opened(file, 0.0, False)
            reached.append((before, reader.fetched_to))
    first, then = (UNPROVEN_SAMPLES, 1000 + UNPROVEN_SAMPLES), (UNPROVEN_SAMPLES, sys.maxsize)
    assert reached == [first, then, then, (UNPROVEN_SAMPLES, sys.maxsize), *[(sys.maxsize, sys.maxsize)] * 2]


@pytest.mark.parametrize("heard", [True, False])
def test_samples_that_are_taken_and_not_opened_speak_against_a_plan_where_opens_are_reported(heard: bool) -> None:
    plans = Schedule()
    plans.opens_are_reported = heard
    plans.begin(7, "train", of_files(0, list(range(1, 1001))), 0.0)
    for file in range(1, 101):
        plans.progressed(7, "train", 0, file, file - 1, 0.0)
        plans.opened(7, file, 0.0, False)
    plans.progressed(7, "train", 0, 100 + UNOPENED_MOST, 99 + UNOPENED_MOST, 1.0)
    assert len(plans.unseen(2.0 + UNSEEN_AFTER_S)) == UNOPENED_MOST - 1
    assert plans.active
    plans.progressed(7, "train", 0, 100 + UNOPENED_MOST, 100 + UNOPENED_MOST, 2.0)
    assert len(plans.unseen(3.0 + UNSEEN_AFTER_S)) == 1
    assert plans.active == (not heard)
    # An open that follows it speaks for it again.
    plans.opened(7, 101 + UNOPENED_MOST, 4.0, False)
    assert plans.active
    assert plans.readers[7, "train"].proven == (not heard)


# -- how fast a reader is


def test_the_pace_is_that_of_the_last_seconds() -> None:
    files = 40_000
    reader = PlannedReader(of_files(0, list(range(1, files + 1))), 0.0)
    assert reader.pace_s == FIRST_PACE_S
    now = 0.0
    for file in range(1, 1001):
        now += 0.01
        reader.progressed(file + 64, file, now)
    assert reader.pace_s == pytest.approx(0.01, rel=0.02)
    for file in range(1001, files + 1):
        now += 0.0005
        reader.progressed(file + 64, file, now)
    assert reader.pace_s == pytest.approx(0.0005, rel=0.02)


def test_a_pause_of_the_training_does_not_change_its_pace() -> None:
    reader = PlannedReader(of_files(0, list(range(1, 10_001))), 0.0)
    now, file = 0.0, 0
    for pace_s, pause_s, most_s in ((0.01, 0.0, 0.0101), (0.01, 300.0, 0.0101), (0.1, 0.0, 0.1001)):
        now += pause_s
        for step in range(1000):
            now, file = now + pace_s, file + 1
            reader.progressed(file + 64, file, now)
            if step > 200:
                assert 0.0099 < reader.pace_s < most_s
    assert reader.pace_s == pytest.approx(0.1, rel=0.02), "who has really become slower is trusted"


def test_two_readers_are_compared_by_their_paces_once_they_have_drifted_apart() -> None:
    plans = Schedule()
    fast, slow = list(range(1, 4001)), list(range(4001, 8001))
    plans.begin("fast", "train", of_files(0, fast), 0.0)
    plans.begin("slow", "train", of_files(0, [file - 4000 for file in slow], files=4000), 0.0)
    # Both lists hold the same files here; the slow one reads one where the fast one reads ten.
    for step in range(2000):
        now = step * 0.005
        plans.progressed("fast", "train", 0, step + 1, step + 1, now)
        if step % 10 == 0:
            plans.progressed("slow", "train", 0, step // 10 + 1, step // 10 + 1, now)
    last = fast[-1]
    assert plans.anchor(now, 2.0)
    assert not plans.anchor(now, 2.0), "they are right now"
    quick, idle = plans.trusted
    assert quick.time_of(quick.reached) == idle.time_of(idle.reached) == now
    assert quick.next_use_s(last) == pytest.approx(now + 2000 * 0.005, rel=0.02)
    assert idle.next_use_s(last) == pytest.approx(now + 3800 * 0.05, rel=0.02)
    assert plans.next_use_s(last) == quick.next_use_s(last)
    # What the fast one has read already, the slow one still wants.
    assert plans.next_use_s(1500) == pytest.approx(now + 1300 * 0.05, rel=0.02)


# -- all trainers


def test_a_trainer_has_a_plan_for_each_list_and_loses_all_when_it_disconnects() -> None:
    plans = Schedule()
    assert not plans.active
    plans.begin("a", "train", of_files(0, [1, 2, 3]), 0.0)
    plans.begin("a", "val", PlannedEpoch(0, [11, 12], {11: 0, 12: 1}, np.array([0, 1], np.uint32)), 0.0)
    plans.begin("b", "train", of_files(0, [3, 2, 1]), 0.0)
    assert plans.active
    assert [plans.planned("a", key) for key in (1, 12, 20)] == [True, True, False]
    assert [plans.planned("b", key) for key in (1, 12)] == [True, False]
    assert plans.next_use_s(3) == pytest.approx(0.0), "the sooner of the two"
    assert plans.opened("b", 3, 0.0, False) == [3]
    assert plans.next_use_s(3) == pytest.approx(2 * FIRST_PACE_S)
    assert plans.opened("unknown", 3, 0.0, False) == []
    plans.end("a", 0)
    assert [plans.next_use_s(key) is None for key in (11, 3, 2)] == [True, True, False]
    plans.drop("b")
    plans.drop("a")
    assert (plans.active, plans.trusted, plans.readers) == (False, (), {})
    assert plans.next_use_s(2) is None


def test_the_first_plan_of_a_trainer_may_be_that_of_a_later_epoch() -> None:
    plans = Schedule()
    plans.follow_with("a", "train", of_files(3, [2, 1]), 0.0)
    (reader,) = plans.trusted
    assert (reader.epoch.number, reader.later) == (3, [])


def test_progress_may_be_reported_before_its_plan_has_begun() -> None:
    """A long plan is sorted meanwhile."""
    plans = Schedule()
    assert plans.progressed("a", "train", 0, 2, 1, 0.0) == []
    plans.begin("a", "train", of_files(0, [1, 2, 3]), 0.0)
    reader = plans.readers["a", "train"]
    assert (reader.dispatched, reader.taken) == (2, 1)
    assert plans.progressed("a", "train", 1, 3, 3, 0.0) == []
    assert (reader.dispatched, reader.taken) == (2, 1)
    plans.begin("a", "train", of_files(1, [1, 2, 3]), 0.0)
    assert (reader.dispatched, reader.taken) == (3, 3)
    plans.begin("a", "train", of_files(2, [1, 2, 3]), 0.0)
    assert (reader.dispatched, reader.taken) == (0, 0)
    plans.progressed("b", "train", 0, 2, 1, 0.0)
    plans.drop("b")
    plans.begin("b", "train", of_files(0, [1, 2, 3]), 0.0)
    assert plans.readers["b", "train"].dispatched == 0


def test_opens_that_are_reported_before_the_first_plan_are_of_its_epoch() -> None:
    plans = Schedule()
    for trainer, key, at_s in (("a", 3, 1.0), ("a", 1, 20.0), ("b", 2, 20.0), ("a", STRANGER, 20.0)):
        assert plans.opened(trainer, key, at_s, False) == []
    plans.begin("a", "train", of_files(0, [1, 2, 3]), 21.0)
    plans.progressed("a", "train", 0, 3, 0, 21.0)
    assert [key for _, key in plans.readers["a", "train"].coming(9)] == [2, 3]


def test_a_reader_keeps_the_plans_of_a_few_epochs_those_that_come_first() -> None:
    reader = PlannedReader(of_files(0, [1, 2]), 0.0)
    for number in [*range(5, 30), *range(1, 5)]:
        reader.follow_with(of_files(number, [1, 2]))
    assert [epoch.number for epoch in reader.later] == [*range(1, LATER_EPOCHS + 1)]
