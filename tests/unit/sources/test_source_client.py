"""Time limits, retries, sharing and the knowledge whether the source is there."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing
from waiting import eventually

from benchmarks.fakes import MemorySource
from benchmarks.fakes.faulty_source import GONE, HANG, Faults, FaultySource
from spiderfs.errors import (
    SourceChanged,
    SourceDenied,
    SourceEntryFailed,
    SourceNotFound,
    SourceNotReady,
    SourceThrottled,
    SourceTimeout,
    SourceUnavailable,
)
from spiderfs.linux.worker_threads import WorkerThreads
from spiderfs.sources import client as module
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.source import Source, SourceStat

# Short enough for a test, and long enough for a thread to start on a busy machine.
QUICK = SourceLimits(timeout_s=0.3, backoff_s=0.001, max_backoff_s=0.002, max_concurrent=4, probe_interval_s=0.01)


class Harness:
    """A client of a slow memory source, with its events counted."""

    def __init__(self, path: Path) -> None:
        self.memory = MemorySource()
        self.version = self.memory.add(b"file", b"content").version
        self.faults = Faults.made()
        self.events: Counter[str] = Counter()

    def client(self, limits: SourceLimits = QUICK, source: Source | None = None) -> SourceClient:
        return SourceClient(
            source or FaultySource(self.memory, self.faults),
            limits,
            rng=random.Random(1),
            on_event=lambda event: self.events.update([event]),
        )


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path / "faults")
    yield harness
    # Ends the threads that the test left hanging; they still read the settings, so these are not closed here.
    harness.faults.set(GONE, 1)


async def test_every_question_of_the_source_can_be_asked(harness: Harness) -> None:
    harness.memory.add_symlink(b"link", b"file")
    harness.memory.set_xattr(b"file", "user.x", b"1")
    client = harness.client()
    assert (await client.stat(b"file")).size == 7
    own, entries = await client.scan(b"")
    assert own == await client.stat(b"")
    assert {name for name, _ in entries} == {b"file", b"link"}
    assert await client.read(b"file", 1, 3, harness.version) == b"ont"
    assert await client.call(client.source.getxattr, b"file", "user.x") == b"1"
    assert (await client.call(client.source.statvfs)).f_blocks > 0
    assert client.reachable
    assert harness.events == {"source_requests": 6}


async def test_passing_faults_are_retried_and_counted(harness: Harness) -> None:
    harness.memory.fail_next(SourceUnavailable("1"), SourceUnavailable("2"), SourceUnavailable("3"))
    client = harness.client()
    assert (await client.stat(b"file")).size == 7
    assert client.reachable
    assert harness.events == {"source_requests": 4, "source_retries": 3}


@pytest.mark.parametrize(
    ("error", "is_there"),
    [(SourceUnavailable("no route"), False), (SourceEntryFailed("a dead mount within"), True)],
    ids=["for all", "for one entry"],
)
async def test_attempts_are_bounded(harness: Harness, error: SourceUnavailable, is_there: bool) -> None:
    harness.memory.fail_next(*[error] * 4)
    client = harness.client()
    with pytest.raises(type(error)):
        await client.stat(b"file")
    assert client.reachable == is_there
    assert harness.events == {"source_requests": 4, "source_retries": 3, "source_errors": 1}


@pytest.mark.parametrize("kind", [SourceNotFound, SourceDenied, SourceChanged])
async def test_no_answer_is_retried(
    harness: Harness, kind: type[SourceNotFound | SourceDenied | SourceChanged]
) -> None:
    harness.memory.fail_next(kind("no"))
    client = harness.client()
    with pytest.raises(kind):
        await client.stat(b"file")
    assert client.reachable
    assert harness.events == {"source_requests": 1}


@pytest.mark.usefixtures("jumping_clock")
async def test_backoff_doubles_up_to_its_limit_with_full_jitter(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def without_thread(_: WorkerThreads, function: Callable[..., object], *args: object) -> object:
        return function(*args)

    # Threads and a mock clock do not go together: it jumps while a thread runs.
    monkeypatch.setattr(WorkerThreads, "run", without_thread)
    limits = SourceLimits(timeout_s=100, attempts=6, backoff_s=1, max_backoff_s=4)
    asked: list[float] = []

    def fail() -> None:
        asked.append(trio.current_time())
        raise SourceUnavailable("down")

    with pytest.raises(SourceUnavailable):
        await harness.client(limits, source=harness.memory).call(fail)
    waits = [after - before for before, after in itertools.pairwise(asked)]
    expected = random.Random(1)
    assert waits == pytest.approx([expected.uniform(0, longest) for longest in (1, 2, 4, 4, 4)])


async def test_a_source_that_is_asked_for_too_much_is_asked_again_until_the_time_is_up(harness: Harness) -> None:
    harness.memory.fail_next(*[SourceThrottled("slow down")] * 20)
    client, patient = harness.client(), harness.client(replace(QUICK, timeout_s=30.0))
    assert (await patient.stat(b"file")).size == 7
    harness.memory.fail_next(*[SourceThrottled("slow down")] * 100_000)
    with pytest.raises(SourceTimeout):
        await client.stat(b"file")
    assert not client.reachable, "no one has got anything else from it"
    assert harness.events["source_retries"] > 20
    assert harness.events["source_timeouts"] == 1


async def test_a_source_that_is_asked_for_too_much_by_one_alone_is_reachable(harness: Harness) -> None:
    def refuse() -> None:
        raise SourceThrottled("slow down")

    client = harness.client()
    async with trio.open_nursery() as nursery:

        async def unlucky() -> None:
            with pytest.raises(SourceTimeout):
                await client.call(refuse)

        nursery.start_soon(unlucky)
        await trio.sleep(0.05)
        await client.stat(b"file")
    assert client.reachable


async def test_a_source_that_is_not_ready_is_there(harness: Harness) -> None:
    harness.memory.fail_next(*[SourceNotReady("an archive grows")] * 100_000)
    client = harness.client()
    with pytest.raises(SourceTimeout):
        await client.stat(b"file")
    assert client.reachable


async def test_who_fails_for_all_is_not_asked_again_by_all(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPETITIONS", 5)
    client = harness.client()
    harness.faults.set(GONE, 1)
    for _ in range(20):
        with pytest.raises(SourceUnavailable):
            await client.stat(b"file")
    assert harness.events == {"source_requests": 25, "source_retries": 5, "source_errors": 20}
    harness.faults.set(GONE, 0)
    for _ in range(3):
        await client.stat(b"file")
    harness.events.clear()
    harness.memory.fail_next(*[SourceUnavailable("again")] * 3)
    await client.stat(b"file")
    assert harness.events["source_retries"] == 3, "each answer allows one more"


async def test_a_hung_source_ends_in_a_timeout_for_a_hundred_waiters(harness: Harness) -> None:
    harness.faults.set(HANG, 1)
    timeouts: list[SourceTimeout] = []
    client = harness.client()

    async def ask(number: int) -> None:
        with pytest.raises(SourceTimeout, match=r"not answered within 0\.3 s") as caught:
            await client.stat(b"file%d" % number)
        timeouts.append(caught.value)

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(ask, number)
    # All of them wait at once, though only four threads do: the wait for a thread counts.
    assert trio.current_time() - start < 2
    assert not client.reachable
    assert len(timeouts) == 100
    assert harness.events == {"source_requests": 100, "source_timeouts": 100}


async def test_long_scans_end_neither_for_lack_of_threads_nor_for_an_error_that_is_an_answer(harness: Harness) -> None:
    scan, asked = harness.memory.scan, harness.memory.stat
    harness.memory.scan = lambda *args: time.sleep(1.2) or scan(*args)  # type: ignore[method-assign, func-returns-value]
    signs = 0

    def stat(path: bytes) -> SourceStat:
        nonlocal signs
        signs += 1
        if signs % 2:
            raise SourceDenied("the root is not shown")
        return asked(path)

    harness.memory.stat = stat  # type: ignore[method-assign]
    listed: list[bytes] = []
    limits = SourceLimits(timeout_s=0.5, scan_timeout_s=30, max_concurrent=2)
    client = harness.client(limits, harness.memory)

    async def list_root() -> None:
        listed.extend(name for name, _ in (await client.scan(b""))[1])

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(list_root)
    assert client.reachable
    assert listed == [b"file"] * 4
    assert 1 <= signs <= 3, "one question for all scans, when nothing was heard for some time"


async def test_a_scan_ends_when_the_source_answers_nothing(harness: Harness) -> None:
    harness.faults.set(HANG, 1)
    client = harness.client(SourceLimits(timeout_s=0.3, scan_timeout_s=600))
    with trio.fail_after(30), pytest.raises(SourceTimeout):
        await client.scan(b"")
    assert not client.reachable
    harness.faults.set(HANG, 0)


async def test_the_probe_finds_a_source_that_is_back(harness: Harness) -> None:
    harness.faults.set(HANG, 1)
    client = harness.client()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.watch)
        # As many as there are slots: the probe must not need one of those.
        async with trio.open_nursery() as callers:
            for _ in range(QUICK.max_concurrent):
                callers.start_soon(expect_timeout, client)
        assert not client.reachable
        harness.faults.set(HANG, 0)
        await eventually(lambda: client.reachable)
        asked = harness.memory.calls["statvfs"]
        await trio.sleep(0.05)
        assert harness.memory.calls["statvfs"] == asked, "a source that is back is left alone"
        nursery.cancel_scope.cancel()


async def expect_timeout(client: SourceClient) -> None:
    with pytest.raises(SourceTimeout):
        await client.stat(b"file")


async def test_a_refusal_tells_the_probe_that_the_source_is_back(harness: Harness) -> None:
    client = harness.client()
    harness.faults.set(GONE, 1)
    with pytest.raises(SourceUnavailable):
        await client.stat(b"file")
    harness.memory.fail_next(SourceDenied("no"))
    harness.faults.set(GONE, 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.watch)
        await eventually(lambda: client.reachable)
        nursery.cancel_scope.cancel()


@pytest.fixture
def clock() -> trio.testing.MockClock:
    return trio.testing.MockClock()


async def test_a_process_that_stood_still_asks_once_more(harness: Harness, clock: trio.testing.MockClock) -> None:
    """Stopped (SIGSTOP) beyond the limit, it finds its time up before it looks at what the source has answered."""
    asked, found = [], []

    async def read(path: bytes, *_: object) -> bytes:
        asked.append(path)
        if len(asked) == 1:
            await trio.sleep_forever()
        return b"content"

    client = SourceClient(harness.memory, QUICK, rng=random.Random(1), on_event=harness.events.update, read=read)

    async def ask() -> None:
        found.append(await client.read(b"file", 0, 7, harness.version))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(QUICK.timeout_s + 20)
    assert client.reachable
    assert (asked, found) == ([b"file"] * 2, [b"content"])
