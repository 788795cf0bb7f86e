"""Names, inodes and positions: what the catalogue promises, by example and by property."""

from __future__ import annotations

import stat
import zlib
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from spiderfs.errors import Stale
from spiderfs.protocol.extents import Extent
from spiderfs.sources.source import FIRST_INODE, SourceStat, Version
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs import catalogue as module
from spiderfs.vfs.catalogue import NEVER, PROVISIONAL, ROOT_INODE, TABLES, Catalogue
from spiderfs.vfs.rules import left_s, trusted

ROOT = SourceStat(stat.S_IFDIR | 0o755, 0, 0, 0, 1)
DIRECTORY = SourceStat(stat.S_IFDIR | 0o755, 0, 0, 4096, 5)
FILE = SourceStat(stat.S_IFREG | 0o644, 1000, 1000, 10, 7)


def empty(records: MemoryRecords | None = None) -> Catalogue:
    catalogue = Catalogue(MemoryRecords(TABLES) if records is None else records)
    catalogue.record_root(ROOT)
    return catalogue


@pytest.fixture
def catalogue() -> Catalogue:
    return empty()


def names(catalogue: Catalogue, parent: int = ROOT_INODE) -> list[bytes]:
    return sorted(entry.name for entry in catalogue.entries(parent, 0, 10_000))


# -- inodes


def test_an_inode_names_one_version(catalogue: Catalogue) -> None:
    first = catalogue.record(ROOT_INODE, b"a", FILE, 1.0).inode
    assert catalogue.record(ROOT_INODE, b"a", FILE, 2.0).inode == first
    assert catalogue.record(ROOT_INODE, b"a", FILE._replace(mode=stat.S_IFREG | 0o400, uid=5), 3.0).inode == first
    larger = catalogue.record(ROOT_INODE, b"a", FILE._replace(size=11), 4.0).inode
    later = catalogue.record(ROOT_INODE, b"a", FILE._replace(mtime_ns=8), 5.0).inode
    other = catalogue.record(ROOT_INODE, b"b", FILE, 6.0).inode
    assert len({first, larger, later, other}) == 4
    assert catalogue.record(ROOT_INODE, b"a", FILE, 7.0).inode == first, "a version that comes back is the same one"
    assert catalogue.node(larger).version == Version(11, 7), "an old version still means what it meant"


def test_a_tag_takes_the_place_of_the_mtime(catalogue: Catalogue) -> None:
    tagged = FILE._replace(tag=(1 << 64) - 1)
    first = catalogue.record(ROOT_INODE, b"a", tagged, 1.0)
    assert first.settles_at == 0, "nothing is written under a tag, whatever the mtime"
    assert catalogue.node(first.inode).stat == tagged
    assert catalogue.find(ROOT_INODE, b"a").stat == tagged
    assert catalogue.record(ROOT_INODE, b"a", tagged._replace(mtime_ns=8), 2.0).inode == first.inode
    others = [tagged._replace(tag=1), tagged._replace(size=11), FILE]
    inodes = {catalogue.record(ROOT_INODE, b"a", other, 3.0).inode for other in others}
    assert len(inodes | {first.inode}) == 4


def test_a_directory_keeps_its_inode(catalogue: Catalogue) -> None:
    inode = catalogue.record(ROOT_INODE, b"d", DIRECTORY, 1.0).inode
    changed = DIRECTORY._replace(mtime_ns=99, size=8192)
    assert catalogue.record(ROOT_INODE, b"d", changed, 2.0).inode == inode
    assert catalogue.node(inode).stat == changed
    assert catalogue.directory_inode(b"d") == inode
    assert catalogue.parent_of(b"d/x") == (inode, b"x")
    assert catalogue.parent_of(b"x") == (ROOT_INODE, b"x")


def test_a_name_that_becomes_a_directory_is_another_inode(catalogue: Catalogue) -> None:
    file = catalogue.record(ROOT_INODE, b"a", FILE, 1.0).inode
    directory = catalogue.record(ROOT_INODE, b"a", DIRECTORY, 2.0).inode
    assert file != directory
    assert catalogue.node(file).is_regular
    assert catalogue.node(directory).is_directory


