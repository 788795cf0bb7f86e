"""The cost of a process and all its descendants: CPU seconds, wakings and resident memory.

Processes are found by their parents' pids, never by name, so that another daemon of the same name is not counted and a
process that renames itself is not missed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on, or None if the process is gone.

    The second field, the command, may itself hold blanks and brackets, so the third begins after the last bracket.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def process_tree(root: int) -> list[int]:
    """The process `root` and all its present descendants."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat_fields(int(name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(name))
    tree = [root]
    for pid in tree:
        tree.extend(children.get(pid, []))
    return tree


def children(pid: int) -> list[int]:
    """Those of the process's first thread; none if it is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def cpu_seconds(pids: list[int]) -> float:
    """The user and system time of these processes, with all their threads."""
    found = [fields for pid in pids if (fields := _stat_fields(pid)) is not None]
    return sum(int(fields[11]) + int(fields[12]) for fields in found) / TICKS_PER_SECOND


def pss_bytes(pids: list[int], kind: str = "Pss") -> int:
    """The resident memory of these processes; the bytes of a shared page are divided among those that map it.

    `kind` is a row of /proc/PID/smaps_rollup: Pss_Anon is what belongs to no file.
    """
    pss = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            found = re.search(rf"^{kind}: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            pss += int(found[1]) * 1024 if found else 0
    return pss


class Idle(NamedTuple):
    """What processes do in a time in which no one asks them for anything."""

    cpu_share: float
    """Of one core."""
    wakings_per_s: float


def idle(trees: Mapping[str, list[int]], for_s: float) -> dict[str, Idle]:
    """Watch processes for a while, by the names of the systems that they belong to."""

    def counted() -> dict[str, tuple[float, float]]:
        return {name: (_exact_cpu_seconds(pids), _wakings(pids)) for name, pids in trees.items()}

    began, before = time.monotonic(), counted()
    time.sleep(for_s)
    took_s, after = time.monotonic() - began, counted()
    return {
        name: Idle(*((now - then) / took_s for now, then in zip(after[name], before[name], strict=True)))
        for name in trees
    }


def watchers(root: int) -> list[int]:
    """Processes that hold a descriptor of the process `root` (pidfd_open(2)), as the guard of a mount does."""
    line = f"Pid:\t{root}\n"
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            texts = [path.read_text() for path in Path(f"/proc/{name}/fdinfo").iterdir()]
        except OSError:  # it has ended
            continue
        if any(line in text for text in texts):
            found.append(int(name))
    return found


def _exact_cpu_seconds(pids: list[int]) -> float:
    """As `cpu_seconds`, by the processes' clocks, which count less than a tick too."""
    # clock_getcpuclockid(3), which Python does not have.
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def _wakings(pids: list[int]) -> int:
    """How often all threads of these processes have waited for something."""
    statuses = [
        Path(f"/proc/{pid}/task/{thread}/status").read_text()
        for pid in pids
        for thread in os.listdir(f"/proc/{pid}/task")
    ]
    return sum(int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for status in statuses)
