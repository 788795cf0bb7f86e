"""What every store must do, run against LMDB's and the one in memory."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from forking import exit_status, forked
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from benchmarks.fakes import MemoryContent
from spiderfs.store.content import LmdbContent
from spiderfs.store.records import LmdbRecords
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.store.store import LANDING, Content, ContentKey, Keep, Member, Records

PATIENCE_S = 20.0


def made(kind: str, path: Path) -> Content:
    if kind == "memory":
        return MemoryContent()
    path.mkdir(exist_ok=True)
    return LmdbContent(path)


@pytest.fixture(params=["memory", "lmdb"])
def content(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Content]:
    content = made(request.param, tmp_path / "content")
    content.set_capacity(1000)
    yield content
    content.close()


def held(content: Content, key: ContentKey, *piece: int) -> bytes | None:
    """The payload, or a piece of it, as bytes; no view and no read transaction stays open."""
    payload = content.read(key, *piece)
    copied = None if payload is None else bytes(payload)
    content.end_read()
    return copied


A, B, C = ContentKey(1), ContentKey(2), ContentKey(2, 1)

# -- content, by example


def test_a_new_store_is_empty_and_takes_nothing(tmp_path: Path) -> None:
    for kind in ("memory", "lmdb"):
        content = made(kind, tmp_path / "new")
        assert content.usage() == (0, 0, 0, 0, 0)
        assert list(content.members()) == []
        assert not content.land(A, b"x")
        content.close()


def test_released_records_leave_the_cache_first(content: Content) -> None:
    for key in (A, B, C):
        assert content.land(key, bytes(100))
    content.apply((), [Keep(A, "samples", 1.0), Keep(C, "blocks", 2.0)])
    assert content.keys(A.inode) == [A]
    assert content.keys(B.inode) == [B, C]
    assert content.keys(99) == []
    content.release([C, A, B, ContentKey(99)])
    assert content.usage() == (300, 3, 0, 0, 1000)
    assert {member.section for member in content.members()} == {LANDING}
    assert held(content, A) == bytes(100), "for as long as there is room"
    later = ContentKey(7)
    assert content.land(later, bytes(800))
    assert [key for key in (A, B, C, later) if content.has(key)][-1] == later
    assert content.usage().used_bytes <= 1000
    content.end_read()
    content.apply((), [Keep(later, "samples", 1.0)])
    assert content.land(ContentKey(8), bytes(200))
    assert not any(content.has(key) for key in (A, B, C))
    content.end_read()


def test_every_record_comes_once_while_others_come_and_go(content: Content, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spiderfs.store.content._MEMBERS_AT_A_TIME", 3)
    content.set_capacity(10_000)
    keys = sorted(ContentKey(inode, block) for inode in range(1, 20) for block in (0, 1, 300))
    for key in reversed(keys):
        assert content.land(key, b"x")
    assert [member.key for member in content.each_member()] == keys
    found = []
    for member in content.each_member():
        found.append(member.key)
        if member.key == keys[10]:
            content.apply([keys[2], keys[30]], ())
            content.land(ContentKey(keys[40].inode, 7), b"new")
    assert set(keys) - {keys[30]} <= set(found)
    assert found == sorted(set(found))


def test_a_view_outlives_its_record_until_the_read_ends(content: Content) -> None:
    payload = bytes(range(250)) * 2
    content.land(A, payload)
    view = content.read(A)
    assert view is not None

    def push_out() -> None:
        for inode in range(100, 200):
            content.land(ContentKey(inode), bytes([inode]) * 500)

    thread = threading.Thread(target=push_out)
    thread.start()
    thread.join()
    assert content.member(A) is None
    assert bytes(view) == payload
    del view
    content.end_read()
    assert not content.has(A)
    content.end_read()
    content.end_read()


# -- content, against a model

KEYS = st.builds(ContentKey, st.integers(1, 6), st.integers(0, 2))


class ContentMachine(RuleBasedStateMachine):
    kind = "memory"

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        self.content = made(self.kind, Path(self._directory.name))
        self.members: dict[ContentKey, Member] = {}
        self.payloads: dict[ContentKey, bytes] = {}
        self.capacity = 0
        self.landings = 0

    def teardown(self) -> None:
        self.content.close()
        self._directory.cleanup()

    def bytes_in(self, landing: bool) -> int:
        return sum(member.size for member in self.members.values() if (member.section == LANDING) == landing)

    def remove(self, key: ContentKey) -> None:
        self.members.pop(key, None)
        self.payloads.pop(key, None)

    def shrink_landing(self, room: int) -> None:
        for member in list(self.members.values()):
            if member.section == LANDING and self.bytes_in(True) + self.bytes_in(False) > room:
                self.remove(member.key)

    @initialize(capacity=st.integers(0, 3000))
    def begin(self, capacity: int) -> None:
        self.capacity = capacity
        self.content.set_capacity(capacity)

    @rule(key=KEYS)
    def land(self, key: ContentKey) -> None:
        # Of one version every payload has the same size; the first byte tells one landing from another.
        size = (key.inode - 1) * 100 + key.block
        self.landings += 1
        payload = bytes([self.landings % 256]) * size
        fits = key in self.members or self.bytes_in(False) + size <= self.capacity
        assert self.content.land(key, payload) == fits
        if fits:
            if key not in self.members:
                self.shrink_landing(self.capacity - size)
                self.members[key] = Member(key, size, LANDING, 0.0)
            self.payloads[key] = payload

    @rule(
        drop=st.lists(KEYS, max_size=3),
        keep=st.lists(st.tuples(KEYS, st.sampled_from(["samples", "hömophily"])), max_size=3),
    )
    def apply(self, drop: list[ContentKey], keep: list[tuple[ContentKey, str]]) -> None:
        for key in drop:
            self.remove(key)
        missing = []
        for key, section in keep:
            member = self.members.pop(key, None)
            if member is None:
                missing.append(key)
            else:
                self.members[key] = Member(key, member.size, section, 0.5)
        assert self.content.apply(drop, [Keep(key, section, 0.5) for key, section in keep]) == missing

    @rule(capacity=st.integers(0, 3000))
    def resize(self, capacity: int) -> None:
        # The cache control drops what is kept before it makes the budget smaller.
        going = []
        for member in list(self.members.values()):
            if member.section != LANDING and self.bytes_in(False) > capacity:
                going.append(member.key)
                self.remove(member.key)
        self.content.apply(going, ())
        self.content.set_capacity(capacity)
        self.capacity = capacity
        self.shrink_landing(capacity)

    @rule()
    def reopen(self) -> None:
        if self.kind == "lmdb":
            self.content.close()
            self.content = made(self.kind, Path(self._directory.name))

    @invariant()
    def the_budget_is_held(self) -> None:
        usage = self.content.usage()
        sizes = {member.key: member.size for member in self.content.members()}
        assert usage.used_bytes == sum(sizes.values()) <= usage.capacity_bytes == self.capacity
        assert usage.landing_entries + usage.kept_entries == len(sizes)

    @invariant()
    def everything_is_as_expected(self) -> None:
        assert list(self.content.members()) == list(self.members.values())
        for key, payload in self.payloads.items():
            assert held(self.content, key) == payload
        every = {ContentKey(inode, block) for inode in range(1, 7) for block in range(3)}
        assert {key for key in every if self.content.has(key)} == set(self.members)
        self.content.end_read()


class LmdbMachine(ContentMachine):
    kind = "lmdb"

    @invariant()
    def no_bytes_of_blocks_are_left_without_a_record(self) -> None:
        assert isinstance(self.content, LmdbContent)
        files = self.content._files
        recorded = {
            inode: {key.block for key in self.members if key == (inode, key.block)} - {0} for inode in range(1, 7)
        }
        assert set(files.inodes()) == {inode for inode, blocks in recorded.items() if blocks}
        assert not any(files.stray(inode, recorded[inode]) for inode in files.inodes())


TestMemoryContentModel = ContentMachine.TestCase
TestMemoryContentModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLmdbContentModel = LmdbMachine.TestCase
TestLmdbContentModel.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

# -- content of LMDB, between processes


def test_two_processes_land_at_once_within_the_budget(tmp_path: Path) -> None:
    content = LmdbContent(tmp_path)
    content.set_capacity(50_000)
    content.close()

    def fill(first: int) -> None:
        store = LmdbContent(tmp_path)
        for inode in range(first, first + 300):
            assert store.land(ContentKey(inode), bytes([first]) * (100 + inode))
            usage = store.usage()
            assert usage.used_bytes <= usage.capacity_bytes
            if inode % 10 == 0:
                store.apply((), [Keep(ContentKey(inode), "samples")])

    children = [forked(lambda first=first: fill(first)) for first in (1, 2)]
    assert [exit_status(child) for child in children] == [0, 0]
    content = LmdbContent(tmp_path)
    members = list(content.members())
    usage = content.usage()
    assert usage.used_bytes == sum(member.size for member in members) <= 50_000
    assert usage.landing_entries == sum(member.section == LANDING for member in members)
    for member in members:
        payload = held(content, member.key)
        assert payload is not None
        assert len(payload) == member.size
    content.close()


def test_a_killed_writer_neither_blocks_others_nor_loses_what_it_had_landed(tmp_path: Path) -> None:
    content = LmdbContent(tmp_path)
    content.set_capacity(10 << 20)
    content.close()

    def land_for_ever() -> None:
        store = LmdbContent(tmp_path)
        inode = 1
        while True:
            store.land(ContentKey(inode), bytes(20_000))
            store.has(ContentKey(inode))
            inode += 1

    for kills in range(1, 6):
        child = forked(land_for_ever)
        content = LmdbContent(tmp_path)
        before = content.usage().landing_entries
        deadline = time.monotonic() + PATIENCE_S
        while content.usage().landing_entries < min(before + 20, 500) and time.monotonic() < deadline:
            os.sched_yield()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        landing = threading.Thread(target=content.land, args=(ContentKey(1 << 32, kills), b"x"), daemon=True)
        landing.start()
        landing.join(PATIENCE_S)
        assert not landing.is_alive(), "the dead writer's lock was not freed"
        assert held(content, ContentKey(1 << 32, kills)) == b"x"
        content.clear_dead_readers()
        usage = content.usage()
        assert usage.used_bytes == sum(member.size for member in content.members()) <= usage.capacity_bytes
        content.close()


# -- records

TABLES = ("one", "two")


@pytest.fixture(params=["memory", "lmdb"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Records]:
    records: Records = MemoryRecords(TABLES) if request.param == "memory" else LmdbRecords(tmp_path, TABLES)
    yield records
    records.close()


def test_many_rows_are_got_at_once(records: Records) -> None:
    records.put([("one", b"b", b"2"), ("one", b"a", b""), ("two", b"c", b"3")])
    assert records.get_many("one", [b"b", b"c", b"a", b"b", b"z"]) == [b"2", None, b"", b"2", None]
    assert records.get_many("one", []) == []


def test_a_batch_that_fails_leaves_no_trace_in_lmdb(tmp_path: Path) -> None:
    records = LmdbRecords(tmp_path, TABLES)

    def rows() -> Iterator[tuple[str, bytes, bytes | None]]:
        yield "one", b"a", b"1"
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        records.put(rows())
    assert records.get("one", b"a") is None
    records.put([("one", b"b", b"2")])
    assert records.count("one") == 1
    records.close()


KEY = st.binary(min_size=1, max_size=3)
BATCH = st.lists(st.tuples(st.sampled_from(TABLES), KEY, st.none() | st.binary(max_size=4)), max_size=8)


@pytest.mark.parametrize("kind", ["memory", "lmdb"])
@settings(max_examples=40, deadline=None)
@given(batches=st.lists(BATCH, max_size=6), start=KEY, limit=st.integers(1, 5))
def test_records_are_ordered_dictionaries(
    kind: str, batches: list[list[tuple[str, bytes, bytes | None]]], start: bytes, limit: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        records: Records = MemoryRecords(TABLES) if kind == "memory" else LmdbRecords(Path(directory), TABLES)
        model: dict[str, dict[bytes, bytes]] = {name: {} for name in TABLES}
        for batch in batches:
            records.put(batch)
            for table, key, value in batch:
                if value is None:
                    model[table].pop(key, None)
                else:
                    model[table][key] = value
            for table, rows in model.items():
                assert records.count(table) == len(rows)
                expected = sorted((key, value) for key, value in rows.items() if key >= start)
                assert records.scan(table, start, limit) == expected[:limit]
        records.close()
