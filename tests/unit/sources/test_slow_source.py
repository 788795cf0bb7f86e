"""A slow source: latency and bandwidth, each alone, and changed while calls wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.fakes import MemorySource
from spiderfs.sources.slow import SLOW_SETTINGS, SlowSettings, SlowSource


class Clock:
    """Time that passes only in sleep()."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.on_sleep: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[SlowSettings]:
    state = SlowSettings.create(tmp_path / "slow")
    yield state
    state.close()


@pytest.fixture
def memory() -> MemorySource:
    memory = MemorySource()
    memory.add(b"file", bytes(10_000))
    return memory


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source(memory: MemorySource, settings: SlowSettings, clock: Clock) -> SlowSource:
    return SlowSource(memory, settings, clock=clock.time, sleep=clock.sleep)


def test_latency_counts_once_per_call(source: SlowSource, settings: SlowSettings, clock: Clock) -> None:
    settings.set("latency_ms", 5)
    version = source.stat(b"file").version
    assert clock.now == pytest.approx(1000.005)
    source.read(b"file", 0, 10, version)
    assert clock.now == pytest.approx(1000.010)


def test_latency_counts_once_per_thousand_entries_of_a_scan(
    source: SlowSource, memory: MemorySource, settings: SlowSettings, clock: Clock
) -> None:
    settings.set("latency_ms", 1000)
    for number in range(2500):
        memory.add(b"d/%d" % number)
    memory.add_directory(b"empty")
    assert len(list(source.scan(b"d"))) == 1 + 2500
    assert clock.now == pytest.approx(1003)
    assert [name for name, _ in source.scan(b"empty")] == [b"."]
    assert clock.now == pytest.approx(1004)


def test_bandwidth_holds_bytes_back(source: SlowSource, settings: SlowSettings, clock: Clock) -> None:
    settings.set("bandwidth", 1000)
    version = source.stat(b"file").version
    source.read(b"file", 0, 10_000, version)
    assert clock.now == pytest.approx(1010)
    clock.now += 100  # an idle line saves nothing up
    source.read(b"file", 0, 2_000, version)
    assert clock.now == pytest.approx(1112)


def test_bandwidth_taken_off_frees_who_waits_for_it(source: SlowSource, settings: SlowSettings, clock: Clock) -> None:
    version = source.stat(b"file").version
    settings.set("bandwidth", 1)
    clock.on_sleep = lambda: settings.set("bandwidth", 1e9)
    source.read(b"file", 0, 10_000, version)
    source.read(b"file", 0, 10_000, version)
    assert clock.now < 1001


# Other tests may have left idle threads behind, and from 3.12 on Python warns of a fork beside threads.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_bandwidth_is_one_line_for_two_processes(tmp_path: Path, memory: MemorySource) -> None:
    settings = SlowSettings.create(tmp_path / "slow", bandwidth=100_000)
    source = SlowSource(memory, settings)
    version = source.stat(b"file").version
    start = time.monotonic()
    children = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                for _ in range(2):
                    source.read(b"file", 0, 10_000, version)
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    took_s = time.monotonic() - start
    settings.close()
    # 40 kB at 100 kB/s; two lines of that rate would need half as long.
    assert took_s >= 0.4


def test_settings_are_seen_by_every_opener(tmp_path: Path) -> None:
    created = SlowSettings.create(tmp_path / "slow", latency_ms=5, bandwidth=1)
    opened = SlowSettings.open(tmp_path / "slow")
    assert {name: opened.get(name) for name in SLOW_SETTINGS} == {
        **dict.fromkeys(SLOW_SETTINGS, 0.0),
        "latency_ms": 5.0,
        "bandwidth": 1.0,
    }
    opened.set("latency_ms", 2.5)
    assert created.get("latency_ms") == 2.5
    created.close()
    created.close()
    opened.close()
