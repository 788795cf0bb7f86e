"""What /proc says of processes and threads, as the daemon's pid namespace numbers them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

# capabilities(7): either lets a process read any file and pass any directory.
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_MAY_READ_ALL = 1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH


class Status(NamedTuple):
    """Of a thread: its process and that one's parent, and with what rights it opens files.

    `is_init`: the process is the first one of its pid namespace, to which all orphans of the namespace come.
    """

    process: int
    parent: int
    uid: int
    gid: int
    groups: frozenset[int]
    capabilities: int
    is_init: bool

    @property
    def may_read_all(self) -> bool:
        # Capabilities of others are those of a user namespace, whose files alone they concern.
        return self.uid == 0 and self.capabilities & _MAY_READ_ALL != 0


def status_of(thread: int) -> Status:
    """Raises OSError when the thread is gone, ValueError for what is no status."""
    lines = Path(f"/proc/{thread}/status").read_bytes().splitlines()
    fields = dict(line.split(b":\t", 1) for line in lines if b":\t" in line)
    try:
        return Status(
            process=int(fields[b"Tgid"]),
            parent=int(fields[b"PPid"]),
            # The last of four is what files are opened by (proc_pid_status(5)).
            uid=int(fields[b"Uid"].split()[3]),
            gid=int(fields[b"Gid"].split()[3]),
            groups=frozenset(map(int, fields[b"Groups"].split())),
            capabilities=int(fields[b"CapEff"], 16),
            # From our namespace inwards.
            is_init=int(fields[b"NSpid"].split()[-1]) == 1,
        )
    except (KeyError, IndexError) as exc:
        raise ValueError(f"/proc/{thread}/status has no {exc}") from exc


def started_at(pid: int) -> int:
    """Start time of a process in clock ticks, which with the pid names it for good; raises OSError when it is gone."""
    return int(_stat(pid)[19])


def session_of(pid: int) -> int:
    """The session of a process, which goes to its children and is never that of anybody else; raises OSError."""
    return int(_stat(pid)[3])


def ended_status(pid: int) -> int | None:
    """The wait status of a child whose first thread has ended and that has not been reaped; None while it lives.

    A thread that waits uninterruptibly in the kernel, as for a source that hangs, holds up the end of its process: no
    SIGCHLD comes, waitpid(2) knows of nothing, and pipes, locks and descriptors stay open for as long as it waits. But
    the process runs no instruction any more, for what has ended its first thread ends each of the others before it
    comes back from the kernel. So nobody has to wait for it. The first thread never asks the source.
    """
    try:
        fields = _stat(pid)
    except OSError:
        return None
    # State and exit_code, the first and the last of proc_pid_stat(5).
    return int(fields[-1]) if fields[0] in "ZX" else None


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on, the state of the process."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The name in parentheses may hold anything.
    return text.rpartition(")")[2].split()


def is_our_own() -> bool:
    """Whether /proc is that of this process's pid namespace: its numbers mean other processes otherwise."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False
