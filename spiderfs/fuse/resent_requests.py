"""Requests that the kernel hands out again: which of them a worker has in hand, in memory that outlives the worker.

A worker that dies leaves requests unanswered, and the kernel hands them to the next worker (`Kernel.resend`), which may
die of the same one. So each worker notes the resent requests that it holds, and which it has begun. When it has died,
the supervisor reads its notes, counts the deaths at each request (`daemon/restarts.py`) and publishes the counts. A
worker begins a request with a published count alone: behind what else waits, and when no other of this kind is begun,
so that the next death points at one request. At the limit it answers with an error instead.

Only the worker writes its notes, which are read when it is dead; only the supervisor writes the counts, before the
kernel hands anything out again. So a dying process can spoil no more than its own notes. A first request is not noted,
unless a binding does not get the kernel's number of it: then each is, under a number that follows from what is asked.
"""

from __future__ import annotations

import mmap
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import trio

from spiderfs.errors import DeadlyRequest
from spiderfs.metrics import Counters

T = TypeVar("T")

# A request that is begun alone first lets others be answered, so that the mount gets on between two deaths: the first
# time after the first death, then twice as long after each further one, up to the longest. (With 0.02 s after each,
# readers on a busy machine got 3 files in the 20 s that it took to refuse the request.)
FIRST_BEHIND_S, LONGEST_BEHIND_S = 0.025, 1.0
# Counts that are published at most, those of the latest deaths: a worker begins no more requests than these.
PUBLISHED = 512
_CELL_BYTES = 8
# A note is a request's number, 0 where there is none, and whether the request is begun.
_NOTE_CELLS = 2
_WAITING, _BEGUN = 0, 1


class ResentRequests:
    """The notes of all workers of one mount and the published counts; make it before the workers are forked."""

    def __init__(self, workers: int, held: int, refused_after: int) -> None:
        """`held`: how many requests a worker holds at most. `refused_after`: see `HeldRequests.answer`."""
        self._refused_after = refused_after
        self._row_cells = _NOTE_CELLS * held
        # How many counts there are, then the number of each request and its deaths, then the rows of notes.
        self._rows_at = 1 + 2 * PUBLISHED
        cells = self._rows_at + workers * self._row_cells
        self._map = mmap.mmap(-1, cells * _CELL_BYTES)
        self._cells = memoryview(self._map).cast("Q")

    def publish(self, deaths: Mapping[int, int]) -> None:
        """Have workers begin these requests alone, or refuse them; the latest comes last."""
        latest = list(deaths.items())[-PUBLISHED:]
        self._cells[0] = len(latest)
        for place, (number, count) in enumerate(latest):
            self._cells[1 + 2 * place], self._cells[2 + 2 * place] = number, count

    def held_by(self, worker: int) -> tuple[set[int], set[int]]:
        """The numbers of the requests that a worker which has died had begun, and of those that it held beside them."""
        notes = self._row(worker).tolist()
        held = [(number, state) for number, state in zip(notes[::2], notes[1::2], strict=True) if number]
        begun = {number for number, state in held if state == _BEGUN}
        return begun, {number for number, _ in held} - begun

    def forget(self, worker: int) -> None:
        """Empty the notes of a worker that has died, for the next one in its place."""
        row = self._row(worker)
        for cell in range(len(row)):
            row[cell] = 0

    def of_worker(self, worker: int, counters: Counters) -> HeldRequests:
        published = self._cells[: self._rows_at].toreadonly()
        return HeldRequests(self._row(worker), published, self._refused_after, counters)

    def _row(self, worker: int) -> memoryview:
        first = self._rows_at + worker * self._row_cells
        return self._cells[first : first + self._row_cells]


class HeldRequests:
    """One worker's notes, within one trio run."""

    def __init__(self, notes: memoryview, published: memoryview, refused_after: int, counters: Counters) -> None:
        self._notes = notes
        self._published = published
        self._refused_after = refused_after
        self._counters = counters
        self._free = list(range(0, len(notes), _NOTE_CELLS))
        self._alone = trio.Lock()
        # Published requests that this worker has answered or refused. Where a number follows from what is asked, the
        # next one who asks it is treated like anybody.
        self._settled: set[int] = set()

    async def answer(self, number: int, what: str, handle: Callable[[], Awaitable[T]]) -> T:
        """Return what `handle` does, with a note of the request until it has; `what` names the request in errors.

        Raises DeadlyRequest, and handles nothing, if `refused_after` workers have died at this request. A note outlives
        a BaseException, which ends the worker.
        """
        deaths = 0 if number in self._settled else self._deaths_at(number)
        if deaths >= self._refused_after:
            self._settled.add(number)
            self._counters.add("deadly_requests")
            raise DeadlyRequest(f"{what}: {deaths} workers have died at this request, so it is answered with an error")
        if not self._free:
            return await handle()
        note = self._free.pop()
        self._notes[note], self._notes[note + 1] = number, _WAITING if deaths else _BEGUN
        try:
            if deaths:
                await trio.sleep(min(FIRST_BEHIND_S * 2.0 ** (deaths - 1), LONGEST_BEHIND_S))
                async with self._alone:
                    self._notes[note + 1] = _BEGUN
                    answer = await handle()
            else:
                answer = await handle()
        except Exception:
            self._forget(note, suspect=bool(deaths))
            raise
        self._forget(note, suspect=bool(deaths))
        return answer

    def _deaths_at(self, number: int) -> int:
        """The published count; 0 for nearly every request."""
        count = self._published[0]
        if not count:
            return 0
        cells = self._published[1 : 1 + 2 * count].tolist()
        return dict(zip(cells[::2], cells[1::2], strict=True)).get(number, 0)

    def _forget(self, note: int, suspect: bool) -> None:
        if suspect:
            self._settled.add(self._notes[note])
        self._notes[note] = 0
        self._free.append(note)
