"""A mount that nobody uses costs hardly anything."""

from __future__ import annotations

import os
import time
from pathlib import Path

from mounting import Mounted, eventually, mounted
from reading import write_files


def test_a_mount_that_nobody_uses_hardly_wakes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    names = write_files(source, {f"{number:02d}": 5_000 for number in range(20)})
    with mounted(source, tmp_path / "m", workers=2) as mount:
        for name in names:
            assert len((mount.point / name).read_bytes()) == 5_000

        def wakings_in_a_second() -> int:
            before = wakings(mount)
            time.sleep(1)
            return max(count - before[pid] for pid, count in wakings(mount).items())

        # 5 in the manager and 1 in a worker; it was 54 when workers looked for what the manager publishes.
        eventually(lambda: wakings_in_a_second() <= 15, what="a second in which nothing happens")


def wakings(mount: Mounted) -> dict[int, int]:
    """How often the threads of each process of the mount have waited, by pid."""
    found = {}
    for pid in [mount.manager(), *mount.workers()]:
        statuses = [Path(f"/proc/{pid}/task/{thread}/status").read_text() for thread in os.listdir(f"/proc/{pid}/task")]
        found[pid] = sum(int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for status in statuses)
    return found
