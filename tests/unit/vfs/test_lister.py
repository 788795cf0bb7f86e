"""Listings: complete when asked for, trusted only as long as they deserve it, and never lost with the source."""

from __future__ import annotations

import math
import random
import stat
from collections.abc import Callable, Container, Iterator

import pytest

from benchmarks.fakes import MemorySource
from spiderfs.daemon.training.trainer import inodes_of
from spiderfs.errors import SourceDenied, SourceUnavailable, Stale
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.source import UNKNOWN, SourceStat
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES, Catalogue, Node
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.rules import WINDOW_S

TTL_S = 10.0
LIMITS = SourceLimits(timeout_s=20.0, attempts=2, backoff_s=0.001, max_backoff_s=0.001)


class Source(MemorySource):
    """One whose directories can be made unreadable while their attributes are not."""

    scan_fails = False

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bytes] = []
        """The names of which scans have asked for the attributes."""

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        if self.scan_fails:
            raise SourceUnavailable("no route")
        for name, found in super().scan(path, known):
            is_known = (name, stat.S_IFMT(found.mode)) in known
            self.asked += [] if is_known else [name]
            yield name, UNKNOWN if is_known else found


class Harness:
    """A lister of a source in memory, with a clock that the test moves."""

    def __init__(self) -> None:
        self.source = Source()
        self.catalogue = Catalogue(MemoryRecords(TABLES), lambda: self.now)
        # After all the times that the source gives to its entries.
        self.now = 1_800_000_000.0
        self.client = SourceClient(self.source, LIMITS, rng=random.Random(1), on_event=lambda event: None)
        self.lister = Lister(self.catalogue, self.client, lambda: self.now)

    def names(self, inode: int = ROOT_INODE) -> list[bytes]:
        return sorted(entry.name for entry in self.catalogue.entries(inode, 0, 10_000))

    def calls(self) -> dict[str, int]:
        """The calls to the source since this was asked last."""
        calls = dict(self.source.calls)
        self.source.calls.clear()
        return calls

    def unreachable(self) -> None:
        self.source.fail_next(*[SourceUnavailable("no route")] * LIMITS.attempts)

    async def known(self, path: bytes) -> Node:
        parent, name = self.catalogue.parent_of(path)
        dentry = self.catalogue.find(parent, name)
        return self.catalogue.node(dentry.inode)


@pytest.fixture
def harness() -> Harness:
    return Harness()


async def test_a_listing_is_complete_and_trusted_for_its_time(harness: Harness) -> None:
    for name in (b"a", b"sub/b", b"caf\xe9"):
        harness.source.add(name)
    root = await harness.lister.root()
    await harness.lister.complete(root, TTL_S)
    assert harness.names() == [b"a", b"caf\xe9", b"sub"]
    harness.calls()
    harness.source.add(b"new")
    harness.now += TTL_S - 1
    await harness.lister.complete(root, TTL_S)
    assert harness.calls() == {}
    harness.now += 1
    await harness.lister.complete(root, TTL_S)
    assert harness.names() == [b"a", b"caf\xe9", b"new", b"sub"]


async def test_an_unchanged_mtime_saves_the_scan(harness: Harness) -> None:
    harness.source.add(b"a")
    root = await harness.lister.root()
    await harness.lister.complete(root, TTL_S)
    harness.calls()
    for _ in range(3):
        harness.now += 2 * TTL_S
        await harness.lister.complete(root, TTL_S)
        assert harness.calls() == {"stat": 1}
    harness.source.remove(b"a")
    await harness.lister.complete(root, TTL_S)
    assert harness.calls() == {"stat": 1, "scan": 1}
    assert harness.names() == []


async def test_a_listing_that_is_trusted_for_no_time_is_made_again_from_the_names_alone(harness: Harness) -> None:
    harness.source.add(b"a", b"1")
    harness.source.add(b"gone")
    harness.source.add_directory(b"sub")
    root = await harness.lister.root()
    await harness.lister.complete(root, 0.0)
    before = await harness.known(b"a")
    harness.source.asked.clear()
    _unseen(harness, lambda: (harness.source.add(b"new", b"12"), harness.source.remove(b"gone")))
    await harness.lister.complete(root, 0.0)
    assert harness.source.asked == [b".", b"new"]
    assert harness.names() == [b"a", b"new", b"sub"]
    assert (await harness.known(b"new")).stat.size == 2
    assert await harness.known(b"a") == before
    assert (await harness.known(b"sub")).is_directory


async def test_a_mount_trusts_no_listing_of_an_earlier_one_and_lists_once(harness: Harness) -> None:
    harness.source.add(b"a")
    await harness.lister.complete(await harness.lister.root(), TTL_S)
    _unseen(harness, lambda: harness.source.add(b"new"))
    harness.now += 100
    again = Lister(harness.catalogue, harness.client, lambda: harness.now, since_s=harness.now)
    harness.source.asked.clear()
    await again.complete(await again.root(), 10 * TTL_S)
    assert harness.source.asked == [b".", b"new"]
    assert harness.names() == [b"a", b"new"]
    harness.calls()
    harness.now += 2 * TTL_S
    await again.complete(await again.root(), TTL_S)
    assert harness.calls() == {"stat": 1}


