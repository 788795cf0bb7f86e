"""The faults of a slow source, each alone, and changed while calls wait."""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.fakes import MemorySource
from spiderfs.errors import ConfigError, SourceUnavailable
from spiderfs.sources.faults import FAULTS, FaultState, SlowSource


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
def faults(tmp_path: Path) -> Iterator[FaultState]:
    state = FaultState.create(tmp_path / "faults")
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
def source(memory: MemorySource, faults: FaultState, clock: Clock) -> SlowSource:
    return SlowSource(memory, faults, clock=clock.time, sleep=clock.sleep)


def test_without_settings_nothing_waits(source: SlowSource, clock: Clock) -> None:
    source.stat(b"file")
    assert clock.now == 1000.0


def test_latency_counts_once_per_call(source: SlowSource, faults: FaultState, clock: Clock) -> None:
    faults.set("latency_ms", 5)
    version = source.stat(b"file").version
    assert clock.now == pytest.approx(1000.005)
    source.read(b"file", 0, 10, version)
    assert clock.now == pytest.approx(1000.010)


def test_latency_counts_once_per_thousand_entries_of_a_scan(
    source: SlowSource, memory: MemorySource, faults: FaultState, clock: Clock
) -> None:
    faults.set("latency_ms", 1000)
    for number in range(2500):
        memory.add(b"d/%d" % number)
    memory.add_directory(b"empty")
    assert len(list(source.scan(b"d"))) == 1 + 2500
    assert clock.now == pytest.approx(1003)
    assert [name for name, _ in source.scan(b"empty")] == [b"."]
    assert clock.now == pytest.approx(1004)


def test_jitter_keeps_the_median(source: SlowSource, faults: FaultState, clock: Clock) -> None:
    faults.set("latency_ms", 10)
    faults.set("latency_jitter", 0.5)
    waits = []
    for _ in range(2000):
        before = clock.now
        source.stat(b"file")
        waits.append(clock.now - before)
    assert statistics.median(waits) == pytest.approx(0.010, rel=0.1)
    assert statistics.stdev(math.log(wait) for wait in waits) == pytest.approx(0.5, rel=0.1)


def test_the_same_seed_draws_the_same(memory: MemorySource, faults: FaultState) -> None:
    faults.set("error_rate", 0.5)

    def outcomes(seed: int) -> list[bool]:
        source = SlowSource(memory, faults, seed=seed)
        results = []
        for _ in range(100):
            try:
                source.stat(b"file")
                results.append(True)
            except SourceUnavailable:
                results.append(False)
        return results

    assert outcomes(1) == outcomes(1)
    assert outcomes(1) != outcomes(2)
    assert 30 < sum(outcomes(1)) < 70


def test_bandwidth_holds_bytes_back(source: SlowSource, faults: FaultState, clock: Clock) -> None:
    faults.set("bandwidth", 1000)
    version = source.stat(b"file").version
    source.read(b"file", 0, 10_000, version)
    assert clock.now == pytest.approx(1010)
    clock.now += 100  # an idle line saves nothing up
    source.read(b"file", 0, 2_000, version)
    assert clock.now == pytest.approx(1112)


def test_bandwidth_taken_off_frees_who_waits_for_it(source: SlowSource, faults: FaultState, clock: Clock) -> None:
    version = source.stat(b"file").version
    faults.set("bandwidth", 1)
    clock.on_sleep = lambda: faults.set("bandwidth", 1e9)
    source.read(b"file", 0, 10_000, version)
    source.read(b"file", 0, 10_000, version)
    assert clock.now < 1001


# Other tests may have left idle threads behind, and from 3.12 on Python warns of a fork beside threads.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_bandwidth_is_one_line_for_two_processes(tmp_path: Path, memory: MemorySource) -> None:
    faults = FaultState.create(tmp_path / "faults", bandwidth=100_000)
    source = SlowSource(memory, faults)
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
    faults.close()
    # 40 kB at 100 kB/s; two lines of that rate would need half as long.
    assert 0.4 <= took_s < 1.5


