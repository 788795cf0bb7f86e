"""Fetching ahead, on a clock that jumps: what is prefetched, in which order, and what is left alone."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from benchmarks.fakes import MemoryContent, MemorySource
from spiderfs.core.events import FETCHED, HIT, REFUSED, Access
from spiderfs.core.homes import Homes
from spiderfs.core.plans.exchange import SharedList
from spiderfs.core.plans.fetch_limits import AHEAD_SHARE, Concurrency
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.plans.schedule import UNPROVEN_SAMPLES, PlannedReader
from spiderfs.core.policy import Key
from spiderfs.core.rooms import LANDING_SHARE
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.prefetch_backend import Admission, Done, PrefetchResult, Wakeup
from spiderfs.daemon.caching.prefetcher import Prefetcher
from spiderfs.errors import SourceUnavailable, StoreError, StoreFull
from spiderfs.metrics import SharedCounters
from spiderfs.options.model import Options
from spiderfs.sources.client import Patience, SourceClient, SourceLimits
from spiderfs.sources.source import Delivery, Version
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.store.store import LANDING, ContentKey
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES, Catalogue, Node
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.fetcher import Episode, Fetcher
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.on_demand import Supply

pytestmark = pytest.mark.usefixtures("jumping_clock")

SIZE, LARGE = 1000, 50_000
TRAINER = 7
LIMITS = SourceLimits(attempts=1, backoff_s=0.0, max_backoff_s=0.0)


class Source(MemorySource):
    """Remembers in which order files were read, and refuses some."""

    def __init__(self) -> None:
        super().__init__()
        self.read_paths: list[bytes] = []
        self.broken: set[bytes] = set()

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        self.read_paths.append(path)
        if path in self.broken:
            raise SourceUnavailable("broken")
        return super().read(path, offset, length, version)


class Client(SourceClient):
    """Takes its time on trio's clock and asks in place, for that clock would jump while threads run."""

    latency_s = 0.01
    down = False

    async def read(
        self,
        path: bytes,
        offset: int,
        length: int,
        version: Version,
        delivery: Delivery | None = None,
        patience: Patience | None = None,
    ) -> bytes:
        await trio.sleep(self.latency_s)
        return self.source.read(path, offset, length, version)

    @property
    def reachable(self) -> bool:
        return not self.down


class Content(MemoryContent):
    """May be full, and counts what landed."""

    full = refuses = False

    def __init__(self) -> None:
        super().__init__()
        self.landed: Counter[int] = Counter()

    def land(self, key: ContentKey, payload: bytes) -> bool:
        if self.full:
            raise StoreFull("no space left for the cache")
        landed = not self.refuses and super().land(key, payload)
        self.landed[key.inode] += landed
        return landed


class Records(MemoryRecords):
    """May fail."""

    failing = False

    def get(self, table: str, key: bytes) -> bytes | None:
        if self.failing:
            raise StoreError("the disk does not answer")
        return super().get(table, key)


class InPlace:
    """In place of threads: the jumping clock would run away while one works."""

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*args)


class Elsewhere(Fetcher):
    """Knows of files that other processes are fetching."""

    others: frozenset[int] = frozenset()

    def under_way(self, key: ContentKey) -> bool:
        return key.inode in self.others or super().under_way(key)


def events(time_s: float, inode: int, size: int, where: int, trainer: int) -> list[Access]:
    """What a worker tells of one open."""
    return [Access(time_s, inode, inode, size, 0, 1, trainer, where)]


