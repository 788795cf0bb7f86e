"""A store over several directories: each holds its part, what one loses is missed, and rows agree with all of them."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from forking import exit_status, forked
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_store import held

from spiderfs.errors import StoreFull
from spiderfs.shared.layout import BLOCKS_DIRECTORY, EXTENTS_FILE, EXTENTS_MAP_FILE
from spiderfs.store import extents
from spiderfs.store.content import LmdbContent, RecordWriter, chunked_record
from spiderfs.store.content_reader import ContentReader
from spiderfs.store.disks import Disks
from spiderfs.store.environment import claim, release
from spiderfs.store.rows import KEY, MemberRow
from spiderfs.store.store import BLOCK_BYTES, ContentKey, Keep

KIB = 1 << 10
MIB = 1 << 20


def directories(root: Path, *names: str) -> list[Path]:
    places = [root / name / "store" / "content" for name in names]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    return places


def opened(places: list[Path], missing: tuple[Path, ...] = ()) -> LmdbContent:
    disks = Disks(places[0], places[1:], missing)
    disks.bind()
    return LmdbContent(places[0], disks=disks)


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    return directories(tmp_path, "a", "b", "c")


@pytest.fixture
def content(places: list[Path]) -> Iterator[LmdbContent]:
    content = opened(places)
    content.set_capacity(30 * MIB)
    yield content
    content.close()


def payload(key: ContentKey, size: int = 100 * KIB) -> bytes:
    return random.Random(f"{key} {size}").randbytes(size)


def fill(content: LmdbContent, count: int = 60, size: int = 100 * KIB) -> list[ContentKey]:
    keys = [ContentKey(inode) for inode in range(1, count + 1)]
    for key in keys:
        assert content.land(key, payload(key, size))
    content.apply((), [Keep(key, "samples") for key in keys])
    return keys


def disks_of(content: LmdbContent) -> dict[ContentKey, int]:
    with content._env.begin(content._member) as txn:
        return {ContentKey(*KEY.unpack(key)): MemberRow.of(key, row).disk for key, row in txn.cursor()}


def leased(place: Path) -> int:
    """The chunks on a disk that the map says are not free."""
    if not (place / EXTENTS_MAP_FILE).exists():
        return 0
    whole = (place / EXTENTS_MAP_FILE).read_bytes()
    (count,) = struct.unpack_from("<Q", whole.ljust(8, b"\0"))
    return sum(map(bool, whole[4096 : 4096 + count]))


@pytest.mark.parametrize("size", [500, 16 * KIB, 100 * KIB])
def test_samples_of_any_size_are_spread(content: LmdbContent, places: list[Path], size: int) -> None:
    keys = fill(content, 60, size)
    assert Counter(disks_of(content).values()) == {0: 20, 1: 20, 2: 20}
    assert [found["used_bytes"] for found in content.disks()] == [20 * size] * 3
    assert [found["capacity_bytes"] for found in content.disks()] == [10 * MIB] * 3
    chunks = 0 if size <= 16 * KIB else -(-size // (16 * KIB))
    assert [leased(place) for place in places] == [20 * chunks, 20 * (chunks or 1), 20 * (chunks or 1)]
    assert [held(content, key) for key in keys] == [payload(key, size) for key in keys]
    content.apply(keys, ())
    assert [leased(place) for place in places] == [0, 0, 0]
    assert [found["used_bytes"] for found in content.disks()] == [0, 0, 0]


def test_what_the_reading_process_writes_is_spread_too(content: LmdbContent, places: list[Path]) -> None:
    keys = [ContentKey(inode) for inode in range(1, 31)]
    sizes = [(500, 16 * KIB, 100 * KIB)[key.inode % 3] for key in keys]
    leases = content.lease(sizes)
    assert {0 if lease is None else lease.disk for lease in leases} == {0, 1, 2}
    write = RecordWriter(places[0])
    records = []
    for key, size, lease in zip(keys, sizes, leases, strict=True):
        head = write(payload(key, size), b"" if lease is None else lease.packed())
        records.append((key, size, head if lease is None else chunked_record(key, head, lease)))
    assert content.land_kept(records, dict.fromkeys(keys, "samples"), ()) == [True] * 30
    assert [held(content, key) for key in keys] == [payload(key, size) for key, size in zip(keys, sizes, strict=True)]
    used = Counter[int]()
    for key, disk in disks_of(content).items():
        used[disk] += sizes[keys.index(key)]
    assert [found["used_bytes"] for found in content.disks()] == [used[0], used[1], used[2]]


def test_a_process_that_only_reads_finds_all_disks(places: list[Path]) -> None:
    content = opened(places)
    content.set_capacity(30 * MIB)
    keys = fill(content)
    content.close()
    reader = ContentReader(places[0])
    assert [reader.copy(key.inode) for key in keys] == [payload(key) for key in keys]
    reader.close()


def test_a_large_file_lies_on_one_disk(content: LmdbContent, places: list[Path]) -> None:
    for inode in range(1, 9):
        for block in (1, 2):
            assert content.land(ContentKey(inode, block), payload(ContentKey(inode, block), BLOCK_BYTES))
    files = [path for place in places for path in (place / BLOCKS_DIRECTORY).iterdir()]
    assert sorted(int(path.name) for path in files) == list(range(1, 9)), "each of them once"
    assert len({path.parent for path in files}) > 1
    for key, disk in disks_of(content).items():
        assert (places[disk] / BLOCKS_DIRECTORY / str(key.inode)).exists()
        assert held(content, key) == payload(key, BLOCK_BYTES)
    fd = content.plain_file(3, 2 * BLOCK_BYTES)
    assert fd is not None
    os.close(fd)
    content.apply(list(disks_of(content)), ())
    content.free()
    assert [list((place / BLOCKS_DIRECTORY).iterdir()) for place in places] == [[], [], []]


def test_what_is_on_a_disk_that_fails_is_missed_and_stored_on_the_others(
    content: LmdbContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fill(content)
    on_it = [key for key, disk in disks_of(content).items() if disk == 1]
    bad = content.extents.files[1].fd
    pread = os.pread

    def failing(fd: int, *place: int) -> bytes:
        if fd == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, *place)

    monkeypatch.setattr(extents.os, "pread", failing)
    assert held(content, on_it[0]) is None
    assert [found["left_out"] for found in content.disks()] == [False, True, False]
    for key in on_it[:5]:
        assert held(content, key) is None
        assert content.land(key, payload(key))
        assert held(content, key) == payload(key)
        member = content.member(key)
        assert member is not None
        assert member.section == "samples", "it has the place that it had"
    assert content.fit(30 * MIB)
    assert set(disks_of(content)) == set(keys) - set(on_it[5:])
    assert not content.fit(30 * MIB)
    assert content.usage().kept_entries == 45
    assert [found["used_bytes"] for found in content.disks()][1] == 0
    fill_again = fill(content)
    assert [held(content, key) for key in fill_again] == [payload(key) for key in fill_again]


def test_a_disk_that_cannot_be_written_leaves_the_write_to_the_next(
    content: LmdbContent, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fd: int, *args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        grow = extents.Extents._grow

        def grown(self: extents.Extents, count: int, wanted: int) -> None:
            failing(0) if self._path == places[2] / EXTENTS_FILE else grow(self, count, wanted)

        patched.setattr(extents.Extents, "_grow", grown)
        fill(content)
    assert set(disks_of(content).values()) == {0, 1}
    assert [found["left_out"] for found in content.disks()] == [False, False, True]


def test_a_full_disk_leaves_its_part_to_the_others_and_stays(
    content: LmdbContent, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    grow = extents.Extents._grow

    def full(self: extents.Extents, count: int, wanted: int) -> None:
        if self._path.parent in places[:2]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        grow(self, count, wanted)

    monkeypatch.setattr(extents.Extents, "_grow", full)
    fill(content, 30)
    assert set(disks_of(content).values()) == {2}
    assert [found["left_out"] for found in content.disks()] == [False, False, False]
    monkeypatch.setattr(extents.Extents, "_grow", lambda self, count, wanted: full(content.extents.files[0], 0, 0))
    with pytest.raises(StoreFull):
        content.land_all([(ContentKey(100 + at), payload(ContentKey(at), 300 * KIB)) for at in range(9)])
    assert [leased(place) for place in places] == [0, 0, 30 * 7], "nothing of it is left"


def test_a_directory_that_is_missing_at_the_mount_takes_its_files_with_it(places: list[Path]) -> None:
    content = opened(places)
    content.set_capacity(30 * MIB)
    fill(content)
    for inode in range(100, 108):
        assert content.land(ContentKey(inode, 1), payload(ContentKey(inode, 1), BLOCK_BYTES))
    before = disks_of(content)
    content.close()
    content = opened(places, missing=(places[1],))
    assert content.fit(30 * MIB)
    assert disks_of(content) == {key: disk for key, disk in before.items() if disk != 1}
    assert all(held(content, key) is not None for key in disks_of(content))
    fill(content)
    content.close()
    content = opened(places[::2])
    assert not content.fit(30 * MIB)
    kept = disks_of(content)
    content.close()
    content = opened(places)
    assert disks_of(content) == kept, "what is new takes nothing away"
    assert content.land(ContentKey(1000), payload(ContentKey(1000)))
    assert disks_of(content)[ContentKey(1000)] not in kept.values(), "it has room"
    content.close()
    # With one directory the store is what it would be without the others.
    content = opened(places[:1])
    assert content.fit(30 * MIB)
    assert set(disks_of(content).values()) == {0}
    assert content._used() == {}
    content.set_capacity(30 * MIB)
    assert leased(places[0]) == 7 * len([key for key in disks_of(content) if not key.block]), "no other file's chunks"
    keys = fill(content)
    assert set(disks_of(content).values()) == {0}
    assert all(held(content, key) == payload(key) for key in keys)
    content.close()


def test_a_smaller_capacity_holds_on_each_disk(content: LmdbContent) -> None:
    fill(content)
    going = [key for key, disk in disks_of(content).items() if disk == 0]
    content.apply(going, ())
    content.set_capacity(4 * MIB)
    for found in content.disks():
        assert int(str(found["used_bytes"])) <= int(str(found["capacity_bytes"])) == 4 * MIB // 3
    content.set_capacity(30 * MIB)
    assert content.land(ContentKey(1000), payload(ContentKey(1000)))


def test_the_first_disk_keeps_what_it_has_if_the_capacity_grows_with_the_disks(places: list[Path]) -> None:
    content = opened(places[:1])
    content.set_capacity(6 * MIB)
    keys = fill(content)
    content.close()
    content = opened(places)
    assert not content.fit(18 * MIB)
    content.set_capacity(18 * MIB)
    assert set(disks_of(content)) == set(keys)
    assert content.fit(6 * MIB)
    assert [found["used_bytes"] for found in content.disks()] == [20 * 100 * KIB, 0, 0]
    content.close()


def test_a_truncated_file_of_chunks_is_a_miss(content: LmdbContent, places: list[Path]) -> None:
    keys = fill(content)
    os.truncate(places[1] / EXTENTS_FILE, 0)
    lost = [key for key in keys if held(content, key) is None]
    assert lost == [key for key, disk in disks_of(content).items() if disk == 1]
    for key in lost:
        assert content.land(key, payload(key))
    assert [held(content, key) for key in keys] == [payload(key) for key in keys]


def test_what_a_dead_process_had_leased_is_found_on_each_disk(content: LmdbContent, places: list[Path]) -> None:
    keys = fill(content)

    def die() -> None:
        own = LmdbContent(places[0], disks=content._disks)
        own.lease([100 * KIB] * 9)
        os._exit(0)

    content.close()
    assert exit_status(forked(die)) == 0
    content = LmdbContent(places[0], disks=content._disks)
    assert sum(map(leased, places)) == 69 * 7
    content.sweep()
    assert [leased(place) for place in places] == [20 * 7] * 3
    assert [held(content, key) for key in keys] == [payload(key) for key in keys]
    content.close()


def test_a_store_of_several_disks_is_flushed_and_wiped_with_all_of_them(places: list[Path]) -> None:
    store = places[0].parent
    shutil.rmtree(places[0])
    assert claim(store) is None
    content = opened(places)
    content.set_capacity(30 * MIB)
    fill(content)
    content.close()
    release(store, places[1:])
    assert claim(store) is None
    (store / "in-use").write_text("another boot\n")
    assert claim(store) is not None
    content = opened(places)
    content.set_capacity(30 * MIB)
    assert [leased(place) for place in places] == [0, 0, 0]
    fill(content)
    content.close()


class DiskMachine(RuleBasedStateMachine):
    """Files and blocks come, are kept and go on three disks, of which one may be left out and come back."""

    @initialize()
    def begin(self) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.places = directories(Path(self.temporary.name), "a", "b", "c")
        self.content = opened(self.places)
        self.content.set_capacity(6 * MIB)
        self.sizes: dict[ContentKey, int] = {}

    def teardown(self) -> None:
        self.content.close()
        self.temporary.cleanup()

    @rule(inode=st.integers(1, 9), size=st.sampled_from([0, 1, 16 * KIB, 40 * KIB, 300 * KIB]))
    def land(self, inode: int, size: int) -> None:
        key = ContentKey(inode)
        size = self.sizes.setdefault(key, size)
        self.content.land(key, payload(key, size))

    @rule(inode=st.integers(10, 13), block=st.integers(1, 2))
    def land_block(self, inode: int, block: int) -> None:
        key = ContentKey(inode, block)
        self.sizes[key] = BLOCK_BYTES
        self.content.land(key, payload(key, BLOCK_BYTES))

    @rule(inode=st.integers(1, 13))
    def keep(self, inode: int) -> None:
        self.content.apply((), [Keep(key, "samples") for key in self.content.keys(inode)])

    @rule(inode=st.integers(1, 13))
    def drop(self, inode: int) -> None:
        self.content.apply(self.content.keys(inode), ())
        self.content.free()

    @rule(inode=st.integers(1, 13))
    def release(self, inode: int) -> None:
        self.content.release(self.content.keys(inode))

    @rule(missing=st.sampled_from([(), (1,), (2,), (1, 2)]))
    def remount(self, missing: tuple[int, ...]) -> None:
        self.content.close()
        self.content = opened(self.places, tuple(self.places[at] for at in missing))
        self.content.fit(6 * MIB)

    @rule(disk=st.integers(1, 2))
    def fail(self, disk: int) -> None:
        number = next((number for number, place in self.content._disks.places.items() if place == self.places[disk]), 0)
        self.content._disks.failed(number, OSError(errno.EIO, os.strerror(errno.EIO)))
        self.content.fit(6 * MIB)

    @invariant()
    def each_disk_keeps_to_its_part(self) -> None:
        content, rows = self.content, disks_of(self.content)
        used = Counter[int]()
        for key, disk in rows.items():
            used[disk] += self.sizes[key]
        shown = content.disks()
        assert [found["used_bytes"] for found in shown] == [used[number] for number in content._disks.places]
        for found in shown:
            assert int(str(found["used_bytes"])) <= int(str(found["capacity_bytes"]))
        assert content.usage().used_bytes == used.total() <= 6 * MIB

    @invariant()
    def everything_can_be_read(self) -> None:
        for key in disks_of(self.content):
            assert held(self.content, key) == payload(key, self.sizes[key])


TestDisks = DiskMachine.TestCase
TestDisks.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_a_disk_that_failed_comes_back_empty() -> None:
    """A file of which it has a block is on another disk by then: that block must not be looked for on the old disk."""
    for inode, disk in itertools.product((10, 11, 12, 13), (1, 2)):
        machine = DiskMachine()
        machine.begin()
        try:
            machine.land_block(inode=inode, block=1)
            machine.fail(disk=disk)
            machine.land_block(inode=inode, block=2)
            machine.remount(missing=())
            machine.everything_can_be_read()
            assert ContentKey(inode, 2) in disks_of(machine.content)
        finally:
            machine.teardown()


def test_rows_of_a_disk_that_failed_name_no_other_disk() -> None:
    """The whole daemon may be killed before the manager has dropped them, and the disk comes back with new files."""
    machine = DiskMachine()
    machine.begin()
    try:
        for inode in range(1, 9):
            machine.land(inode=inode, size=300 * KIB)
        lost = machine.content._disks.numbers[1]
        assert lost in disks_of(machine.content).values()
        machine.content._disks.failed(lost, OSError(errno.EIO, os.strerror(errno.EIO)))
        machine.remount(missing=())
        assert lost not in machine.content._disks.places
        machine.everything_can_be_read()
        assert machine.content.damaged == 0
    finally:
        machine.teardown()
