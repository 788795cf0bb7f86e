"""How much memory a process may have."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def memory_bytes(own_group: Path = Path("/proc/self/cgroup"), groups: Path = _GROUPS) -> int:
    """The memory of the machine, or the least limit of this process's control groups of version 2 (cgroups(7))."""
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):
        named = [line[3:] for line in own_group.read_text().splitlines() if line.startswith("0::")]
        for name in named:
            group = groups / name.lstrip("/")
            for limited in (group, *group.parents):
                # "max" is no limit; the root has none, and no such file.
                with contextlib.suppress(OSError, ValueError):
                    least = min(least, int((limited / "memory.max").read_text()))
                if limited == groups:
                    break
    return least
