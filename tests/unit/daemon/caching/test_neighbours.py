"""Members of an archive that are fetched together: which they are, and what one read of the source gives each."""

from __future__ import annotations

import pickle
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from archive_files import patient_indexers, tar_of, zip_of

from benchmarks.fakes import MemorySource
from spiderfs.archives.indexer_process import Indexers
from spiderfs.archives.source import ArchiveSource
from spiderfs.core.engine import Engine
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.plans.schedule import PlannedReader
from spiderfs.core.policy import Key
from spiderfs.daemon.caching.fetch_ahead import Neighbours
from spiderfs.daemon.caching.planned_reads import Chunk
from spiderfs.errors import ArchiveFailed
from spiderfs.policies import POLICIES
from spiderfs.sources.ranges import Grids
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES, Catalogue, Node

SIZE = 1000
FILES = {b"%03d.jpg" % number: bytes([number]) * SIZE for number in range(40)}
ROOM = 1 << 20


@pytest.fixture(scope="module")
def indexers() -> Iterator[Indexers]:
    with patient_indexers() as made:
        yield made


class Harness:
    """A mount's names of one archive, and a reader whose plan is to read `order` of its members."""

    def __init__(
        self, indexers: Indexers, directory: Path, order: list[int], cached: int, archive: bytes = b"s.tar"
    ) -> None:
        self.memory = MemorySource()
        self.archive = archive
        self.memory.add(archive, tar_of(FILES) if archive.endswith(b"tar") else zip_of(FILES))
        self.source = ArchiveSource(self.memory, ["tar", "zip"], directory, ROOM, indexers)
        self.catalogue = Catalogue(MemoryRecords(TABLES))
        self.catalogue.record_root(self.source.stat(b""))
        self.catalogue.record_listing(ROOT_INODE, list(self.source.scan(b""))[1:], 0, 1e9)
        found = self.catalogue.find(ROOT_INODE, archive)
        assert stat.S_ISDIR(found.stat.mode)
        self.directory = found.inode
        self.catalogue.record_listing(found.inode, list(self.source.scan(archive))[1:], 0, 1e9)
        self.engine = Engine(POLICIES["lru"](), cached * SIZE)
        keys: list[Key] = [self.node(number).inode for number in range(len(FILES))]
        epoch = PlannedEpoch(0, keys, {key: at for at, key in enumerate(keys)}, np.array(order, np.uint32))
        self.engine.plan("trainer", "list", epoch, 0.0)
        self.reader: PlannedReader = self.engine.schedule.readers["trainer", "list"]
        self.reader.proven = True
        self.neighbours = Neighbours(self.source, Grids(), self.catalogue, self.engine)

    def node(self, number: int) -> Node:
        name = b"%03d.jpg" % number
        found = self.catalogue.find(self.directory, name)
        return Node(found.inode, self.archive + b"/" + name, found.stat)

    def chunk(
        self,
        number: int,
        near: Callable[[int], bool] = lambda inode: False,
        most_bytes: int = ROOM,
        since: int = 0,
    ) -> Chunk | None:
        return self.neighbours.chunk(self.node(number), self.reader, since, near, most_bytes)

    def numbers(self, chunk: Chunk) -> list[int]:
        return [int(node.path[-7:-4]) for node in chunk.nodes]


@pytest.mark.parametrize("archive", [b"s.tar", b"s.zip"])
def test_what_is_read_soon_comes_together(indexers: Indexers, tmp_path: Path, archive: bytes) -> None:
    harness = Harness(indexers, tmp_path, [7, 20, 6, 30, 8, *range(10, 20)], 40, archive)
    chunk = harness.chunk(7)
    assert harness.numbers(chunk) == [6, 7, 8], "no one reads 5 and 9"
    whole = harness.source.read(*chunk.read)
    # They are cut where the archive is read, in another process.
    cuts = pickle.loads(pickle.dumps(chunk.cuts))
    assert [cut(whole) for cut in cuts] == [FILES[b"%03d.jpg" % number] for number in (6, 7, 8)]


def test_who_is_not_worth_it_does_not_come_along(indexers: Indexers, tmp_path: Path) -> None:
    order = [7, *range(10, 40), 6, 8]
    harness = Harness(indexers, tmp_path, order, cached=17)
    assert harness.numbers(harness.chunk(7)) == [6, 7, 8]
    harness = Harness(indexers, tmp_path, order, cached=15)
    assert harness.chunk(7) is None, "by then others fill the cache"
    assert harness.chunk(7, since=4) is not None, "the first of them wait somewhere else"
    harness = Harness(indexers, tmp_path, [7, 6, 8], 40)
    near = {harness.node(8).inode}
    assert harness.numbers(harness.chunk(7, near.__contains__)) == [6, 7], "8 is there already"
    # In a tar each has a header, and the first one's bytes are filled up to 512.
    assert harness.chunk(7, most_bytes=2 * SIZE + 1047) is None
    assert harness.numbers(harness.chunk(7, most_bytes=2 * SIZE + 1048)) == [7, 8]
    harness.reader.exchanges = True
    assert harness.chunk(7) is None


def test_by_a_plan_that_is_not_proven_hardly_anything_comes_along(indexers: Indexers, tmp_path: Path) -> None:
    harness = Harness(indexers, tmp_path, [7, *range(10, 40), *range(10, 40), 0, 1, 6, 8], 1000)
    assert harness.numbers(harness.chunk(7)) == [6, 7, 8]
    harness.reader.proven = False
    assert harness.numbers(harness.chunk(7)) == [6, 7], "8 is the 64th"


def test_no_one_gets_the_bytes_of_another_member(indexers: Indexers, tmp_path: Path) -> None:
    """The archive was replaced by one of the same size and time."""
    harness = Harness(indexers, tmp_path, [7, 6, 8], 40)
    chunk = harness.chunk(7)
    version = harness.memory.stat(b"s.tar").version
    harness.memory.add(b"s.tar", tar_of(dict(reversed(FILES.items()))), mtime_ns=version.mtime_ns)
    whole = harness.source.read(*chunk.read)
    for cut in chunk.cuts:
        with pytest.raises(ArchiveFailed, match="other bytes"):
            cut(whole)
