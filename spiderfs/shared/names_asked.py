"""Which workers have the kernel ask for each name: memory that all processes of a mount share.

In an immutable mount the kernel believes names for good, until a trainer comes that may be given stand-ins. From then
on each worker answers names for the next open alone. What the kernel was told before that it has to forget, and with
the names the pages of files.
"""

from __future__ import annotations

import mmap


class NamesAsked:
    """One row for each worker, which the worker sets, and which one that replaces it finds."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._rows = memoryview(mmap.mmap(-1, workers))

    def set(self, worker: int, asked: bool) -> None:
        self._rows[worker] = asked

    def by(self, worker: int) -> bool:
        return bool(self._rows[worker])

    def by_all(self) -> bool:
        return all(self._rows[: self._workers])
