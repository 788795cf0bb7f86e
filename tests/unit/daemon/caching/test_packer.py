"""The packer against a directory: what is packed, when it is loaded, and that nothing of it goes wrong for a reader."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.fakes import MemoryContent
from spiderfs.core.events import FETCHED, HIT, Access
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.packer import Packer
from spiderfs.metrics import SharedCounters
from spiderfs.packages import DIRECTORY, PackageDirectory, own_prefix, pack, read_index
from spiderfs.policies import impact
from spiderfs.policies.impact import Impact
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.local import LocalSource
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.store.store import ContentKey
from spiderfs.vfs.catalogue import TABLES, Catalogue
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.fetcher import Episode, Fetcher
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.on_demand import Supply
from spiderfs.views.tree import Forms, TreeSource

SAMPLES, SIZE = 40, 100
# The first half is easy, and so packed: ten in a package.
EASY = range(SAMPLES // 2)
PACKAGE = 10 * SIZE


class Source(LocalSource):
    reads: list[bytes]

    def read(self, path: bytes, *others: object) -> bytes:
        self.reads.append(path)
        return super().read(path, *others)  # type: ignore[arg-type]


class Harness:
    """Twenty of forty samples fit, of which half are for easy ones."""

    def __init__(self, root: Path) -> None:
        self.root = root / "source"
        (self.root / "train").mkdir(parents=True, exist_ok=True)
        for number in range(SAMPLES):
            path = self.root / f"train/{number:03d}"
            if not path.exists():
                path.write_bytes(b"%03d" % number + bytes(SIZE - 3))
        self.source = Source(os.fspath(self.root))
        self.source.reads = []
        self.counters = SharedCounters(1)
        row = self.counters.row(0)
        self.client = SourceClient(
            TreeSource(self.source, Forms(), (DIRECTORY,)),
            SourceLimits(attempts=1),
            rng=random.Random(1),
            on_event=lambda event: None,
        )
        records, self.content = MemoryRecords(TABLES), MemoryContent()
        self.catalogue = Catalogue(records)
        self.cache = CacheControl(self.content, "impact", 0.5, row)
        self.cache.restore(20 * SIZE, None)
        self.lock = FetchLock(root / "lock")
        fetcher = Fetcher(self.client, self.content, self.lock, Episode(root / "full"), row)
        self.packer = Packer(
            self.cache,
            Supply(
                self.content, records, self.client, self.catalogue, Lister(self.catalogue, self.client), fetcher, row
            ),
            self.source,
            PackageDirectory(self.source.root_fd, root / "key"),
            PACKAGE,
            random.Random(2),
        )

    @property
    def policy(self) -> Impact:
        return self.cache.engine.policy

    @property
    def packages(self) -> list[Path]:
        directory = self.root / os.fsdecode(DIRECTORY)
        return sorted(directory.iterdir()) if directory.exists() else []

    def count(self, name: str) -> int:
        return self.counters.totals()[name]

    async def learn(self) -> None:
        """Names, classes, losses, and the list that follows."""
        lister = Lister(self.catalogue, self.client)
        await lister.complete(await lister.directory(b""), ttl_s=60.0)
        await lister.complete(await lister.directory(b"train"), ttl_s=60.0)
        self.policy.listed("train", dict.fromkeys(map(self.inode, range(SAMPLES)), 0))
        for number in range(SAMPLES):
            self.score(number, 1.0 + number)
        self.policy.new_epoch("train")

    def score(self, number: int, loss: float) -> None:
        """As `PolicyFeed` tells a score, where one job dataset alone has some."""
        self.policy.scored(self.inode(number), loss)
        self.policy.scored_by("train", self.inode(number), loss)

    def inode(self, number: int) -> int:
        directory = self.catalogue.directory_inode(b"train")
        return self.catalogue.find(directory, b"%03d" % number).inode

    def read(self, *numbers: int) -> None:
        """As a reader does it: what is missing is fetched."""
        for number in numbers:
            inode = self.inode(number)
            here = self.content.has(ContentKey(inode))
            if not here:
                self.content.land(ContentKey(inode), (self.root / f"train/{number:03d}").read_bytes())
            self.cache.fold(_events(inode, HIT if here else FETCHED))

    def read_and_collect(self, *numbers: int) -> None:
        for number in numbers:
            self.read(number)
            self.packer._collect(self.policy)

    async def pack(self) -> None:
        assert self.packer._collected_bytes >= PACKAGE
        await self.packer._write()

    async def load(self) -> bool:
        package = self.packer._best(self.policy)
        if package is not None:
            await self.packer._load(self.policy, package)
        return package is not None

    async def repack(self) -> None:
        self.packer._follow_list(self.policy)
        while self.packer._to_repack:
            await self.packer._repack(self.policy, self.packer._to_repack.pop())

    def cached(self) -> list[int]:
        return [number for number in range(SAMPLES) if self.inode(number) in self.cache.engine.members]


def _events(inode: int, where: int) -> list[Access]:
    return [Access(1.0, inode, inode, SIZE, 0, 1, 0, where)]


@pytest.fixture(autouse=True)
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impact, "FIRST_HIGH_READS", 1e9)
    monkeypatch.setattr(impact, "FIRST_LOW_READS", 1e9)


@contextmanager
def made(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.lock.close()
    harness.source.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with made(tmp_path) as harness:
        yield harness


async def with_a_package_of_an_earlier_mount(tmp_path: Path) -> None:
    with made(tmp_path) as earlier:
        await with_a_package(earlier)


async def with_a_package(harness: Harness) -> None:
    """Ten easy samples are packed, none of which is cached; ten others are, and were read in this epoch."""
    await harness.learn()
    harness.read_and_collect(*range(10))
    await harness.pack()
    assert len(harness.packages) == 1
    harness.cache.evict(ContentKey(harness.inode(number)) for number in range(10))
    harness.policy.new_epoch("train")
    harness.read(*range(10, 20))


async def test_what_is_missed_is_packed_without_reading_it_again(harness: Harness) -> None:
    await harness.learn()
    harness.source.reads.clear()
    harness.read_and_collect(*range(9), 30)
    assert harness.packer._collected_bytes == 9 * SIZE, "of the easy ones alone"
    harness.policy.substituted("train", harness.inode(1), harness.inode(12))
    harness.packer._collect(harness.policy)
    assert harness.packer._collected_bytes == 9 * SIZE, "it was replaced, not read"
    harness.read_and_collect(9)
    await harness.pack()
    assert harness.source.reads == []
    assert harness.count("packages_written") == 1
    assert [package.suffix for package in harness.packages] == [".package"]
    # What is missed again is in a package already.
    harness.policy.new_epoch("train")
    harness.cache.evict(ContentKey(harness.inode(number)) for number in range(10))
    harness.read_and_collect(*range(10))
    assert harness.packer._collected_bytes == 0


async def test_one_read_fetches_fresh_samples_with_their_bytes(harness: Harness) -> None:
    await with_a_package(harness)
    harness.source.reads.clear()
    before = harness.count("origin_bytes")
    assert await harness.load()
    (read,) = harness.source.reads
    assert read.startswith(DIRECTORY)
    assert harness.count("origin_bytes") - before == harness.packages[0].stat().st_size
    fresh = [number for number in harness.cached() if number < 10]
    assert len(fresh) >= 5
    assert harness.count("packaged_samples") == len(fresh)
    for number in fresh:
        assert harness.content.read(ContentKey(harness.inode(number))) == b"%03d" % number + bytes(SIZE - 3)
    assert not await harness.load(), "there is nothing more to win"
    # They stand in for others, as long as no one has read them.
    first, *others = map(harness.inode, fresh)
    harness.cache.evict([ContentKey(first)])
    assert harness.policy.substitute_for("train", first) in others


@pytest.mark.parametrize("place", [40, -5])
async def test_a_damaged_package_is_removed_and_said(
    harness: Harness, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    await with_a_package(harness)
    (path,) = harness.packages
    before, damaged = path.stat(), bytearray(path.read_bytes())
    damaged[place] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert await harness.load()
    assert harness.packages == []
    assert harness.count("packages_removed") == 1
    assert not await harness.load()
    assert len(caplog.records) == 1
    assert "is removed" in caplog.text


async def test_packages_are_found_again_and_damaged_ones_go(
    harness: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await with_a_package_of_an_earlier_mount(tmp_path)

    damaged = harness.packages[0].with_name(harness.packages[0].name.replace("-", "-0"))
    damaged.write_bytes(b"not one")
    damaged.chmod(0o600)
    await harness.learn()
    await harness.packer._find()
    assert len(harness.packages) == 1
    harness.read(*range(10, 20))
    harness.source.reads.clear()
    assert await harness.load()
    assert len(harness.source.reads) == 1
    assert {number for number in harness.cached() if number < 10}
    assert len(caplog.records) == 1


async def test_what_others_have_made_is_ignored_and_counted(
    harness: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await with_a_package_of_an_earlier_mount(tmp_path)

    (ours,) = harness.packages
    path, version, payload = b"train/001", harness.source.stat(b"train/001").version, bytes(SIZE)
    name, forged = pack([(path, version, payload)], bytes(32))
    # By another key; by another key under a name of ours; and one of ours to which others may write.
    (ours.parent / os.fsdecode(name)).write_bytes(forged)
    prefix = own_prefix(harness.packer._directory.key)
    (ours.parent / os.fsdecode(prefix + b"0" * 32 + b".package")).write_bytes(forged)
    opened = ours.parent / os.fsdecode(prefix + b"1" * 32 + b".package")
    opened.write_bytes(ours.read_bytes())
    opened.chmod(0o666)
    await harness.learn()
    await harness.packer._find()
    assert list(harness.packer._packages) == [os.fsencode(ours.name)]
    assert harness.count("packages_ignored") == 2
    # That one can only be one of ours that is damaged.
    assert harness.count("packages_removed") == 1
    assert len(harness.packages) == 3
    harness.packer._packages.clear()
    ours.parent.chmod(0o777)
    await harness.packer._find()
    assert list(harness.packer._packages) == []
    assert harness.count("packages_ignored") == 3
    assert [("not made by this mount" in text, "is removed" in text) for text in caplog.messages] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("hard", [2, 4, 10])
async def test_with_a_new_list_what_still_ranks_low_is_packed_again(harness: Harness, hard: int) -> None:
    await with_a_package(harness)
    (before,) = harness.packages
    await harness.repack()
    for number in range(hard):
        harness.score(number, 100.0 + number)
        harness.score(SAMPLES - 1 - number, 0.1)
    await harness.repack()
    assert harness.packages == [before], "there is no new list yet"
    harness.policy.new_epoch("train")
    await harness.repack()
    if hard == 2:
        assert harness.packages == [before], "most of it still ranks low"
        return
    assert harness.packages == []
    assert sorted(harness.packer._collected) == sorted(map(harness.inode, range(hard, 10)))
    # Samples that were missed fill the new package.
    harness.policy.missed_ids.clear()
    harness.read_and_collect(*range(SAMPLES - hard, SAMPLES))
    await harness.pack()
    (package,) = harness.packer._packages.values()
    assert set(package.inodes) == {*map(harness.inode, [*range(hard, 10), *range(SAMPLES - hard, SAMPLES)])}
    (path,) = harness.packages
    index = read_index(path.read_bytes(), path.stat().st_size, harness.packer._directory.key)
    for file in index.files:
        assert index.payload(file, path.read_bytes()) == (harness.root / os.fsdecode(file.path)).read_bytes()


async def test_first_packages_are_of_random_cached_samples_that_rank_low(harness: Harness) -> None:
    await harness.learn()
    harness.read(*range(5, 25))
    harness.policy.missed_ids.clear()
    harness.source.reads.clear()
    harness.packer._follow_list(harness.policy)
    harness.packer._collect(harness.policy)
    await harness.pack()
    (package,) = harness.packer._packages.values()
    numbers = [number for number in range(SAMPLES) if harness.inode(number) in package.inodes]
    assert len(numbers) == 10
    assert set(numbers) < set(range(5, 20))
    assert numbers != list(range(5, 15)), "at random"
    assert harness.source.reads == []
