"""Sharing identical requests: while one is in flight, callers of the same wait for its answer.

**Questions that the source has just left unanswered** are known to all processes of a mount, by memory that they share.
Readers of one page, or of one name, wait for each other in the kernel: it sends the second reader's question when the
first reader's has failed. If the source were asked each of these questions for the whole time limit, the last of ten
readers would wait ten times as long as allowed. So if a question has just been asked in vain, the next one who asks it
gets the error at once.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

import trio

from spiderfs.errors import SourceTimeout
from spiderfs.shared.shared_memory import SharedSlots

# The next reader's question follows one reader's error within microseconds, or 0.1 s on a busy machine. The source is
# asked the same thing no more often than this, too.
SHARED_S = 1.0
_SLOTS = 4096
_HASH_BITS = (1 << 64) - 1


T = TypeVar("T")


class RecentTimeouts:
    """Make this before the fork: only processes with the same hash seed find each other's notes.

    Two questions may share a slot; then only the later one is known.
    """

    def __init__(self) -> None:
        self._timeouts = SharedSlots(_SLOTS, "d")

    def add(self, question: Hashable) -> None:
        """Note that someone has waited in vain for the answer to this question."""
        self._timeouts.put(hash(question) & _HASH_BITS, time.monotonic())

    def has(self, question: Hashable) -> bool:
        """Whether someone has just waited in vain for the answer to this question."""
        timeout = self._timeouts.get(hash(question) & _HASH_BITS)
        return timeout is not None and time.monotonic() - timeout[0] < SHARED_S


class _Flight:
    """One question in flight: its value or its error, once `ended` is set; with neither, the question was cancelled."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.value: list[Any] = []
        self.error: Exception | None = None


class SingleFlight:
    """Belongs to one trio run; `timeouts` are shared by all processes of a mount."""

    def __init__(self, timeouts: RecentTimeouts) -> None:
        self._timeouts = timeouts
        self._flights: dict[Hashable, _Flight] = {}

    @property
    def busy(self) -> bool:
        """Whether any question is in flight."""
        return bool(self._flights)

    def has(self, key: Hashable) -> bool:
        """Whether the question with this key is in flight."""
        return key in self._flights

    async def run(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """Run `ask`, and share its result or error with all callers that come with the same key while it runs.

        The first caller runs its `ask`. A caller that comes just after a timeout, in any process, gets that timeout
        too. If the caller that runs `ask` is cancelled, one of those that wait takes over, and runs its own `ask`.
        """
        while (flight := self._flights.get(key)) is not None:
            await flight.ended.wait()
            if flight.error is not None:
                # The traceback begins again each time: otherwise it would grow by a frame for every one who waits.
                raise flight.error.with_traceback(None)
            if flight.value:
                value: T = flight.value[0]
                return value
        if self._timeouts.has(key):
            raise SourceTimeout("the source has just left this unanswered")
        mine = self._flights[key] = _Flight()
        try:
            mine.value.append(await ask())
        except SourceTimeout as exc:
            self._timeouts.add(key)
            mine.error = exc
            raise
        except Exception as exc:
            mine.error = exc
            raise
        finally:
            del self._flights[key]
            mine.ended.set()
        result: T = mine.value[0]
        return result
