"""The cost of a process and all its descendants: CPU seconds and resident memory, read from /proc.

Processes are found by their parents' pids, never by name, so that another daemon of the same name is not counted and a
process that renames itself is not missed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Memory(NamedTuple):
    """Resident bytes; the bytes of a shared page are divided among the processes that map it (PSS)."""

    pss_bytes: int
    # Heap and stacks only. PSS also counts the touched pages of a mapped cache file; a leak shows here.
    anonymous_bytes: int


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


def cpu_seconds(pids: list[int]) -> float:
    """The user and system time of these processes, with all their threads."""
    return sum(user_and_system_seconds(pids))


def user_and_system_seconds(pids: list[int]) -> tuple[float, float]:
    user = system = 0
    for pid in pids:
        if (fields := _stat_fields(pid)) is not None:
            user += int(fields[11])
            system += int(fields[12])
    return user / TICKS_PER_SECOND, system / TICKS_PER_SECOND


def memory(pids: list[int]) -> Memory:
    """The resident memory of these processes together."""
    pss = anonymous = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        kib = {words[0]: int(words[1]) for words in map(str.split, lines[1:])}
        pss += kib["Pss:"] * 1024
        anonymous += kib["Pss_Anon:"] * 1024
    return Memory(pss, anonymous)