class Harness:
    def __init__(self, directory: Path, sizes: Iterable[int], cached: int, policy: str, most_fetches: int) -> None:
        self.read_by: dict[int, int] = {}
        self.source = Source()
        self.sizes = list(sizes)
        for number, size in enumerate(self.sizes):
            self.source.add(b"%05d" % number, bytes(size))
        self.content = Content()
        self.counters = SharedCounters(1)
        row = self.counters.row(0)
        self.client = Client(self.source, LIMITS, rng=random.Random(1), on_event=lambda event: None)
        self.records = Records(TABLES)
        catalogue = Catalogue(self.records)
        catalogue.record_root(self.source.stat(b""))
        catalogue.record_listing(ROOT_INODE, list(self.source.scan(b""))[1:], 0, time.time())
        self.catalogue = catalogue
        self.inodes = [self._inode(number) for number in range(len(self.sizes))]
        self.number_of = {inode: number for number, inode in enumerate(self.inodes)}
        self.interlock = FetchLock(directory / "fetch.lock")
        self.fetcher = Elsewhere(self.client, self.content, self.interlock, Episode(directory / "full-disk"), row)
        self.fetcher._landing._thread = InPlace()  # type: ignore[assignment]
        self.cache = CacheControl(self.content, policy, 0.5, row)
        # The engine leaves 5 % of the capacity to landing, or room for four files.
        self.cache.restore(max(-(-cached * SIZE * 20 // 19), (cached + 4) * SIZE if cached else 0), None)
        self.cache.fold(events(0, 1, SIZE, REFUSED, 0))
        self.substitutes: set[int] = set()
        self.wakeup = Wakeup()
        options = Options(
            source=directory,
            mountpoint=directory,
            cache_dir=directory,
            sample_max_bytes=LARGE - 1,
            fetches=most_fetches,
            substitute_when="miss",
        )
        self.told: list[tuple[int, int]] = []
        self.prefetcher = Prefetcher(
            self.cache,
            Supply(
                self.content, self.records, self.client, catalogue, Lister(catalogue, self.client), self.fetcher, row
            ),
            options,
            self.wakeup,
            lambda: self.client.reachable,
            self.substitutes.__contains__,
            lambda trainer, size: self.told.append((trainer, size)),
        )

    def _inode(self, number: int) -> int:
        return self.catalogue.find(ROOT_INODE, b"%05d" % number).inode

    def plan(
        self,
        order: Iterable[int],
        trainer: int = TRAINER,
        epoch: int = 0,
        begun: bool = True,
        proven: bool = True,
    ) -> None:
        place_of: dict[Key, int] = {inode: place for place, inode in enumerate(self.inodes) if inode}
        made = PlannedEpoch(epoch, self.inodes, place_of, np.array(list(order), np.uint32))
        self.cache.engine.plan(trainer, "train", made, trio.current_time(), begun)
        self.reader(trainer).proven |= proven
        if begun:
            self.read_by[trainer] = 0
        self.wakeup.ring()

    def share(self) -> SharedList:
        """Let two trainers read all files, in the order of the list, and exchange them."""
        order, engine = range(len(self.inodes)), self.cache.engine
        place_of: dict[Key, int] = {inode: place for place, inode in enumerate(self.inodes)}
        shared = SharedList(self.inodes, place_of, random.Random(1).random, engine.exchange_pending.changed)
        engine.share("list", shared)
        for trainer in (TRAINER, TRAINER + 1):
            self.plan(order, trainer)
            self.reader(trainer).exchanges = True
            shared.begin((trainer, "train"), str(trainer), np.array(order))
        engine.rerank()
        self.wakeup.ring()
        return shared

    def _progressed(self, trainer: int, dispatched: int, taken: int) -> None:
        number = self.reader(trainer).epoch.number
        self.cache.engine.progressed(trainer, "train", number, dispatched, taken, trio.current_time())
        self.read_by[trainer] = dispatched

    def reader(self, trainer: int = TRAINER) -> PlannedReader:
        return self.cache.engine.schedule.readers[trainer, "train"]

    def has_pace(self, trainer: int, pace_s: float) -> None:
        reader = self.reader(trainer)
        reader.pace_s = pace_s
        reader.anchor(trio.current_time())

    async def read(self, number: int, trainer: int = TRAINER) -> bool:
        """Open a file as a worker does for a trainer, whose loader has one in hand; whether it was there."""
        if trainer in self.read_by:
            self._progressed(trainer, self.read_by[trainer] + 1, self.read_by[trainer])
        inode, size, where = self.inodes[number], self.sizes[number], HIT
        if not self.fetcher.stored(ContentKey(inode)):
            _, where = await self.fetcher.fetch(self.catalogue.node(inode))
        self.cache.fold(events(trio.current_time(), inode, size, where, trainer))
        self.wakeup.ring()
        return where == HIT

    @property
    def fetched(self) -> list[int]:
        """The files in the order in which the source was asked for them."""
        return [int(path) for path in self.source.read_paths]

    @property
    def kept(self) -> set[int]:
        return {self.number_of[member.key.inode] for member in self.content.members() if member.section != LANDING}

    def counted(self, name: str) -> int:
        return self.counters.totals()[name]


@asynccontextmanager
async def running(
    directory: Path,
    *,
    files: int = 100,
    sizes: Iterable[int] | None = None,
    cached: int = 6000,
    policy: str = "minio",
    most_fetches: int = 16,
) -> AsyncIterator[Harness]:
    harness = Harness(directory, sizes or [SIZE] * files, cached, policy, most_fetches)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(harness.prefetcher.run)
            yield harness
            nursery.cancel_scope.cancel()
    finally:
        harness.interlock.close()


@pytest.fixture
def harness(tmp_path: Path) -> AbstractAsyncContextManager[Harness]:
    return running(tmp_path)


async def test_what_is_planned_is_prefetched_in_its_order(tmp_path: Path) -> None:
    order = random.Random(1).sample(range(100), 100)
    async with running(tmp_path, most_fetches=1) as harness:
        await trio.sleep(5)
        assert harness.fetched == []
        harness.plan(order)
        await trio.sleep(5)
    assert harness.fetched == order
    assert harness.kept == set(order)
    assert harness.counted("prefetched") == 100
    assert set(harness.content.landed.values()) == {1}


async def test_what_cannot_be_fetched_ahead_is_no_sample_that_is_coming(tmp_path: Path) -> None:
    async with running(tmp_path, sizes=[LARGE, LARGE, SIZE]) as harness:
        shared = harness.share()
        await trio.sleep(5)
        assert harness.fetched == [2]
        assert shared.ask((TRAINER, "train"), [1]) == [2]


class Pushes:
    """A way that takes everything, as that of an immutable mount does, and remembers what it was given."""

    able, looks_again, under_way = True, False, 0

    def __init__(self) -> None:
        self.concurrency = Concurrency(8)
        self.prefetched: list[int] = []

    def start(self, nursery: trio.Nursery) -> None:
        pass

    def look(self, readers: tuple[PlannedReader, ...], again: bool, idle: bool) -> None:
        pass

    def window(self, reader: PlannedReader) -> int:
        return 8

    def has_room(self) -> bool:
        return True

    def is_resident(self, inode: int) -> bool:
        return False

    def judge(self, node: Node) -> Admission:
        return Admission.PREFETCH

    def prefetch(self, node: Node, reader: PlannedReader, position: int, done: Done) -> None:
        self.prefetched.append(node.inode)
        assert len(self.prefetched) < 100
        done(node, reader, PrefetchResult(FETCHED, node.stat.size, 0.01))

    def send(self) -> None:
        pass


async def test_pending_samples_of_jobs_are_fetched_into_the_store_where_plans_are_pushed_too(tmp_path: Path) -> None:
    async with running(tmp_path, files=40, cached=10) as harness:
        pushes = Pushes()
        harness.prefetcher._push = pushes  # type: ignore[assignment]
        harness.share()
        await trio.sleep(5)
        # What the store would not keep is not fetched: it was, again and again, when it was pushed.
        assert pushes.prefetched == []
        assert 0 < len(harness.fetched) <= 10
        assert len(set(harness.fetched)) == len(harness.fetched)
        assert harness.kept == set(harness.fetched)


async def test_a_followed_plan_makes_opens_hits_and_costs_each_file_once(tmp_path: Path) -> None:
    hits: list[bool] = []
    # A fetch takes twice as long as the reader does between two opens, and a tenth is cached.
    async with running(tmp_path, files=2000, cached=200) as harness:
        harness.plan(range(2000))
        for number in range(2000):
            hits.append(await harness.read(number))
            await trio.sleep(0.005)
        await trio.sleep(5)
    assert sum(hits) > 0.98 * len(hits)
    assert sorted(harness.fetched) == list(range(2000))
    assert harness.counted("planned_opens") == 2000
    assert harness.counted("planned_late") == len(hits) - sum(hits)


async def test_a_small_cache_is_not_fetched_for_in_vain(tmp_path: Path) -> None:
    # Only the first ones may be more than there is room for: how large files are is known from those that came.
    async with running(tmp_path, files=200, cached=10) as harness:
        harness.plan(range(200))
        await trio.sleep(10)
        assert {0, 1} <= harness.kept
        hits = 0
        for number in range(200):
            hits += await harness.read(number)
            await trio.sleep(0.05)
        assert hits == 200
    assert len(harness.fetched) <= 200 + 16


async def test_no_more_is_fetched_at_a_time_than_has_room_to_land(tmp_path: Path) -> None:
    async with running(tmp_path, files=400, cached=20, most_fetches=64) as harness:
        harness.prefetcher._fetch.concurrency.limit = 64
        # The cache is full of what is needed late, so that only landing has room.
        for number in range(380, 400):
            await harness.read(number, trainer=0)
        harness.plan(range(400))
        for first in range(0, 320, 16):
            # The loader takes 16 samples in hand at once, and reads them one after the other.
            harness._progressed(TRAINER, first + 16, first)
            harness.wakeup.ring()
            await trio.sleep(0.2)
            in_hand = range(first, first + 16)
            assert set(in_hand) <= harness.kept, "what is pushed out of landing was fetched in vain"
            for number in in_hand:
                harness.cache.fold(events(trio.current_time(), harness.inodes[number], SIZE, HIT, TRAINER))


async def test_no_further_ahead_than_the_window(tmp_path: Path) -> None:
    async with running(tmp_path, files=5000, cached=4000) as harness:
        harness.plan(range(5000))
        harness.has_pace(TRAINER, 0.01)
        await trio.sleep(3)
        window = harness.prefetcher.status()["plans"][0]["window_samples"]
        assert window < 500
        assert len(harness.fetched) <= window
        assert harness.prefetcher.ready_ahead(harness.reader()) == len(harness.fetched)
        for number in range(50):
            await harness.read(number)
        await trio.sleep(3)
        # It shrinks while nothing comes late.
        assert harness.prefetcher.status()["plans"][0]["window_samples"] <= window
        assert max(harness.fetched) < 50 + window


async def test_the_window_takes_no_more_room_beside_peers_than_landing_leaves_it(tmp_path: Path) -> None:
    async with running(tmp_path, files=5000, cached=4000) as harness:
        harness.plan(range(5000))
        harness.has_pace(TRAINER, 0.00001)
        await trio.sleep(3)
        cache, engine = harness.cache, harness.cache.engine
        engine.homes = Homes({"here": 1.0, "there": 1.0}, "here")
        cache.expect(1_000_000)
        assert engine.budget_bytes >= (1 - LANDING_SHARE + AHEAD_SHARE) * cache.status()["capacity_bytes"]
        engine.resize(engine.used_bytes, 0)
        assert harness.prefetcher.status()["plans"][0]["window_samples"] <= AHEAD_SHARE * len(engine.members)


async def test_the_sooner_deadline_goes_first_whoever_has_it(tmp_path: Path) -> None:
    async with running(tmp_path, files=2000, cached=6000, most_fetches=1) as harness:
        harness.client.down = True
        harness.plan(range(1000), trainer=1)
        harness.plan(range(1999, 999, -1), trainer=2)
        harness.has_pace(1, 0.01)
        harness.has_pace(2, 0.1)
        harness.client.down = False
        await trio.sleep(5)
    first = harness.fetched[:110]
    assert [number for number in first if number < 1000] == list(range(100))
    assert [number for number in first if number >= 1000] == list(range(1999, 1989, -1))


async def test_the_next_epoch_is_prefetched_before_it_begins(tmp_path: Path) -> None:
    async with running(tmp_path, files=200, cached=50) as harness:
        harness.plan(range(100))
        harness.plan(range(100, 200), epoch=1, begun=False)
        for number in range(100):
            await harness.read(number)
            await trio.sleep(0.02)
        await trio.sleep(2)
        harness.cache.engine.end_epoch(TRAINER, 0)
        assert {100, 101, 102} <= harness.kept
        harness.plan(range(100, 200), epoch=1)
        hits = [await harness.read(number) for number in range(100, 110)]
        assert all(hits)
    assert max(Counter(harness.fetched).values()) == 1


# -- what does not come


async def test_a_file_that_fails_is_left_alone_and_tried_again_later(harness: Harness) -> None:
    harness.source.broken = {b"00003"}
    harness.plan(range(20))
    await trio.sleep(9)
    assert harness.kept == set(range(20)) - {3}
    assert harness.fetched.count(3) == 1
    await trio.sleep(10)
    assert harness.fetched.count(3) == 2
    harness.source.broken.clear()
    await trio.sleep(11)
    assert harness.kept == set(range(20))
    assert harness.counted("prefetched") == 20


async def test_an_unreachable_source_is_not_asked(harness: Harness) -> None:
    harness.client.down = True
    harness.plan(range(20))
    await trio.sleep(60)
    assert harness.fetched == []
    harness.client.down = False
    await trio.sleep(1)
    assert harness.kept == set(range(20))


async def test_a_plan_that_is_not_followed_is_not_fetched_for(tmp_path: Path) -> None:
    async with running(tmp_path, files=1500, cached=50) as harness:
        rng = random.Random(2)
        harness.plan(rng.sample(range(1500), 1500))
        for number in rng.sample(range(1500), 400):
            await harness.read(number)
        await trio.sleep(1)
        assert not harness.cache.engine.schedule.active
        before = len(harness.fetched)
        await trio.sleep(60)
        assert len(harness.fetched) == before


async def test_before_anyone_has_followed_it_a_plan_costs_a_few_fetches(harness: Harness) -> None:
    harness.plan(range(100), proven=False)
    await trio.sleep(60)
    assert sorted(harness.fetched) == [*range(UNPROVEN_SAMPLES)]


async def test_names_that_cannot_be_read_are_asked_for_again(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.records.failing = True
    harness.plan(range(20))
    await trio.sleep(5)
    assert harness.fetched == []
    harness.records.failing = False
    await trio.sleep(2)
    assert harness.kept == set(range(20))
    # Once a second, and not in a loop.
    assert 1 <= caplog.text.count("nothing is fetched ahead for a moment") <= 6


async def test_large_empty_and_unknown_files_are_left_to_their_readers(tmp_path: Path) -> None:
    sizes = [SIZE] * 20
    sizes[4], sizes[7] = 0, LARGE
    async with running(tmp_path, sizes=sizes) as harness:
        harness.inodes[2], harness.inodes[3] = 0, 999
        harness.plan(range(20))
        await trio.sleep(5)
    assert sorted(harness.fetched) == [number for number in range(20) if number not in (2, 3, 4, 7)]


async def test_what_is_here_or_on_its_way_is_not_fetched_again(harness: Harness) -> None:
    for number in range(5):
        await harness.read(number, trainer=0)
    harness.content.land(ContentKey(harness.inodes[5]), bytes(SIZE))
    harness.fetcher.others = frozenset({harness.inodes[6]})
    harness.substitutes.add(harness.inodes[7])
    harness.plan(range(10))
    await trio.sleep(5)
    assert sorted(harness.fetched) == [*range(5), 8, 9]
    # It may die, and its lock with it.
    harness.fetcher.others = frozenset()
    await trio.sleep(1)
    assert 6 in harness.kept


async def test_what_another_process_has_fetched_meanwhile_counts_there(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = FetchLock.try_hold

    def landed_meanwhile(lock: FetchLock, key: ContentKey) -> bool:
        harness.content.land(key, bytes(SIZE))
        return hold(lock, key)

    monkeypatch.setattr(FetchLock, "try_hold", landed_meanwhile)
    harness.plan(range(3))
    await trio.sleep(5)
    assert (harness.fetched, harness.counted("prefetched")) == ([], 0)


# -- a store that cannot take them


async def test_a_full_disk_is_not_fetched_for_in_vain(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    harness.content.full = True
    harness.plan(range(100))
    await trio.sleep(60)
    # Once every ten seconds as many as are under way at a time.
    assert len(harness.fetched) <= 7 * 16
    assert harness.counted("prefetched") == 0
    harness.content.full = False
    harness.fetcher._full_until = 0.0
    await trio.sleep(11)
    assert harness.kept == set(range(100))
    caplog.clear()


async def test_files_without_room_to_land_are_not_fetched_again_and_again(harness: Harness) -> None:
    harness.content.refuses = True
    harness.plan(range(100))
    await trio.sleep(60)
    assert max(Counter(harness.fetched).values()) <= 7
    harness.content.refuses = False
    await trio.sleep(11)
    assert harness.kept == set(range(100))
