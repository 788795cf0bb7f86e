"""Whole files in chunks beside LMDB: rows and the map of chunks agree, and no reader gets another file's bytes."""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from forking import exit_status, forked
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_store import held

from spiderfs.errors import StoreCorrupt, StoreError, StoreFull
from spiderfs.shared.layout import EXTENTS_FILE, EXTENTS_MAP_FILE
from spiderfs.store import extents
from spiderfs.store.content import LmdbContent, RecordWriter, chunked_record
from spiderfs.store.content_reader import ContentReader
from spiderfs.store.extents import CHUNK_BYTES, Extents, Lease, is_chunked
from spiderfs.store.rows import KEY
from spiderfs.store.store import ContentKey, Keep

KIB = 1 << 10


def payload(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def content(tmp_path: Path) -> Iterator[LmdbContent]:
    content = LmdbContent(tmp_path)
    content.set_capacity(4 << 20)
    yield content
    content.close()


def leases_of(content: LmdbContent) -> dict[ContentKey, Lease]:
    """The chunks that rows name."""
    found = {}
    for member in content.members():
        if not member.key.block and is_chunked(member.size):
            with content._env.begin(content._content) as txn:
                row = txn.get(KEY.pack(*member.key))
            head = 8 * (1 + -(-member.size // (128 << 10)))
            found[member.key] = Lease.unpacked(row[head:-4])
    return found


def chunks_of(leases: list[Lease]) -> list[int]:
    return [chunk for lease in leases for first, count in lease.runs for chunk in range(first, first + count)]


def leased(directory: Path) -> set[int]:
    """The chunks that the map says are not free."""
    whole = (directory / EXTENTS_MAP_FILE).read_bytes()
    (count,) = struct.unpack_from("<Q", whole.ljust(8, b"\0"))
    return {chunk for chunk, owner in enumerate(whole[4096 : 4096 + count]) if owner}


def check(content: LmdbContent, directory: Path) -> None:
    named = chunks_of(list(leases_of(content).values()))
    assert len(named) == len(set(named)), "a chunk belongs to two files"
    assert set(named) == (leased(directory) if (directory / EXTENTS_MAP_FILE).exists() else set())


@pytest.mark.parametrize("size", [CHUNK_BYTES, CHUNK_BYTES + 1, 128 * KIB, 300 * KIB + 7])
def test_any_piece_can_be_read(content: LmdbContent, tmp_path: Path, size: int) -> None:
    whole, key = payload(1, size), ContentKey(1)
    assert content.land(key, whole)
    for offset, length in ((0, size), (0, 1), (size - 1, 10), (size // 2, 1000), (127 * KIB, 2 * KIB), (size, 1)):
        assert held(content, key, offset, length) == whole[offset : offset + length]
    check(content, tmp_path)
    content.apply([key], ())
    check(content, tmp_path)


@pytest.mark.parametrize("size", [CHUNK_BYTES, 300 * KIB + 7])
def test_a_process_that_only_reads_gets_a_copy(tmp_path: Path, size: int) -> None:
    content = LmdbContent(tmp_path)
    content.set_capacity(1 << 20)
    content.land(ContentKey(1), payload(1, size))
    content.close()
    reader = ContentReader(tmp_path)
    assert reader.copy(1) == payload(1, size)
    assert reader.copy(2) is None
    reader.close()


class Chunks(RuleBasedStateMachine):
    """Files of all sizes land, are kept, replaced and dropped, by two stores of one directory."""

    directory: Path

    @initialize()
    def begin(self) -> None:
        import tempfile

        self.temporary = tempfile.TemporaryDirectory()
        self.directory = Path(self.temporary.name)
        self.content = LmdbContent(self.directory)
        self.content.set_capacity(700 * KIB)
        self.payloads: dict[int, bytes] = {}

    @rule(inode=st.integers(1, 12), size=st.sampled_from([1, 16 * KIB, 17 * KIB, 40 * KIB, 140 * KIB]))
    def land(self, inode: int, size: int) -> None:
        key = ContentKey(inode)
        member = self.content.member(key)
        whole = payload(inode, member.size if member is not None else size)
        if self.content.land(key, whole):
            self.payloads[inode] = whole

    @rule(
        files=st.lists(
            st.tuples(st.integers(1, 12), st.sampled_from([100, 20 * KIB, 150 * KIB]), st.booleans()),
            max_size=4,
            unique_by=lambda file: file[0],
        ),
        dropped=st.lists(st.integers(1, 12), max_size=3),
    )
    def land_together(self, files: list[tuple[int, int, bool]], dropped: list[int]) -> None:
        records = []
        write = RecordWriter(self.directory)
        for inode, size, _ in files:
            key, whole = ContentKey(inode), payload(inode, size)
            if is_chunked(size):
                (lease,) = self.content.extents.lease([size])
                records.append((key, size, chunked_record(key, write(whole, lease.packed()), lease)))
            else:
                records.append((key, size, write(whole, b"")))
        sections = {ContentKey(inode): "samples" for inode, _, kept in files if kept}
        landed = self.content.land_kept(records, sections, [ContentKey(inode) for inode in dropped])
        for (inode, size, kept), taken in zip(files, landed, strict=True):
            if taken:
                self.payloads[inode] = payload(inode, size)
                member = self.content.member(ContentKey(inode))
                # A file that landed may have been pushed out by those behind it.
                assert member is None or (member.section == "samples") == kept

    @rule(inode=st.integers(1, 12))
    def keep(self, inode: int) -> None:
        self.content.apply((), [Keep(ContentKey(inode), "samples")])

    @rule(inode=st.integers(1, 12))
    def drop(self, inode: int) -> None:
        self.content.apply([ContentKey(inode)], ())

    @rule(capacity=st.sampled_from([100 * KIB, 700 * KIB]))
    def resize(self, capacity: int) -> None:
        usage = self.content.usage()
        if usage.kept_bytes <= capacity:
            self.content.set_capacity(capacity)

    @invariant()
    def holds(self) -> None:
        check(self.content, self.directory)
        usage = self.content.usage()
        assert usage.used_bytes <= usage.capacity_bytes
        for member in self.content.members():
            assert held(self.content, member.key) == self.payloads[member.key.inode]

    def teardown(self) -> None:
        self.content.close()
        self.temporary.cleanup()


TestChunks = Chunks.TestCase
TestChunks.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


@given(
    runs=st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 5)), min_size=1, max_size=5),
    offset=st.integers(0, 30 * CHUNK_BYTES),
    length=st.integers(0, 30 * CHUNK_BYTES),
)
def test_pieces_are_the_bytes_of_the_runs_in_order(runs: list[tuple[int, int]], offset: int, length: int) -> None:
    places = [first * CHUNK_BYTES + at for first, count in runs for at in range(0, count * CHUNK_BYTES, 4096)]
    whole = len(places) * 4096
    pieces = list(Lease(tuple(runs)).pieces(offset, length))
    assert sum(size for _, size in pieces) == max(0, min(length, whole - offset))
    at = offset
    for place, size in pieces:
        assert size > 0
        assert place == places[at // 4096] + at % 4096
        at += size


def test_freed_chunks_are_used_again_before_the_file_grows(content: LmdbContent, tmp_path: Path) -> None:
    for number in range(200):
        assert content.land(ContentKey(number), payload(number, 100 * KIB))
    # Room for 40 files, and little beyond it.
    assert (tmp_path / EXTENTS_FILE).stat().st_size <= 1.2 * (4 << 20)
    check(content, tmp_path)


def test_a_smaller_capacity_gives_the_disk_back(content: LmdbContent, tmp_path: Path) -> None:
    for number in range(30):
        content.land(ContentKey(number), payload(number, 100 * KIB))
    content.set_capacity(0)
    assert (tmp_path / EXTENTS_FILE).stat().st_size == 0
    assert content.usage().used_bytes == 0


def test_a_full_disk_leaves_nothing(content: LmdbContent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert content.land(ContentKey(1), payload(1, 100 * KIB))

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(extents.os, "posix_fallocate", full)
    with pytest.raises(StoreFull, match="no space left for the cache"):
        content.land(ContentKey(2), payload(2, 3 << 20))
    check(content, tmp_path)
    assert held(content, ContentKey(1)) == payload(1, 100 * KIB)
    # What is freed can be used, though the disk has no room.
    content.apply([ContentKey(1)], ())
    assert content.land(ContentKey(3), payload(3, 100 * KIB))
    check(content, tmp_path)


def test_a_failed_write_leaves_nothing(content: LmdbContent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(lease: Lease, whole: bytes) -> None:
        raise StoreError("the disk is broken")

    monkeypatch.setattr(content.extents, "write", broken)
    with pytest.raises(StoreError, match="broken"):
        content.land(ContentKey(1), payload(1, 100 * KIB))
    check(content, tmp_path)


def test_two_processes_never_lease_one_chunk(tmp_path: Path) -> None:
    content = LmdbContent(tmp_path)
    content.set_capacity(3 << 20)
    content.close()

    def land(seed: int) -> None:
        mine = LmdbContent(tmp_path)
        rng = random.Random(seed)
        for _ in range(150):
            inode = rng.randrange(seed * 100, seed * 100 + 40)
            size = 17 * KIB + inode * 997
            mine.land(ContentKey(inode), payload(inode, size))
            for member in rng.sample(list(mine.members()), 1):
                found = held(mine, member.key)
                assert found in (None, payload(member.key.inode, member.size))
            if rng.random() < 0.2:
                mine.apply([ContentKey(rng.randrange(100, 400))], ())
        assert mine.damaged == 0
        mine.close()

    children = [forked(lambda seed=seed: land(seed)) for seed in (1, 2, 3)]  # type: ignore[misc]
    assert [exit_status(child) for child in children] == [0, 0, 0]
    content = LmdbContent(tmp_path)
    check(content, tmp_path)
    assert all(held(content, member.key) == payload(member.key.inode, member.size) for member in content.members())
    content.close()


def test_what_a_dead_process_had_leased_is_found_and_nothing_else(tmp_path: Path) -> None:
    def die() -> None:
        other = LmdbContent(tmp_path)
        other.set_capacity(1 << 20)
        other.land(ContentKey(2), payload(2, 100 * KIB))
        other.extents.lease([60 * KIB, 20 * KIB])
        os._exit(0)

    assert exit_status(forked(die)) == 0
    content = LmdbContent(tmp_path)
    content.land(ContentKey(1), payload(1, 100 * KIB))
    (lease,) = content.extents.lease([50 * KIB])
    assert len(leased(tmp_path)) == 7 + 4 + 7 + 4 + 2
    content.sweep()
    named = chunks_of([*leases_of(content).values(), lease])
    assert leased(tmp_path) == set(named)
    assert held(content, ContentKey(2)) == payload(2, 100 * KIB)
    # What has been looked at is not looked at again, and is freed with its row all the same.
    assert not len(content.extents.abandoned())
    content.apply([ContentKey(1), ContentKey(2)], ())
    assert leased(tmp_path) == set(chunks_of([lease]))
    content.close()


def test_what_a_dead_process_dropped_and_had_yet_to_free_is_found(tmp_path: Path) -> None:
    def die() -> None:
        other = LmdbContent(tmp_path)
        other.extents.free = lambda leases: os._exit(0)  # type: ignore[method-assign]
        other.apply([ContentKey(1)], ())

    content = LmdbContent(tmp_path)
    content.set_capacity(1 << 20)
    content.close()
    keeper = Extents(tmp_path / EXTENTS_FILE, tmp_path / EXTENTS_MAP_FILE)
    (lease,) = keeper.lease([100 * KIB])
    content = LmdbContent(tmp_path)
    write = RecordWriter(tmp_path)
    record = chunked_record(ContentKey(1), write(payload(1, 100 * KIB), lease.packed()), lease)
    content.land_kept([(ContentKey(1), 100 * KIB, record)], {}, ())
    content.close()
    assert exit_status(forked(die)) == 0
    content = LmdbContent(tmp_path)
    content.sweep()
    assert leased(tmp_path) == set()
    content.close()
    keeper.close()


def test_a_damaged_map_hangs_no_one(content: LmdbContent, tmp_path: Path) -> None:
    content.land(ContentKey(1), payload(1, 100 * KIB))
    with open(tmp_path / EXTENTS_MAP_FILE, "r+b") as file:
        file.write(b"\xff" * 8)
    with pytest.raises(StoreCorrupt, match="the map of chunks"):
        content.land(ContentKey(2), payload(2, 100 * KIB))


def test_no_process_makes_a_map_where_there_are_chunks(content: LmdbContent, tmp_path: Path) -> None:
    """By another map it would lease the chunks of files that rows name."""
    assert content.land(ContentKey(1), payload(1, 100 * KIB))
    (tmp_path / EXTENTS_MAP_FILE).unlink()
    late = Extents(tmp_path / EXTENTS_FILE, tmp_path / EXTENTS_MAP_FILE)
    for _ in range(2):
        with pytest.raises(StoreError):
            late.lease([100 * KIB])
    late.close()
    assert not (tmp_path / EXTENTS_MAP_FILE).exists()
    # A process that has the map goes on by it, until the supervisor notices.
    assert content.land(ContentKey(2), payload(2, 100 * KIB))
    assert all(held(content, ContentKey(number)) == payload(number, 100 * KIB) for number in (1, 2))


def test_a_store_that_cannot_be_written_keeps_no_descriptor(tmp_path: Path) -> None:
    content = LmdbContent(tmp_path)
    content.set_capacity(1 << 20)
    content.land(ContentKey(1), payload(1, 100 * KIB))
    content.close()
    readonly = Extents(tmp_path / EXTENTS_FILE, tmp_path / EXTENTS_MAP_FILE, readonly=True)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(StoreError):
            readonly.lease([1])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_late_free_does_not_free_what_another_has_leased(tmp_path: Path) -> None:
    one, other = (Extents(tmp_path / EXTENTS_FILE, tmp_path / EXTENTS_MAP_FILE) for _ in range(2))
    (lease,) = one.lease([CHUNK_BYTES])
    one.free([lease])
    (again,) = other.lease([CHUNK_BYTES])
    assert again.runs == lease.runs
    one.free([lease])
    assert leased(tmp_path) == {0}
    one.close()
    other.close()


def test_a_damaged_row_is_no_file_and_frees_no_other_chunk(content: LmdbContent, tmp_path: Path) -> None:
    for number in (1, 2):
        content.land(ContentKey(number), payload(number, 100 * KIB))
    with content._env.begin(content._content, write=True) as txn:
        row = bytearray(txn.get(KEY.pack(1, 0)))
        row[20] ^= 1
        txn.put(KEY.pack(1, 0), bytes(row))
    assert held(content, ContentKey(1)) is None
    assert content.damaged == 1
    content.apply([ContentKey(1)], ())
    assert held(content, ContentKey(2)) == payload(2, 100 * KIB)
    assert set(chunks_of([*leases_of(content).values()])) < leased(tmp_path)
