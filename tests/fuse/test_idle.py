"""A mount that no one uses costs hardly anything."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from mounting import Mounted, children, eventually, mounted
from reading import write_files

# In this time all of a mount's timers have gone off, and threads that no one needs have ended.
WATCHED_S = 5.0


@pytest.mark.both_bindings
@pytest.mark.opened_and_immutable
def test_a_mount_that_no_one_uses_hardly_wakes(source: Path, tmp_path: Path) -> None:
    names = write_files(source, {f"{number:02d}": 5_000 for number in range(20)})
    with mounted(source, tmp_path / "m", workers=2) as mount:
        for name in names:
            assert len((mount.point / name).read_bytes()) == 5_000

        def wakings_per_s() -> float:
            before = wakings(mount)
            time.sleep(WATCHED_S)
            after = wakings(mount)
            assert after.keys() == before.keys()
            assert len(after) == 3 + 2 * mount.workers_wanted, "supervisor, manager, workers, and reading processes"
            return sum(after[pid] - before[pid] for pid in after) / WATCHED_S

        # 1.5; it was 8 when each process looked for what is hardly ever there, 54 in each worker when workers looked
        # for what the manager publishes, and 70 where pyfuse3's reads were interrupted at all times.
        eventually(lambda: wakings_per_s() <= 4, what="some seconds in which nothing happens")


def wakings(mount: Mounted) -> dict[int, int]:
    """How often the threads of each process of the mount have waited, by pid."""
    pids = [mount.supervisor.pid, mount.manager(), *mount.workers()]
    pids += [reading for pid in pids[1:] for reading in children(pid)]
    return {pid: sum(map(_waits, Path(f"/proc/{pid}/task").iterdir())) for pid in pids}


def _waits(thread: Path) -> int:
    try:
        status = (thread / "status").read_text()
    except OSError:  # it has just ended
        return 0
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
