"""How much memory the processes of a mount may hold: each bound, as it follows from the option `memory_limit`.

Memory grows with the **processes**: a worker or the manager and its reading process take `_PROCESS_BYTES` each. It
grows with the **load**, by bytes that are in flight or wait for the disk or their readers; each kind has a bound here.
And the manager's grows with the **samples**, by names, plans and scores. It cannot be bounded: a share is left for it,
and the manager warns if it takes more (`daemon/memory.py`).
"""

from __future__ import annotations

from typing import NamedTuple

UNBOUNDED = 1 << 62
_MIB = 1 << 20
# Measured in all, with one worker and a directory: 71 MiB for five processes that share pages; the libraries of an
# object store take 21 MiB more in each.
_PROCESS_BYTES = 24 * _MIB
# What is in flight takes up to this many times its bytes: what the source gives, slots by which the reading process
# hands it over, and freed memory that malloc keeps.
_COPIES = 3
# Shares of what the processes themselves leave; one half is for what each of them fetches.
_SAMPLES_SHARE, _UNSTORED_SHARE, _RECENT_SHARE, _PUSHED_SHARE = 1 / 4, 1 / 8, 1 / 16, 1 / 16


class MemoryBounds(NamedTuple):
    """Bounds in bytes; the defaults are those without a limit."""

    in_flight: int = UNBOUNDED
    """In each process: what was asked for, and has not been handed on."""
    parts: int = 128 * _MIB
    """In all workers: what is in flight in parts of large files, ahead of readers."""
    transit: int = 32 * _MIB
    """In each process: what was fetched last. It is large enough for the read-ahead of two sequential readers."""
    landing: int = 32 * _MIB
    """In each process: what waits to be stored; a crash loses no more."""
    recent: int = 32 * _MIB
    """In all workers: small files that were fetched last."""
    unstored: int = 256 * _MIB
    """In all workers: open files that were written just before, and are not stored therefore."""
    pushed: int = 256 * _MIB
    """In the kernel's page cache: pushed samples that wait for their readers."""
    freed: int = 64 * _MIB
    """In each process: freed memory that is kept for the next payloads."""
    samples: int = UNBOUNDED
    """In the manager: what grows with the number of samples."""


def memory_bounds(limit_bytes: int | None, workers: int) -> MemoryBounds:
    """The bounds by which a mount takes at most `limit_bytes`, which is no less than `least_limit`; None: no limit."""
    if limit_bytes is None:
        return MemoryBounds()
    free = limit_bytes - _of_processes(workers)
    each = free // _each_divisor(workers)
    shares = (_RECENT_SHARE, _UNSTORED_SHARE, _PUSHED_SHARE)
    bounds = each, workers * each, each, each, *(int(free * share) for share in shares), each // 2
    return MemoryBounds(*map(min, (*bounds, int(free * _SAMPLES_SHARE)), MemoryBounds()))


def least_limit(workers: int, sample_max_bytes: int) -> int:
    """The least limit, in whole MiB: each process may have one file of the largest size, or one block, in flight."""
    least = _of_processes(workers) + max(sample_max_bytes, _MIB) * _each_divisor(workers)
    return -(-least // _MIB) * _MIB


def _of_processes(workers: int) -> int:
    # Supervisor, guard and pusher are small, and count as one.
    return (2 * (workers + 1) + 1) * _PROCESS_BYTES


def _each_divisor(workers: int) -> int:
    """What a process may have in flight, and as much in transit and in landing, is one of so many parts."""
    return 2 * (workers + 1) * (_COPIES + 2)