def test_an_unknown_inode_is_stale(catalogue: Catalogue) -> None:
    with pytest.raises(Stale):
        catalogue.node(12345678)
    with pytest.raises(Stale):
        catalogue.record(12345678, b"a", FILE, 1.0)


def test_inodes_leave_room_for_root_and_control_files(monkeypatch: pytest.MonkeyPatch, catalogue: Catalogue) -> None:
    monkeypatch.setattr(module.xxhash, "xxh3_64_intdigest", lambda text: 0)
    dentry = catalogue.record(ROOT_INODE, b"a", FILE, 1.0)
    assert dentry.inode >= FIRST_INODE
    assert dentry.position > 2


# -- collisions


def constant(place: int) -> Callable[..., int]:
    return lambda *_: place


def test_colliding_versions_get_different_inodes(monkeypatch: pytest.MonkeyPatch, catalogue: Catalogue) -> None:
    monkeypatch.setattr(module, "_version_hash", constant(FIRST_INODE))
    versions = [FILE, FILE._replace(size=11), DIRECTORY, FILE._replace(size=4096, mtime_ns=5)]
    found = {
        (name, version): catalogue.record(ROOT_INODE, name, version, 1.0).inode
        for name in (b"a", b"b")
        for version in versions
    }
    assert sorted(found.values()) == list(range(FIRST_INODE, FIRST_INODE + 8))
    for (name, version), inode in found.items():
        assert catalogue.node(inode).stat == version
        assert catalogue.record(ROOT_INODE, name, version, 2.0).inode == inode
    assert catalogue.directory_inode(b"b") == found[b"b", DIRECTORY]


def test_collisions_within_one_listing(monkeypatch: pytest.MonkeyPatch, catalogue: Catalogue) -> None:
    monkeypatch.setattr(module, "_name_hash", constant(1000))
    monkeypatch.setattr(module, "_version_hash", constant(FIRST_INODE))
    every = [b"%02d" % number for number in range(20)]
    for now in (1.0, 2.0):
        catalogue.record_listing(ROOT_INODE, [(name, FILE) for name in every], 1, now)
        assert names(catalogue) == every
    assert len({catalogue.find(ROOT_INODE, name).inode for name in every}) == 20  # type: ignore[union-attr]


def test_an_inode_is_found_past_the_end_of_the_numbers(monkeypatch: pytest.MonkeyPatch, catalogue: Catalogue) -> None:
    monkeypatch.setattr(module, "_version_hash", constant((1 << 63) - 1))
    assert catalogue.record(ROOT_INODE, b"a", FILE, 1.0).inode == (1 << 63) - 1
    assert catalogue.record(ROOT_INODE, b"b", FILE, 1.0).inode == FIRST_INODE


# -- what comes and goes


def test_a_name_that_is_gone_is_forgotten_and_its_version_is_not(catalogue: Catalogue) -> None:
    dentry = catalogue.record(ROOT_INODE, b"a", FILE, 1.0)
    catalogue.record_gone(ROOT_INODE, b"a", 1e10)
    catalogue.record_gone(ROOT_INODE, b"never", 1e10)
    assert catalogue.find(ROOT_INODE, b"a") is None
    assert catalogue.node(dentry.inode).path == b"a", "open handles still mean it"


def test_an_expired_name_is_to_be_asked_for_again(catalogue: Catalogue) -> None:
    dentry = catalogue.record(ROOT_INODE, b"a", FILE, 100.0)
    catalogue.expire(b"a")
    catalogue.expire(b"never")
    expired = catalogue.find(ROOT_INODE, b"a")
    assert expired == dentry._replace(checked_at=NEVER)
    # The clock of a machine without a battery begins in 1970.
    assert left_s(NEVER, 1.0, ttl_s=3600.0) <= 0
    assert not trusted(NEVER, ttl_s=3600.0).at(1.0)


def forget_what_is_gone(catalogue: Catalogue) -> None:
    while gone := catalogue.gone(0, 100):
        catalogue.forget(gone)


