"""The section of partly augmented samples: what leaves it, and how much room a loader is granted."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spiderfs.core.partials import Partials
from spiderfs.protocol.partials import FIRST_PARTIAL, partial_inode


def section(capacity_bytes: int = 200) -> Partials:
    partials = Partials(0.5)
    assert partials.resize(capacity_bytes) == []
    return partials


def test_a_loader_is_granted_what_others_leave():
    partials = section()
    assert partials.begin("one", 70) == 70
    assert partials.begin("two", 70) == 30
    assert partials.begin("one", 70) == 70
    assert partials.begin("three", 10) == 0
    partials.end("one")
    assert partials.begin("three", 1000) == 70
    partials.end("never began")


def test_a_smaller_cache_and_a_remount():
    partials = section()
    partials.restore([(1, 50), (2, 30), (3, 15)])
    assert partials.resize(100) == [1]
    assert partials.resize(0) == [2, 3]
    assert (partials.bytes, partials.set_aside_bytes) == (0, 0)


def test_room_is_taken_from_the_policy_in_steps():
    partials = section(64 * 2 * 100)
    partials.made(1, 1, None)
    assert partials.set_aside_bytes == 100
    partials.made(2, 6399, None)
    assert partials.set_aside_bytes == 6400
    partials.forget([2])
    assert partials.set_aside_bytes == 100


def test_inodes_differ_by_all_that_they_stand_for_and_are_no_samples():
    inodes = {partial_inode(store, version, number) for store in "ab" for version in (1, 2) for number in (0, 1)}
    assert len(inodes) == 8
    assert all(FIRST_PARTIAL <= inode < 1 << 64 for inode in inodes)


class AgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.partials = section()
        self.stored: dict[int, int] = {}

    @rule(inode=st.integers(0, 12), size=st.integers(1, 120), replaces=st.none() | st.integers(0, 12))
    def made(self, inode: int, size: int, replaces: int | None) -> None:
        gone = self.partials.made(inode, size, replaces)
        if gone is not None:
            for other in gone:
                del self.stored[other]
            self.stored.setdefault(inode, size)

    @rule(capacity=st.integers(0, 300))
    def resize(self, capacity: int) -> None:
        for inode in self.partials.resize(capacity):
            del self.stored[inode]

    @rule(inodes=st.lists(st.integers(0, 12), max_size=3))
    def forget(self, inodes: list[int]) -> None:
        self.partials.forget(inodes)
        for inode in inodes:
            self.stored.pop(inode, None)

    @invariant()
    def books_agree(self) -> None:
        assert len(self.partials) == len(self.stored)
        assert self.partials.bytes == sum(self.stored.values())
        assert self.partials.bytes <= self.partials.set_aside_bytes <= self.partials.limit_bytes


TestPartialsAgainstModel = AgainstModel.TestCase
TestPartialsAgainstModel.settings = settings(deadline=None)
