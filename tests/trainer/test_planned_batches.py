"""Planned samples that are fetched in batches, while processes of the mount die or stand still."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from checked_loader import Task, main, make_files
from extent_audit import audit
from mounting import Mounted, children, eventually, mounted
from pauses import SHORT_PAUSES
from training_process import TrainingProcess, training_process

from spiderfs.shared.layout import EXTENTS_MAP_FILE, CacheLayout

ANYTHING = [".*"]
LATE_MANAGER = "from spiderfs.daemon import supervisor\nsupervisor.MANAGER_PAUSE_S = 24.0\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_planned_files_are_read_without_a_manager(tmp_path: Path, number: signal.Signals) -> None:
    """The time limit of the source is shorter than the time for which there is no manager.

    Whoever opens a file that the manager was fetching waits for it, for half of that limit. Each of many loader workers
    does so a few times.
    """
    source = make_files(tmp_path / "source", 64)
    options: dict[str, object] = {"source__latency_ms": 300, "source__timeout_s": 6, "capacity": "40MiB"}
    with (
        mounted(source, tmp_path / "m", allowed=ANYTHING, first=LATE_MANAGER, **options) as mount,
        training_process(main, Task(str(mount.point), epochs=1, workers=16, batch=1)) as process,
    ):
        eventually(lambda: mount.stats()["fetches_ahead"]["under_way"] > 2, within_s=90)
        manager = mount.manager()
        os.kill(manager, number)
        try:
            wrong, longest_s = process.hear()
        finally:
            if number == signal.SIGSTOP:
                os.kill(manager, signal.SIGCONT)
        assert wrong == []
        assert longest_s < 6


@pytest.mark.parametrize("workers", [1, 2])
def test_any_process_may_die_at_any_time(tmp_path: Path, workers: int) -> None:
    """No reader gets a wrong byte or an error, and no chunk is lost or belongs to two files."""
    source = make_files(tmp_path / "source", 300)
    rng = random.Random(workers)
    options: dict[str, object] = {"workers": workers, "capacity": "12MiB", "source__latency_ms": 3}
    with mounted(source, tmp_path / "m", allowed=ANYTHING, first=SHORT_PAUSES, **options) as mount:
        content = CacheLayout(mount.cache).content
        with training_process(main, Task(str(mount.point), epochs=1000)) as process:
            assert process.hear()[0] == []
            for _ in range(8):
                time.sleep(rng.uniform(0.2, 0.8))
                victim = rng.choice(processes(mount))
                try:
                    os.kill(victim, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            for wrong, longest_s in heard(process, 2):
                assert wrong == []
                assert longest_s < 20
        eventually(lambda: audit(content) == (0, 0, 0), within_s=60, what="a map that agrees with the rows")
        assert mount.metric("checksum_failures") == 0


def test_a_lost_map_costs_the_store_and_no_read(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", 200)
    with (
        mounted(source, tmp_path / "m", allowed=ANYTHING, workers=2, capacity="12MiB", source__latency_ms=3) as mount,
        training_process(main, Task(str(mount.point), epochs=1000)) as process,
    ):
        assert process.hear()[0] == []
        content = CacheLayout(mount.cache).content
        (content / EXTENTS_MAP_FILE).unlink()
        eventually((content / EXTENTS_MAP_FILE).exists, within_s=60, what="a new map")
        for wrong, _ in heard(process, 2):
            assert wrong == []
        assert mount.metric("checksum_failures") == 0


def processes(mount: Mounted) -> list[int]:
    """The manager, the workers, and their reading processes."""
    try:
        owners = [mount.manager(), *mount.workers()]
    except (AssertionError, ValueError):
        # One of them is being started again.
        owners = mount.workers()
    return [*owners, *(child for owner in owners for child in children(owner)[:1])]


def heard(process: TrainingProcess, epochs: int) -> list[tuple[list[str], float]]:
    """What the training says of its last epochs and of the next ones."""
    return [process.hear() for _ in range(epochs + 1)]