def _unseen(harness: Harness, change: Callable[[], object]) -> None:
    """Change the root so that its mtime does not show it."""
    mtime_ns = harness.source.stat(b"").mtime_ns
    change()
    harness.source.set_mtime(b"", mtime_ns)


async def test_a_listing_with_a_name_without_attributes_is_not_trusted(harness: Harness) -> None:
    for name in (b"a", b"dead/file", b"was known"):
        harness.source.add(name)
    root = await harness.lister.root()
    harness.source.break_entry(b"dead")
    await harness.lister.complete(root, TTL_S)
    assert harness.names() == [b"a", b"dead", b"was known"]
    assert harness.catalogue.find(ROOT_INODE, b"dead") is None, "nothing is known of it but that it is there"
    failed: list[bytes] = []
    walked = [
        node.path
        async for nodes in harness.lister.walk(lambda path: True, TTL_S, not_read=lambda path, _: failed.append(path))
        for node in nodes
    ]
    assert (sorted(walked), failed) == ([b"a", b"was known"], [b"dead"])
    harness.source.mend_entry(b"dead")
    harness.source.break_entry(b"was known")
    known = await harness.known(b"was known")
    harness.now += 2 * TTL_S
    await harness.lister.complete(root, TTL_S)
    assert (await harness.known(b"dead")).is_directory
    assert await harness.known(b"was known") == known
    harness.calls()
    harness.now += 2 * TTL_S
    await harness.lister.complete(root, TTL_S)
    assert harness.calls() == {"stat": 1}, "all names have attributes now"


async def test_a_look_up_of_its_name_saves_the_questions_about_a_directory(harness: Harness) -> None:
    harness.source.add(b"sub/a")
    await harness.lister.complete(await harness.lister.root(), TTL_S)
    node = await harness.known(b"sub")
    await harness.lister.complete(node, TTL_S)
    harness.now += 2 * TTL_S
    await harness.lister.complete(node, TTL_S, ahead=True)
    assert harness.calls() == {"stat": 2, "scan": 2}, "the root, its names, those of sub, and whether sub changed"
    harness.now += TTL_S - 1
    await harness.lister.complete(node, TTL_S)
    assert harness.calls() == {}, "it was found unchanged a moment ago"
    harness.source.add(b"sub/b")
    harness.now += 1
    harness.catalogue.record(ROOT_INODE, b"sub", harness.source.stat(b"sub"), harness.now)
    harness.calls()
    await harness.lister.complete(node, TTL_S)
    assert "scan" in harness.calls(), "the look-up has shown another mtime"
    assert harness.names(node.inode) == [b"a", b"b"]


async def test_a_forgotten_name_vouches_for_no_directory(harness: Harness) -> None:
    harness.source.add(b"sub/a")
    await harness.lister.complete(await harness.lister.root(), TTL_S)
    node = await harness.known(b"sub")
    assert harness.lister.looked_up(node, math.inf) is not None
    harness.catalogue.expire(b"sub")
    assert harness.lister.looked_up(node, math.inf) is None


async def test_many_directories_are_listed_side_by_side(harness: Harness) -> None:
    paths = {b"%02d/below" % number for number in range(30)}
    for path in paths:
        harness.source.add(path + b"/file")
    found = await harness.lister.directories([*paths, b"nothing", b"00/below/file"], TTL_S)
    assert found.keys() == paths
    assert all(harness.names(node.inode) == [b"file"] for node in found.values())
    assert harness.calls()["scan"] == 1 + 30 + 30, "each directory is asked once"


async def test_a_directory_scanned_right_after_it_changed_is_not_trusted(harness: Harness) -> None:
    harness.source.add(b"a")
    harness.now = harness.source.stat(b"").mtime_ns / 1e9 + WINDOW_S / 2
    root = await harness.lister.root()
    await harness.lister.complete(root, 0.0)
    harness.calls()
    harness.now += 100
    await harness.lister.complete(root, TTL_S)
    assert harness.calls()["scan"] == 1, "another change may have had the same mtime"
    harness.now += 100
    await harness.lister.complete(root, TTL_S)
    assert "scan" not in harness.calls()


async def test_an_unreachable_source_makes_nothing_vanish(harness: Harness) -> None:
    harness.source.add(b"a")
    root = await harness.lister.root()
    await harness.lister.complete(root, TTL_S)
    harness.now += 2 * TTL_S
    harness.unreachable()
    # The stat fails, so the mtime that is known stands.
    await harness.lister.complete(root, TTL_S)
    assert not harness.client.reachable
    assert harness.calls() == {"stat": 1 + LIMITS.attempts, "scan": 1}, "no scan after a stat that failed"
    assert harness.names() == [b"a"]
    await harness.lister.complete(root, TTL_S)
    assert await harness.lister.refresh(root) == root
    assert harness.calls() == {}, "no one waits for a source that is known to be away"


