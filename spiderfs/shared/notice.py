"""How workers hear that the manager has published a file: by an eventfd each, so that none has to look for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import trio

from spiderfs.shared.attached_trainers import Edition, edition_of

T = TypeVar("T")


class Notice:
    """All processes of a mount share it, so make it before the fork; a worker that replaces another one takes over."""

    def __init__(self, workers: int) -> None:
        self._events = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(workers)]

    def after(self, publish: Callable[[T], None]) -> Callable[[T], None]:
        """A function that publishes, and then wakes each worker, also where publishing has failed halfway."""

        def published(what: T) -> None:
            try:
                publish(what)
            finally:
                for event in self._events:
                    os.eventfd_write(event, 1)

        return published

    async def follow(self, worker: int, takers: Mapping[Path, Callable[[], None]]) -> None:
        """For ever: call the function of each file at once, and at each notice after which the file is another one."""
        seen: dict[Path, Edition | None] = {}
        while True:
            for path, take_over in takers.items():
                # A file may come later, with the manager.
                there = edition_of(path)
                if there != seen.get(path):
                    seen[path] = there
                    take_over()
            await self._taken(worker)

    async def _taken(self, worker: int) -> None:
        await trio.lowlevel.wait_readable(self._events[worker])
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._events[worker])
