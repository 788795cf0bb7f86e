"""Control files by name, and lists of any length while what they tell of changes."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from spiderfs.core.batches import ScoreAges
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.control import texts
from spiderfs.daemon.control.channel import Act, ControlTable, Render
from spiderfs.daemon.training.job_datasets.job_datasets import JobDatasets
from spiderfs.errors import ConfigError, NotFound, StoreFull
from spiderfs.metrics import SharedCounters
from spiderfs.sources.source import SourceStat
from spiderfs.store.content import LmdbContent
from spiderfs.store.records import LmdbRecords
from spiderfs.store.store import ContentKey, Keep
from spiderfs.vfs.catalogue import TABLES, Catalogue
from spiderfs.vfs.redirects import redirect_row

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
        catalogue = self.catalogue = Catalogue(self.records)
        catalogue.record_root(SourceStat(0o40755, 0, 0, 0, 0))
        names = [(b"sample-of-some-class-%06d.jpg" % number, _file(number)) for number in range(FILES)]
        catalogue.record_listing(1, names, 0, 1.0)
        self.inodes = {entry.name: entry.inode for entry in catalogue.entries(1, 0, FILES)}
        self.job_datasets = JobDatasets()
        self.scoring: Any = SimpleNamespace(of=lambda job_dataset: job_dataset.scoring, described=self._described)
        self.cache = CacheControl(self.content, "spider", 0.5, SharedCounters(1).row(0))

    async def _described(self, job_dataset: Any, sample: int) -> list[tuple[str, str]]:
        # Another list is declared meanwhile.
        self.declare()
        await trio.lowlevel.checkpoint()
        return [("radius", "0.5")]

    def declare(self) -> None:
        number = len(list(self.job_datasets)) + 1
        inodes = np.array([*list(self.inodes.values())[1:], 0], np.uint64)
        scoring = SimpleNamespace(scores=np.arange(FILES, dtype=np.float32))
        job_dataset: Any = SimpleNamespace(
            job_dataset_id=str(number),
            number=number,
            job_id="a",
            list=SimpleNamespace(name="train", inodes=inodes, keys=range(FILES)),
            scoring=scoring,
            scoring_s=2.0,
            thinning=SimpleNamespace(left_out_share=0.25, ages=lambda: ScoreAges(0.5, 2.25), rows_scored=6200),
        )
        self.job_datasets.put(job_dataset)

    def forget_lists(self) -> None:
        for job_dataset in self.job_datasets:
            self.job_datasets.remove(job_dataset)

    def text(self, name: str) -> tuple[bytes, int]:
        """A control file, and how many bytes of memory more than the text itself it took to write it."""
        pieces: list[bytes] = []
        held = 0

        async def send(piece: bytes) -> None:
            nonlocal held
            held += len(piece)
            pieces.append(piece)

        renders: dict[str, Render] = {
            "cache": lambda: texts.cached(self.content, self.catalogue, self.cache.score),
            "redirects": lambda: texts.redirects(self.records, self.catalogue),
            "scores": lambda: texts.scores(self.job_datasets, self.scoring, self.catalogue),
            "graph": lambda: texts.graph(self.job_datasets, self.scoring),
        }
        tracemalloc.start()
        try:
            trio.run(ControlTable(renders, {}).render, name, send)
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_list_of_redirects_takes_no_memory(harness: Harness) -> None:
    inodes = list(harness.inodes.values())
    harness.records.put([redirect_row(1, inode, inodes[0]) for inode in inodes])
    text, taken = harness.text("redirects")
    first = next(iter(harness.inodes))
    assert sorted(text.splitlines()) == sorted(b"1 %s -> %s" % (name, first) for name in harness.inodes)
    assert taken < LIST_MEMORY_BYTES


@pytest.mark.slow
def test_the_list_of_scores_takes_no_memory(harness: Harness) -> None:
    harness.forget_lists()
    assert harness.text("scores")[0] == b""
    harness.declare()
    text, taken = harness.text("scores")
    names = [*list(harness.inodes)[1:], b"?"]
    assert text.splitlines() == [b"1 %g %s" % (place, name) for place, name in enumerate(names)]
    assert taken < LIST_MEMORY_BYTES


def test_the_graph_is_updated_while_lists_are_declared(harness: Harness) -> None:
    harness.forget_lists()
    harness.declare()
    harness.declare()
    text, _ = harness.text("graph")
    assert text.count(b"job dataset ") == 2
    assert (
        b"job dataset 1: job a, list train, 30000 samples\n  radius             0.5\n  rows left out      0.250" in text
    )
    assert b"  rows per second    3100  (while it scores)\n" in text
    assert len(list(harness.job_datasets)) == 4


# -- the table


async def rendered(table: ControlTable, name: str) -> list[bytes]:
    pieces: list[bytes] = []

    async def send(piece: bytes) -> None:
        pieces.append(piece)

    await table.render(name, send)
    return pieces


async def test_a_text_comes_at_once_and_a_list_in_pieces() -> None:
    async def pieces() -> AsyncGenerator[bytes]:
        for piece in (b"one ", b"two"):
            await trio.lowlevel.checkpoint()
            yield piece

    table = ControlTable({"stats": lambda: b"text", "cache": pieces}, {})
    assert await rendered(table, "stats") == [b"text"]
    assert await rendered(table, "cache") == [b"one ", b"two"]
    with pytest.raises(NotFound, match="no control file nothing"):
        await rendered(table, "nothing")


async def test_a_list_ends_with_its_reader() -> None:
    ended = []

    async def endless() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"x"
        finally:
            ended.append(True)

    async def gone(piece: bytes) -> None:
        raise trio.BrokenResourceError

    table = ControlTable({"cache": endless}, {})
    for _ in range(20):
        with pytest.raises(trio.BrokenResourceError):
            await table.render("cache", gone)
    assert len(ended) == 20


async def test_a_refusal_is_remembered_until_a_change_is_taken() -> None:
    errors: list[Exception] = []
    written: list[bytes] = []

    async def act(text: bytes) -> None:
        written.append(text)
        if errors:
            raise errors.pop()

    acts: dict[str, Act] = {"config": act, "warm": act}
    table = ControlTable({}, acts)
    with pytest.raises(ConfigError, match="stats can only be read"):
        await table.apply("stats", b"x")
    for error in (ConfigError("no such option"), StoreFull("no space left")):
        errors.append(error)
        with pytest.raises(type(error)):
            await table.apply("config", b"x")
        assert table.last_refusal == str(error)
    await table.apply("warm", b"/")
    assert table.last_refusal == "no space left"
    await table.apply("config", b"policy=lru")
    assert table.last_refusal == ""
    assert written == [b"x", b"x", b"/", b"policy=lru"]