def test_extents_are_forgotten_with_the_version_of_their_file(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_NAMES", 4)
    root, large = catalogue.node(ROOT_INODE), FILE._replace(size=100_000)
    extents = [Extent(b"a", at, at + 4096) for at in range(0, 40_960, 4096)]

    def recorded(found: SourceStat, *parts: list[Extent]) -> set[int]:
        file = catalogue.record(ROOT_INODE, b"a", found, 1.0).below(root)
        return {inode for some in parts for inode in catalogue.record_extents(file, some)}

    first = recorded(large, extents[:5], extents[3:])
    forget_what_is_gone(catalogue)
    assert len(first) == 10
    assert all(map(catalogue.known, first))
    second = recorded(large._replace(mtime_ns=8), extents[:5])
    forget_what_is_gone(catalogue)
    assert not any(map(catalogue.known, first))
    assert all(map(catalogue.known, second))
    # The first version comes back before the second one's extents are looked at.
    recorded(large, extents)
    catalogue.forget(catalogue.gone(0, 100))
    assert recorded(large._replace(mtime_ns=8), extents[:5]) == second
    forget_what_is_gone(catalogue)
    assert all(map(catalogue.known, second))
    catalogue.record_gone(ROOT_INODE, b"a", 2.0)
    forget_what_is_gone(catalogue)
    assert not any(map(catalogue.known, first | second))


def test_a_listing_forgets_what_vanished_and_keeps_what_was_found_meanwhile(catalogue: Catalogue) -> None:
    for name in (b"stays", b"goes"):
        catalogue.record(ROOT_INODE, name, FILE, 10.0)
    sub = catalogue.record(ROOT_INODE, b"sub", DIRECTORY, 10.0).inode
    catalogue.record(sub, b"goes", FILE, 10.0)
    # The scan began at 20, and someone looked this one up while it ran.
    catalogue.record(ROOT_INODE, b"found meanwhile", FILE, 20.5)
    assert catalogue.listing(ROOT_INODE) is None
    catalogue.record_listing(ROOT_INODE, [(b"stays", FILE), (b"new", FILE), (b"sub", DIRECTORY)], 77, 20.0)
    assert names(catalogue) == [b"found meanwhile", b"new", b"stays", b"sub"]
    assert names(catalogue, sub) == [b"goes"], "only the directory that was listed"
    assert catalogue.listing(ROOT_INODE) == (20.0, 77, 0.0)
    catalogue.record_listing(ROOT_INODE, [], 78, 30.0)
    assert names(catalogue) == []
    assert catalogue.listing(ROOT_INODE) == (30.0, 78, 0.0)


def test_a_name_that_a_scan_gives_twice_is_entered_once(catalogue: Catalogue) -> None:
    catalogue.record_listing(ROOT_INODE, [(b"a", FILE), (b"b", FILE), (b"a", FILE._replace(size=11))], 1, 1.0)
    assert names(catalogue) == [b"a", b"b"]
    assert catalogue.find(ROOT_INODE, b"a").stat.size == 11


def test_a_large_listing_is_written_in_parts(monkeypatch: pytest.MonkeyPatch, catalogue: Catalogue) -> None:
    monkeypatch.setattr(module, "_BATCH_NAMES", 7)
    every = [b"%03d" % number for number in range(100)]
    catalogue.record_listing(ROOT_INODE, [(name, FILE) for name in every], 1, 1.0)
    assert names(catalogue) == every
    catalogue.record_listing(ROOT_INODE, [(name, FILE) for name in every[::10]], 1, 2.0)
    assert names(catalogue) == every[::10]
    assert catalogue.known_files() == 10


# -- positions are stable

NAMES = [b"%d" % number for number in range(24)]
CHANGE = st.tuples(st.sampled_from(NAMES), st.booleans())


@pytest.mark.parametrize("hashes", ["as they are", "colliding"])
@settings(max_examples=60, deadline=None)
@given(
    first=st.sets(st.sampled_from(NAMES)),
    between=st.lists(st.lists(CHANGE, max_size=4), max_size=30),
    limit=st.integers(1, 5),
)
def test_a_listing_in_chunks_gives_each_name_that_stays_once(
    hashes: str, first: set[bytes], between: list[list[tuple[bytes, bool]]], limit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if hashes == "colliding":
            patch.setattr(module, "_name_hash", lambda name: 10 + zlib.crc32(name) % 3)
            patch.setattr(module, "_version_hash", lambda path, version, view: FIRST_INODE + zlib.crc32(path) % 3)
        catalogue = empty()
        present, stayed = set(first), set(first)
        for name in sorted(first):
            catalogue.record(ROOT_INODE, name, FILE, 1.0)
        seen: list[bytes] = []
        after, changes = 0, iter(between)
        while chunk := catalogue.entries(ROOT_INODE, after, limit):
            assert all(entry.position > after for entry in chunk)
            seen += [entry.name for entry in chunk]
            after = chunk[-1].position
            for name, there in next(changes, []):
                if there:
                    catalogue.record(ROOT_INODE, name, FILE, 2.0)
                    present.add(name)
                else:
                    catalogue.record_gone(ROOT_INODE, name, 1e10)
                    present.discard(name)
                    stayed.discard(name)
            assert {name for name in NAMES if catalogue.find(ROOT_INODE, name)} == present
        assert sorted(name for name in seen if name in stayed) == sorted(stayed)
        assert names(catalogue) == sorted(present)


# -- what is newer stands


def test_an_answer_that_comes_late_does_not_replace_a_newer_one(catalogue: Catalogue) -> None:
    later = FILE._replace(mtime_ns=8)
    newer = catalogue.record(ROOT_INODE, b"a", later, 20.0)
    assert catalogue.record(ROOT_INODE, b"a", FILE, 10.0) == newer, "asked before, and answered after it"
    catalogue.record_gone(ROOT_INODE, b"a", 15.0)
    assert catalogue.find(ROOT_INODE, b"a") == newer
    catalogue.record_listing(ROOT_INODE, [(b"a", FILE)], 77, 15.0)
    assert catalogue.find(ROOT_INODE, b"a") == newer, "the scan began before the name was looked up"


def test_a_name_looked_up_while_a_listing_is_written_stands(catalogue: Catalogue) -> None:
    later = FILE._replace(mtime_ns=8)

    def names_found() -> Iterator[tuple[bytes, SourceStat]]:
        yield b"a", FILE
        catalogue.record(ROOT_INODE, b"a", later, 20.0)

    catalogue.record_listing(ROOT_INODE, names_found(), 77, 15.0)
    assert catalogue.find(ROOT_INODE, b"a").stat == later


@pytest.mark.parametrize("asked_at", [10.0, 20.0])
def test_a_name_looked_up_before_a_listing_comes_to_it_is_entered_once(catalogue: Catalogue, asked_at: float) -> None:
    other = FILE._replace(mtime_ns=8)

    def names_found() -> Iterator[tuple[bytes, SourceStat]]:
        catalogue.record(ROOT_INODE, b"a", other, asked_at)
        yield b"a", FILE

    catalogue.record_listing(ROOT_INODE, names_found(), 77, 15.0)
    assert names(catalogue) == [b"a"]
    assert catalogue.find(ROOT_INODE, b"a").stat == (other if asked_at > 15.0 else FILE), (
        "what was asked for later stands"
    )
    assert len(catalogue.gone(0, 10)) == 1, "of two versions one may be gone"
    catalogue.record_gone(ROOT_INODE, b"a", 30.0)
    assert catalogue.find(ROOT_INODE, b"a") is None


def test_a_clock_that_was_set_back_keeps_no_removed_name() -> None:
    now = 1000.0
    catalogue = Catalogue(MemoryRecords(TABLES), lambda: now)
    catalogue.record_root(ROOT)
    catalogue.record_listing(ROOT_INODE, [(b"stays", FILE), (b"goes", FILE)], 77, now)
    now = 500.0
    catalogue.record_listing(ROOT_INODE, [(b"stays", FILE._replace(size=3))], 78, now)
    assert names(catalogue) == [b"stays"]
    assert catalogue.find(ROOT_INODE, b"stays").stat.size == 3


def test_a_server_that_is_behind_is_found_out_by_a_change(catalogue: Catalogue) -> None:
    now, behind = 1_000_000.0, 600.0
    catalogue = Catalogue(MemoryRecords(TABLES), lambda: now)
    catalogue.record_root(ROOT)

    def written() -> SourceStat:
        return FILE._replace(mtime_ns=int((now - behind) * 1e9))

    assert catalogue.record(ROOT_INODE, b"a", written(), now).settles_at == 0, "who could know?"
    now += 100
    assert catalogue.record(ROOT_INODE, b"a", written(), now + 0.5).settles_at > now
    now += 100
    catalogue.record_listing(ROOT_INODE, [(b"b", written())], written().mtime_ns, now)
    assert catalogue.find(ROOT_INODE, b"b").settles_at > now
    assert not catalogue.listing(ROOT_INODE).is_settled, "another change may have the same mtime"
    now += 2 * 86400
    assert catalogue.record(ROOT_INODE, b"c", written(), now).settles_at == 0, "clocks are set right some day"


def test_versions_settle_and_are_not_provisional_twice(catalogue: Catalogue) -> None:
    now = 1_000_000.0
    catalogue = Catalogue(MemoryRecords(TABLES), lambda: now)
    catalogue.record_root(ROOT)
    young = FILE._replace(mtime_ns=int(now * 1e9))
    first = catalogue.record(ROOT_INODE, b"a", young, now)
    assert now < first.settles_at < now + 3
    assert catalogue.node(first.inode | PROVISIONAL) == catalogue.node(first.inode)
    now += 1
    assert catalogue.record(ROOT_INODE, b"a", young, now).settles_at == first.settles_at
    now -= 100_000
    assert catalogue.record(ROOT_INODE, b"a", young, now).settles_at < now + 3, "the clock was set back"


# -- what is gone


def gone_through(catalogue: Catalogue) -> None:
    for _ in range(100):
        if not (inodes := catalogue.gone(0, 500)):
            return
        catalogue.forget(inodes)
    raise AssertionError("there is no end to it")


def test_what_no_name_means_any_more_is_forgotten(catalogue: Catalogue) -> None:
    old = catalogue.record(ROOT_INODE, b"a", FILE, 1.0).inode
    new = catalogue.record(ROOT_INODE, b"a", FILE._replace(mtime_ns=8), 2.0).inode
    removed = catalogue.record(ROOT_INODE, b"b", FILE, 3.0).inode
    catalogue.record_gone(ROOT_INODE, b"b", 4.0)
    assert sorted(catalogue.gone(0, 10)) == sorted([old, removed])
    assert not catalogue.is_current(old)
    assert catalogue.is_current(new)
    gone_through(catalogue)
    for inode in (old, removed):
        with pytest.raises(Stale):
            catalogue.node(inode)
    assert catalogue.node(new).version.mtime_ns == 8


def test_a_version_that_came_back_is_left_as_it_is(catalogue: Catalogue) -> None:
    first = catalogue.record(ROOT_INODE, b"a", FILE, 1.0).inode
    catalogue.record(ROOT_INODE, b"a", FILE._replace(mtime_ns=8), 2.0)
    catalogue.record(ROOT_INODE, b"a", FILE, 3.0)
    gone_through(catalogue)
    assert catalogue.node(first).path == b"a"


def test_a_directory_goes_with_all_below_it() -> None:
    records = MemoryRecords(TABLES)
    catalogue = empty(records)
    inodes, names, listings = (records.count(kind) for kind in ("inode", "dentry", "listing"))
    catalogue.record_listing(ROOT_INODE, [(b"d", DIRECTORY), (b"stays", FILE)], 1, 1.0)
    directory = catalogue.directory_inode(b"d")
    catalogue.record_listing(directory, [(b"sub", DIRECTORY), *((b"%d" % n, FILE) for n in range(1200))], 1, 1.0)
    below = catalogue.record(catalogue.directory_inode(b"d/sub"), b"x", FILE, 1.0).inode
    assert catalogue.is_current(below)
    catalogue.record_listing(ROOT_INODE, [(b"stays", FILE)], 2, 2.0)
    assert not catalogue.is_current(below)
    gone_through(catalogue)
    assert records.count("inode") == inodes + 1, "only what stays"
    assert records.count("dentry") == names + 1
    assert records.count("listing") == listings + 1
