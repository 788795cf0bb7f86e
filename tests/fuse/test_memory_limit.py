"""What a mount holds in memory under load, with the option memory_limit and without it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from control_group import limited_memory, program_in
from mounting import Mounted, descendants, eventually, mounted, run_spiderfs
from planning import planned
from reading import readers, together, write_files

LIMIT_BYTES = 288 << 20
LARGE = {f"large/{number}": 16 << 20 for number in range(8)}
WHOLE = {f"whole/{number:02d}": 7 << 20 for number in range(48)}
SMALL = {f"small/{number:03d}": 1 << 20 for number in range(64)}
# A line on which reads take a while, so that many are in flight. None comes while all readers begin.
BANDWIDTH = "100MB"
LOAD = {"source__latency_ms": 20, "source__bandwidth": 1, "source__timeout_s": 600}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("source")


@pytest.fixture(scope="module")
def wanted(source: Path) -> Mapping[str, str]:
    return write_files(source, {**LARGE, **WHOLE, **SMALL})


def taken_bytes(pid: int) -> int:
    """Memory of a process that is no file's; what several share counts once in all."""
    # It may end in this moment.
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        found = {name: int(text.split()[0]) for name, text in (line.split(":") for line in lines)}
        return (found["Pss_Anon"] + found["Pss_Shmem"]) << 10
    return 0


@contextlib.contextmanager
def peak_of(mount: Mounted) -> Iterator[list[int]]:
    """Look again and again how much all processes of a mount take; the list has the most at the end."""
    peak, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], sum(map(taken_bytes, [mount.supervisor.pid, *descendants(mount.supervisor.pid)])))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield peak
    finally:
        ended.set()
        looking.join()


def peak_under_load(mount: Mounted, wanted: Mapping[str, str], at_least_bytes: int = 0) -> int:
    """Read all files, large ones by eight readers, while a planned epoch of small ones is prefetched.

    The bytes of all reads come once so much memory is taken.
    """
    with contextlib.ExitStack() as all_at_once, peak_of(mount) as peak:
        all_at_once.enter_context(planned(mount, list(SMALL)))
        started = []
        for names in (*([name] for name in (*LARGE, *WHOLE)), list(SMALL)):
            part = {name: wanted[name] for name in names}
            started += all_at_once.enter_context(readers(1, mount.point, part, rounds=1))
        eventually(lambda: peak[0] >= at_least_bytes, what=lambda: f"{at_least_bytes} bytes, but {peak[0]}")
        mount.change("source.bandwidth", BANDWIDTH)
        seen = together(started, 120)
    assert (seen.wrong, seen.errors, seen.reads) == ([], [], len(wanted))
    assert (mount.metric("worker_restarts"), mount.metric("manager_restarts")) == (0, 0)
    return peak[0]


@pytest.mark.parametrize("immutable", ["off", "on"])
def test_a_mount_keeps_to_its_limit(
    source: Path, wanted: Mapping[str, str], tmp_path: Path, immutable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with limited_memory(LIMIT_BYTES) as group:
        monkeypatch.setattr("mounting.SPIDERFS", program_in(group, tmp_path / "spiderfs"))
        with mounted(source, tmp_path / "m", immutable=immutable, memory_limit=LIMIT_BYTES, **LOAD) as mount:
            peak = peak_under_load(mount, wanted)
            memory = mount.stats()["memory"]
            assert peak < LIMIT_BYTES
            assert memory["limit_bytes"] == mount.metric("memory_limit_bytes") == LIMIT_BYTES
            assert memory["in_flight_bytes"] == mount.metric("memory_in_flight_bytes") == 0
            assert 0 < memory["samples_bytes"] < memory["samples_limit_bytes"]
            assert "memory           limit 288.0 MiB, in flight 0 B" in mount.status()


@pytest.mark.thorough
def test_without_a_limit_the_same_load_takes_more(
    source: Path, wanted: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with limited_memory(8 * LIMIT_BYTES) as group:
        monkeypatch.setattr("mounting.SPIDERFS", program_in(group, tmp_path / "spiderfs"))
        with mounted(source, tmp_path / "m", **LOAD) as mount:
            peak_under_load(mount, wanted, at_least_bytes=LIMIT_BYTES)


@pytest.mark.thorough
def test_samples_that_take_more_than_is_left_are_remarked_on(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    names = [f"{number:07d}" for number in range(1_000_000)]
    shorter = "from spiderfs.daemon import manager\nmanager.HOUSEKEEPING_INTERVAL_S = 0.1\n"
    remark = "memory, and memory_limit=288MiB leaves .* for them: mount with a higher limit, or declare fewer samples"
    with mounted(tmp_path / "source", tmp_path / "m", first=shorter, memory_limit=LIMIT_BYTES) as mount:
        mount.expect(remark)
        with planned(mount, names):
            eventually(lambda: mount.logged(remark), what="a remark")
            # Half of that was for the message, which is gone.
            assert mount.stats()["memory"]["samples_bytes"] > 1_000_000 * 20
        assert len(mount.logged(remark)) == 1


def test_too_low_a_limit_is_refused(tmp_path: Path) -> None:
    for name in ("source", "mnt"):
        (tmp_path / name).mkdir()
    done = run_spiderfs("mount", tmp_path / "source", tmp_path / "mnt", "-o", "memory_limit=64MiB,workers=1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "memory_limit=64MiB: with workers=1 and sample_max_bytes=8MiB" in done.stderr
