"""What control files say, of lists of any length and while what they tell of changes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.control.table import ControlTable
from spiderfs.daemon.training.lists_in_memory import ListsInMemory
from spiderfs.errors import NotFound
from spiderfs.metrics import SharedCounters
from spiderfs.shared.redirect_table import redirect_row
from spiderfs.sources.source import SourceStat
from spiderfs.store.content import LmdbContent
from spiderfs.store.records import LmdbRecords
from spiderfs.store.store import ContentKey, Keep
from spiderfs.vfs.catalogue import TABLES, Catalogue

# Their lists are some 3 MB.
FILES = 30_000
LIST_MEMORY_BYTES = 2 << 20


class Harness:
    """A manager's store with many files, of which each is a sample of one list."""

    def __init__(self, directory: Path) -> None:
        for name in ("names", "content"):
            (directory / name).mkdir()
        self.records = LmdbRecords(directory / "names", TABLES)
        self.content = LmdbContent(directory / "content")
        self.content.set_capacity(1 << 30)
        catalogue = Catalogue(self.records)
        catalogue.record_root(SourceStat(0o40755, 0, 0, 0, 0))
        names = [(b"sample-of-some-class-%06d.jpg" % number, _file(number)) for number in range(FILES)]
        catalogue.record_listing(1, names, 0, 1.0)
        self.inodes = {entry.name: entry.inode for entry in catalogue.entries(1, 0, FILES)}
        self.lists = ListsInMemory()
        scoring = SimpleNamespace(of=lambda dataset: dataset.scoring, described=self._described)
        self.manager: Any = SimpleNamespace(
            content=self.content,
            records=self.records,
            catalogue=catalogue,
            cache=CacheControl(self.content, "spider", 0.5, SharedCounters(1).row(0)),
            training=SimpleNamespace(lists=self.lists, scoring=scoring),
        )

    async def _described(self, dataset: Any, sample: int) -> list[tuple[str, str]]:
        # Another list is declared meanwhile.
        self.declare()
        await trio.lowlevel.checkpoint()
        return [("radius", "0.5")]

    def declare(self) -> None:
        number = len(list(self.lists)) + 1
        inodes = np.array([*list(self.inodes.values())[1:], 0], np.uint64)
        scoring = SimpleNamespace(scores=np.arange(FILES, dtype=np.float32))
        self.lists.put(
            SimpleNamespace(
                digest=str(number),
                number=number,
                name="train",
                labels=inodes,
                inodes=inodes,
                scoring=scoring,
                scoring_s=0.0,
                scorings_made=0,
                rows_scored=0,
                rows_left_out=0,
            )
        )

    def forget_lists(self) -> None:
        for dataset in self.lists:
            self.lists.remove(dataset)

    def text(self, name: str) -> tuple[bytes, int]:
        """A control file, and how many bytes of memory more than the text itself it took to write it."""
        pieces: list[bytes] = []
        held = 0

        async def send(piece: bytes) -> None:
            nonlocal held
            held += len(piece)
            pieces.append(piece)

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                await ControlTable(self.manager, nursery).render(name, send)

        tracemalloc.start()
        try:
            trio.run(main)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return b"".join(pieces), peak - held


def _file(number: int) -> SourceStat:
    return SourceStat(0o100644, 0, 0, number % 90, number)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    harness = Harness(tmp_path_factory.mktemp("store"))
    yield harness
    harness.records.close()
    harness.content.close()


def test_the_list_of_what_is_cached_takes_no_memory(harness: Harness) -> None:
    keys = [ContentKey(inode) for inode in harness.inodes.values()]
    harness.content.land_all([(key, b"x") for key in keys])
    harness.content.land(ContentKey(keys[0].inode, 2), bytes(5))
    harness.content.apply((), [Keep(key, "importance", 1.5) for key in keys[:10]])
    text, taken = harness.text("cache")
    lines = text.splitlines()
    assert len(lines) == FILES + 1
    assert {line.split()[-1] for line in lines} == set(harness.inodes) | {b"2"}
    assert sum(line.startswith(b"importance              1 ") for line in lines) == 10
    assert any(line.endswith(b".jpg block 2") and line.split()[1] == b"5" for line in lines)
    assert taken < LIST_MEMORY_BYTES


def test_the_list_of_redirects_takes_no_memory(harness: Harness) -> None:
    inodes = list(harness.inodes.values())
    harness.records.put([redirect_row(1, inode, inodes[0]) for inode in inodes])
    text, taken = harness.text("redirects")
    first = next(iter(harness.inodes))
    assert sorted(text.splitlines()) == sorted(b"1 %s -> %s" % (name, first) for name in harness.inodes)
    assert taken < LIST_MEMORY_BYTES


def test_the_list_of_scores_takes_no_memory(harness: Harness) -> None:
    harness.forget_lists()
    assert harness.text("scores")[0] == b""
    harness.declare()
    text, taken = harness.text("scores")
    names = [*list(harness.inodes)[1:], b"?"]
    assert text.splitlines() == [b"1 %g %s" % (place, name) for place, name in enumerate(names)]
    assert taken < LIST_MEMORY_BYTES


def test_the_graph_is_told_while_lists_are_declared(harness: Harness) -> None:
    harness.forget_lists()
    harness.declare()
    harness.declare()
    text, _ = harness.text("graph")
    assert text.count(b"dataset ") == 2
    assert len(list(harness.lists)) == 4


def test_what_is_no_control_file_is_not_found(harness: Harness) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        harness.text("nothing")
    assert caught.group_contains(NotFound)
