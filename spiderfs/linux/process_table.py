"""Facts from /proc about processes and threads, by the numbers that they have in the daemon's pid namespace.

How a process ends with its parent, or cleans up behind itself at a signal, is here too.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

# Either of these capabilities lets a process read any file and pass any directory, see capabilities(7).
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_MAY_READ_ALL = 1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH


_PR_SET_PDEATHSIG = 1


class Status(NamedTuple):
    """A thread's process, the parent of that process, and the rights with which the thread opens files.

    `is_init` says that the process is the first of its pid namespace, the one that adopts all orphans there.
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
        # A process of another user can have capabilities too, but only over the files of its own user namespace.
        return self.uid == 0 and self.capabilities & _MAY_READ_ALL != 0


def status_of(thread: int) -> Status:
    """Read a thread's status; raises OSError if the thread has ended, ValueError if the text is not a status."""
    lines = Path(f"/proc/{thread}/status").read_bytes().splitlines()
    fields = dict(line.split(b":\t", 1) for line in lines if b":\t" in line)
    try:
        return Status(
            process=int(fields[b"Tgid"]),
            parent=int(fields[b"PPid"]),
            # The last of four numbers is the one that counts when files are opened (proc_pid_status(5)).
            uid=int(fields[b"Uid"].split()[3]),
            gid=int(fields[b"Gid"].split()[3]),
            groups=frozenset(map(int, fields[b"Groups"].split())),
            capabilities=int(fields[b"CapEff"], 16),
            # The line lists the process's number in each namespace; the innermost comes last.
            is_init=int(fields[b"NSpid"].split()[-1]) == 1,
        )
    except (KeyError, IndexError) as exc:
        raise ValueError(f"/proc/{thread}/status has no {exc}") from exc


def started_at(pid: int) -> int:
    """When a process started, in clock ticks; raises OSError if it has ended.

    Pid and start time together name one process for good, since a pid is used again after its process has ended.
    """
    return int(_stat(pid)[19])


def session_of(pid: int) -> int:
    """The session of a process, which its children inherit and which no other process has; raises OSError."""
    return int(_stat(pid)[3])


def ended_status(pid: int) -> int | None:
    """The wait status of a child whose first thread has ended, although the child is not reaped; None while it lives.

    A thread can wait in the kernel where no signal reaches it, for example for a source that hangs. Such a thread holds
    up the end of its process: no SIGCHLD comes, waitpid(2) reports nothing, and the process's pipes, locks and
    descriptors stay open. But the process runs no instruction any more: the signal that ended its first thread ends
    each other thread before that thread returns from the kernel. So no one has to wait for such a process. In our
    processes the first thread never asks the source.
    """
    try:
        fields = _stat(pid)
    except OSError:
        return None
    # In proc_pid_stat(5), the state is the first of these fields, and exit_code is the last.
    return int(fields[-1]) if fields[0] in "ZX" else None


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third field on, which is the state of the process."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The second field, the name in parentheses, may itself hold parentheses.
    return text.rpartition(")")[2].split()


def is_our_own() -> bool:
    """Whether /proc belongs to this process's pid namespace; if not, its numbers mean other processes."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> bool:
    """Have the kernel send this process a signal when its parent ends; False if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have the signals that end a program end it as Ctrl-C does: with KeyboardInterrupt."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    ends = [number for number, handler in before.items() if handler is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in ends:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Have the signals that end a program wait for what is done meanwhile, which is short and must not be half done."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for caught in came[:1]:
            signal.raise_signal(caught)