def test_a_killed_holder_leaves_the_line_unlocked(tmp_path: Path, faults: FaultState) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from spiderfs.sources.faults import FaultState\n"
            "state = FaultState.open(sys.argv[1])\n"
            "with state._locked():\n    print('locked', flush=True); time.sleep(60)",
            str(tmp_path / "faults"),
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    setter = threading.Thread(target=faults.set, args=("bandwidth", 5.0))
    setter.start()
    setter.join(0.05)
    assert setter.is_alive()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    setter.join(5)
    assert faults.get("bandwidth") == 5


def test_hang_holds_calls_until_another_process_ends_it(tmp_path: Path, memory: MemorySource) -> None:
    faults = FaultState.create(tmp_path / "faults", hang=1)
    source = SlowSource(memory, faults)
    sizes: list[int] = []
    reader = threading.Thread(target=lambda: sizes.append(source.stat(b"file").size))
    reader.start()
    reader.join(0.1)
    assert reader.is_alive()
    code = "import sys; from spiderfs.sources.faults import FaultState; FaultState.open(sys.argv[1]).set('hang', 0)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "faults")], check=True)
    reader.join(5)
    assert sizes == [10_000]
    faults.close()


def test_hang_ends_in_gone_and_with_close(source: SlowSource, faults: FaultState, clock: Clock) -> None:
    faults.set("hang", 1)
    clock.on_sleep = lambda: faults.set("gone", 1)
    with pytest.raises(SourceUnavailable, match="gone"):
        source.stat(b"file")
    faults.set("gone", 0)
    clock.on_sleep = source.close
    with pytest.raises(SourceUnavailable, match="hangs"):
        source.stat(b"file")


def test_a_forgotten_hang_ends(source: SlowSource, faults: FaultState, clock: Clock) -> None:
    faults.set("hang", 1)
    with pytest.raises(SourceUnavailable, match="hangs"):
        source.stat(b"file")
    assert clock.now == pytest.approx(1000 + 3600, abs=1)


def test_gone_and_back(source: SlowSource, faults: FaultState, clock: Clock) -> None:
    version = source.stat(b"file").version
    faults.set("gone", 1)
    for call in (
        lambda: source.stat(b"file"),
        lambda: list(source.scan(b"")),
        lambda: source.read(b"file", 0, 1, version),
        lambda: source.readlink(b"file"),
        lambda: source.listxattr(b"file"),
        lambda: source.getxattr(b"file", "user.x"),
        source.statvfs,
    ):
        with pytest.raises(SourceUnavailable):
            call()
    faults.set("gone", 0)
    assert source.read(b"file", 0, 1, version) == b"\0"
    assert clock.now == 1000.0


def test_gone_ends_a_transfer(source: SlowSource, faults: FaultState, clock: Clock) -> None:
    version = source.stat(b"file").version
    faults.set("bandwidth", 1)
    clock.on_sleep = lambda: faults.set("gone", 1)
    with pytest.raises(SourceUnavailable):
        source.read(b"file", 0, 10_000, version)
    assert clock.now < 1001


def test_settings_are_seen_by_every_opener(tmp_path: Path) -> None:
    created = FaultState.create(tmp_path / "faults", latency_ms=5, gone=1)
    opened = FaultState.open(tmp_path / "faults")
    assert {name: opened.get(name) for name in FAULTS} == {**dict.fromkeys(FAULTS, 0.0), "latency_ms": 5.0, "gone": 1.0}
    opened.set("latency_ms", 2.5)
    assert created.get("latency_ms") == 2.5
    created.close()
    created.close()
    opened.close()


def test_creating_again_leaves_the_old_state_to_its_users(tmp_path: Path) -> None:
    old = FaultState.create(tmp_path / "faults", latency_ms=1)
    new = FaultState.create(tmp_path / "faults", latency_ms=2)
    assert (old.get("latency_ms"), new.get("latency_ms")) == (1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["faults"]
    old.close()
    new.close()


@pytest.mark.parametrize(("name", "value"), [("error_rate", 1.5), ("latency_ms", -1), ("hang", math.nan)])
def test_values_out_of_range_are_refused(faults: FaultState, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"source.{name}=.*give a number from 0 to"):
        faults.set(name, value)


def test_unknown_settings_and_files_are_refused(tmp_path: Path, faults: FaultState) -> None:
    with pytest.raises(ConfigError, match=r"source\.speed does not exist; there are source\.latency_ms"):
        faults.set("speed", 1)
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="does not hold the settings"):
        FaultState.open(tmp_path / "other")
