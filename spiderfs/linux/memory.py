"""How much memory and how many open files a process may have, and how much of what it has freed it keeps."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path

# More than any mount needs; where there is no limit, programs that are started may try to close each possible one.
_MOST_FILES = 65536
_GROUPS = Path("/sys/fs/cgroup")
# mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def allow_open_files() -> None:
    """Raise the limit of this process and its children as far as it may: what is being fetched takes descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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


def anonymous_bytes() -> int:
    """The memory of this process that is no file's (RssAnon of proc_pid_status(5)); 0 if no one says."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) << 10
    return 0


def keep_freed_memory(kept_bytes: int) -> None:
    """Have glibc keep the memory of payloads for the next ones, instead of asking the kernel for it at each fetch.

    Every page of it that is new costs a fault: 20 a file of 112 kB, a tenth of the processor time of a fetch.
    """
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in (
            (_M_TRIM_THRESHOLD, kept_bytes),
            (_M_MMAP_THRESHOLD, kept_bytes // 2),
            (_M_ARENA_MAX, 1),
        ):
            mallopt(parameter, value)


def give_back_freed_memory() -> None:
    """Have glibc give the kernel all that it keeps (malloc_trim(3)); it takes milliseconds."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