async def test_a_scan_that_fails_leaves_the_old_listing(harness: Harness) -> None:
    harness.source.add(b"a")
    root = await harness.lister.root()
    await harness.lister.complete(root, TTL_S)
    harness.source.add(b"b")
    harness.now += 2 * TTL_S
    harness.source.scan_fails = True
    await harness.lister.complete(root, TTL_S)
    assert harness.names() == [b"a"]
    harness.source.scan_fails = False
    await harness.client.stat(b"")
    await harness.lister.complete(root, TTL_S)
    assert harness.names() == [b"a", b"b"]


async def test_without_any_listing_an_unreachable_source_is_an_error(harness: Harness) -> None:
    root = await harness.lister.root()
    harness.unreachable()
    with pytest.raises(SourceUnavailable):
        await harness.lister.complete(root, TTL_S)
    await harness.lister.complete(root, TTL_S)
    assert harness.catalogue.listing(ROOT_INODE) is not None


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("becomes", ["gone", "file"])
async def test_a_directory_that_is_one_no_more_is_stale(harness: Harness, listed: bool, becomes: str) -> None:
    harness.source.add(b"sub/a")
    await harness.lister.complete(await harness.lister.root(), TTL_S)
    node = await harness.known(b"sub")
    if listed:
        await harness.lister.complete(node, TTL_S)
        harness.now += 2 * TTL_S
    harness.source.remove(b"sub")
    if becomes == "file":
        harness.source.add(b"sub", b"now a file")
    with pytest.raises(Stale):
        await harness.lister.refresh(node)
    with pytest.raises(Stale):
        await harness.lister.complete(node, TTL_S)


async def test_a_refusal_does_not_make_a_directory_stale(harness: Harness) -> None:
    harness.source.add(b"sub/a")
    await harness.lister.complete(await harness.lister.root(), TTL_S)
    node = await harness.known(b"sub")
    harness.source.fail_next(SourceDenied("no"))
    with pytest.raises(SourceDenied):
        await harness.lister.refresh(node)


async def walked(harness: Harness, wanted: Callable[[bytes], bool] = lambda directory: True) -> list[bytes]:
    paths: list[bytes] = []
    async for files in harness.lister.walk(wanted, TTL_S):
        paths += [file.path for file in files]
    return sorted(paths)


async def test_a_walk_finds_every_regular_file(harness: Harness) -> None:
    expected = sorted([b"a", b"d/e/f/g", *(b"d/%04d" % number for number in range(2500))])
    for path in expected:
        harness.source.add(path)
    harness.source.add_symlink(b"d/link", b"../a")
    harness.source.add_directory(b"empty")
    assert await walked(harness) == expected
    assert await walked(harness, lambda directory: directory in (b"", b"d", b"d/e")) == [
        path for path in expected if path != b"d/e/f/g"
    ]


async def test_a_walk_passes_over_what_cannot_be_read(harness: Harness) -> None:
    for path in (b"bad/x", b"good/y", b"z"):
        harness.source.add(path)
    await harness.lister.complete(await harness.lister.root(), TTL_S)
    harness.source.remove(b"bad")
    assert await walked(harness) == [b"good/y", b"z"]
    harness.now += 2 * TTL_S
    harness.source.fail_next(SourceDenied("no"))
    assert await walked(harness) == [], "the root itself"


async def test_the_text_of_a_link_is_read_once(harness: Harness) -> None:
    for number in range(200):
        harness.source.add(b"blobs/%d" % number, b"bytes")
        harness.source.add_symlink(b"names/%d" % number, b"../blobs/%d" % number)
    paths = [b"names/%d" % number for number in range(200)]
    before = await inodes_of(paths, harness.catalogue, harness.lister)
    assert harness.calls()["readlink"] == 200
    assert [harness.catalogue.path_of(inode) for inode in before.tolist()] == [
        b"blobs/%d" % number for number in range(200)
    ]
    assert (await inodes_of(paths, harness.catalogue, harness.lister)).tolist() == before.tolist()
    assert "readlink" not in harness.calls()
    harness.source.remove(b"names/7")
    harness.source.add_symlink(b"names/7", b"../blobs/199")
    harness.now += 100.0
    after = (await inodes_of(paths, harness.catalogue, harness.lister)).tolist()
    assert harness.calls()["readlink"] == 1
    assert after == [*before[:7].tolist(), before[199], *before[8:].tolist()]


async def test_links_that_cannot_be_read_lead_nowhere(harness: Harness) -> None:
    harness.source.add(b"file", b"bytes")
    harness.source.add_symlink(b"link", b"file")
    await harness.lister.complete(await harness.lister.root(), TTL_S)
    harness.source.fail_next(SourceDenied("not for you"))
    assert (await inodes_of([b"link", b"file"], harness.catalogue, harness.lister)).astype(bool).tolist() == [
        False,
        True,
    ]
