"""The processes below another one, and whether they have ended."""

from __future__ import annotations

import contextlib
from pathlib import Path

from mounting import children


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [further for child in found for further in descendants(child)]


def threads_of(pid: int) -> list[str]:
    """The states of a process's threads that have not ended: of one whose first thread has ended too."""
    states = []
    with contextlib.suppress(OSError):
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                states.append(stat.read_text().rpartition(")")[2].split()[0])
    return [state for state in states if state not in "ZX"]
