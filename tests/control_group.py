"""A control group (cgroups(7)) that limits memory, of version 1 or 2, and a daemon that runs in it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import eventually

CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited_memory(limit_bytes: int) -> Iterator[Path]:
    """A group that may use `limit_bytes`; skips the test where none can be made."""
    first = CGROUPS / "memory" / "memory.limit_in_bytes"
    parent, limit = (CGROUPS / "memory", "memory.limit_in_bytes") if first.exists() else (CGROUPS, "memory.max")
    group = parent / f"spiderfs-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as exc:
        pytest.skip(f"no control group can be made: {exc}")
    try:
        try:
            (group / limit).write_text(str(limit_bytes))
        except OSError as exc:
            pytest.skip(f"control groups do not limit memory here: {exc}")
        yield group
    finally:

        def removed() -> bool:
            with contextlib.suppress(OSError):
                group.rmdir()
            return not group.exists()

        eventually(removed, what="the end of the control group")


def program_in(group: Path, place: Path) -> Path:
    """A `spiderfs` at `place` that runs in a group.

    It is a program of its own: of a fork, what it shares with the process that was forked would not be counted.
    """
    place.write_text(
        f"#!{sys.executable}\nfrom spiderfs.cli.main import main\n"
        f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid()))\nmain()\n"
    )
    place.chmod(0o755)
    return place
