"""The asynchronous face of a source: time limits, retries, and whether the source is there at all.

Every call runs in a thread, of this process or, for reads, of one beside it (`read_process.py`). A thread that hangs in
the source can only be abandoned, and keeps its slot until the system call returns. So waiting for a slot counts against
the time limit: a source that hangs costs every caller at most that, and each process at most `max_concurrent` threads
(and one more, for the probe). What an abandoned function still stores must be valid by itself.

A call that fails is tried again, after a random pause that grows. A source that is asked for too much
(`SourceThrottled`) is asked until the caller's time is up. For other failures a call has `attempts`, and all calls of a
process a **budget** of repetitions, which answers fill up: a source that fails for all is hardly asked more often than
once.

`reachable` turns False when a call has used up its attempts or time, and the source has answered no one meanwhile, and
True with the next answer ("no such file", "not ready" and a failure of one entry are answers). Meanwhile `watch` asks
the source, one question at a time, and callers should serve what they know. One client belongs to one trio run; its
state changes only between awaits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, TypeVarTuple

import trio

from spiderfs import errors
from spiderfs.linux.worker_threads import WorkerThreads
from spiderfs.sources.single_flight import RecentTimeouts
from spiderfs.sources.source import Delivery, Source, SourceStat, Version

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Read = Callable[[bytes, int, int, Version, Delivery | None], Awaitable[bytes]]
"""An asynchronous `Source.read`. It limits by itself how many reads run at a time, and need not make the delivery."""


# A timer is late by milliseconds, on two busy cores by tenths of a second; beyond this the process did not run.
_STOOD_STILL_S = 2.0
# Repetitions that the calls of a process may make beyond one for each answer.
_REPETITIONS = 500
# A source that has answered within this time is there.
_LATELY_S = 2.0
# How often a scan that takes long asks for a sign of the source.
_SIGN_EVERY_S = 1.0
# The share of the latest call in the mean of latencies.
_LATEST = 0.25


@dataclass(frozen=True)
class SourceLimits:
    """How long and how often the source is asked; a time limit covers a whole call, all its attempts included."""

    timeout_s: float = 30.0
    scan_timeout_s: float = 600.0
    attempts: int = 4
    backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    max_concurrent: int = 64
    probe_interval_s: float = 2.0


def pause_s(attempt: int, limits: SourceLimits, rng: random.Random) -> float:
    """The pause after so many attempts, with full jitter (AWS, "Exponential Backoff And Jitter")."""
    return rng.uniform(0, min(limits.max_backoff_s, limits.backoff_s * 2 ** min(attempt - 1, 30)))


class Patience(NamedTuple):
    """How long one caller may wait: until this time. `answers` is the number of the source's answers when it began."""

    until: float
    answers: int


class SourceClient:
    """Calls `source` in threads, within `limits`.

    `on_event` gets 'source_requests' for every attempt, 'source_retries' for every attempt after a call's first, and
    'source_timeouts' or 'source_errors' for every call that the source did not answer. If `read` is given, it reads in
    place of a thread of this process. `on_reachable` is called at once, and at each change, with whether the source is
    reachable. All clients of a mount share `timeouts`.
    """

    def __init__(
        self,
        source: Source,
        limits: SourceLimits,
        *,
        rng: random.Random,
        on_event: Callable[[str], None],
        on_reachable: Callable[[bool], None] = lambda reachable: None,
        read: Read | None = None,
        timeouts: RecentTimeouts | None = None,
    ) -> None:
        self.source = source
        self._limits = limits
        self._random = rng
        self.timeouts = timeouts or RecentTimeouts()
        self._signing = trio.Lock()
        self._on_event = on_event
        self._threads = WorkerThreads(limits.max_concurrent)
        self._read = read or (lambda *args: self._threads.run(source.read, *args[:4]))
        # The probe has a thread of its own, because hanging calls may hold all others.
        self._probe_thread, self._sign_thread = WorkerThreads(1), WorkerThreads(1)
        self._unreachable = trio.Event()
        self._on_reachable = on_reachable
        # What the process had to say whose place this one takes.
        on_reachable(True)
        self._answers = 0
        self._answered_at_s = -math.inf
        self._repetitions = _REPETITIONS
        self.stat_latency_s: float | None = None
        """How long `stat` takes at present: a mean in which the latest call counts a quarter; None before the first.

        Of a source of undated directories, whose listings take one request for a page of names, `scan` counts too.
        """

    @property
    def max_concurrent(self) -> int:
        """How many calls run at a time; others wait for their turn."""
        return self._limits.max_concurrent

    @property
    def reachable(self) -> bool:
        return not self._unreachable.is_set()

    async def stat(self, path: bytes, timeout_s: float | None = None) -> SourceStat:
        """`timeout_s` as in `call`."""
        began_s = trio.current_time()
        found = await self.call(self.source.stat, path, timeout_s=timeout_s)
        self._note_latency(trio.current_time() - began_s)
        return found

    async def scan(
        self, path: bytes, known: Container[tuple[bytes, int]] = ()
    ) -> tuple[SourceStat, list[tuple[bytes, SourceStat]]]:
        """The attributes of a directory, and then every entry with its own; `known` as in `Source.scan`.

        A scan may take `scan_timeout_s`, but only as long as the source answers other questions in time.
        """
        began_s = trio.current_time()
        found: list[tuple[bytes, SourceStat]] = []
        error: Exception = errors.SourceTimeout(f"the source has not answered within {self._limits.timeout_s:g} s")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._await_silence, nursery.cancel_scope)
            try:
                limit_s = self._limits.scan_timeout_s
                found = await self.call(lambda: list(self.source.scan(path, known)), timeout_s=limit_s)
            except Exception as exc:
                error = exc
            nursery.cancel_scope.cancel()
        if not found:
            raise error
        (_, own), *entries = found
        if self.source.undated_directories:
            self._note_latency(trio.current_time() - began_s)
        return own, entries

    async def _await_silence(self, scope: trio.CancelScope) -> None:
        """Cancel `scope` when the source gives no sign."""
        while True:
            await trio.sleep(min(_SIGN_EVERY_S, self._limits.timeout_s))
            try:
                await self._sign()
            except errors.SourceUnavailable:
                scope.cancel()
                return
            except errors.SourceError:
                pass  # The source has answered, if with an error.

    def _note_latency(self, took_s: float) -> None:
        before_s = self.stat_latency_s
        self.stat_latency_s = took_s if before_s is None else before_s + _LATEST * (took_s - before_s)

    def patience(self) -> Patience:
        """The patience of a caller who begins to wait now, perhaps for other callers first."""
        return Patience(trio.current_time() + self._limits.timeout_s, self._answers)

    async def read(
        self,
        path: bytes,
        offset: int,
        length: int,
        version: Version,
        delivery: Delivery | None = None,
        patience: Patience | None = None,
    ) -> bytes:
        args = (path, offset, length, version, delivery)
        return await self._in_time(self._read, args, patience or self.patience())

    async def ask(self, ask: Callable[[], Awaitable[T]], limited: Callable[[trio.CancelScope], object]) -> T:
        """Ask by `ask`, with the limits and attempts of `read`; `limited` gets the scope, whose deadline may move."""
        return await self._in_time(ask, (), self.patience(), limited=limited)

    async def _sign(self) -> None:
        """Return at once if the source has answered anything lately; else ask whether it is there, as `call` does."""

        async def ask() -> None:
            async with self._signing:
                if self._is_silent():
                    # Scans may hold all other threads.
                    await self._sign_thread.run(self._ask_for_a_sign)

        if self._is_silent():
            await self._in_time(ask, (), self.patience())

    def _is_silent(self) -> bool:
        return trio.current_time() - self._answered_at_s > _LATELY_S

    async def call(self, function: Callable[[*Ts], T], *args: *Ts, timeout_s: float | None = None) -> T:
        """Run in a thread a function that asks the source, and run it again when it raises SourceUnavailable.

        Raises SourceTimeout after `timeout_s` (default: `timeout_s` of the limits). Other errors of the function pass.
        """
        limit_s = self._limits.timeout_s if timeout_s is None else timeout_s
        patience = Patience(trio.current_time() + limit_s, self._answers)
        return await self._in_time(self._threads.run, (function, *args), patience, limit_s)

    async def _in_time(
        self,
        ask: Callable[[*Ts], Awaitable[T]],
        args: tuple[*Ts],
        patience: Patience,
        limit_s: float | None = None,
        limited: Callable[[trio.CancelScope], object] = lambda scope: None,
    ) -> T:
        try:
            while True:
                # This does the same as trio.fail_after without its two generators, which cost 5 us at every fetch.
                with trio.CancelScope(deadline=patience.until) as scope:
                    limited(scope)
                    value = await self._attempts(ask, args)
                    self.answered()
                    return value
                now = trio.current_time()
                if now < scope.deadline + _STOOD_STILL_S:
                    break
                # This process has stood still (SIGSTOP, a suspended machine), and not the source.
                patience = patience._replace(until=now + (limit_s or self._limits.timeout_s))
        except errors.SourceUnavailable as exc:
            self._on_event("source_errors")
            if isinstance(exc, errors.SourceEntryFailed):
                self.answered()
            else:
                self._not_answered(patience)
            raise
        except errors.SourceError:
            self.answered()
            raise
        raise self.timed_out(patience, limit_s)

    def timed_out(self, patience: Patience, limit_s: float | None = None) -> errors.SourceTimeout:
        """The error for a caller whose patience has ended, whether its question was asked or never had its turn."""
        self._on_event("source_timeouts")
        self._not_answered(patience)
        return errors.SourceTimeout(f"the source has not answered within {limit_s or self._limits.timeout_s:g} s")

    async def watch(self) -> None:
        """For ever: while the source is unreachable, ask it every `probe_interval_s` whether it is back."""
        while True:
            await self._unreachable.wait()
            await trio.sleep(self._limits.probe_interval_s)
            if not self.reachable:
                await self._probe()

    async def _probe(self) -> None:
        with trio.move_on_after(self._limits.timeout_s):
            try:
                await self._probe_thread.run(self._ask_for_a_sign)
            except errors.SourceUnavailable:
                return
            except errors.SourceError:
                pass  # The source has answered, if with an error.
            self.answered()

    def _ask_for_a_sign(self) -> None:
        # An NFS client may answer stat from the attributes that it remembers. It never answers statvfs so, but statvfs
        # does not notice that a local root was removed.
        self.source.stat(b"")
        self.source.statvfs()

    async def _attempts(self, ask: Callable[[*Ts], Awaitable[T]], args: tuple[*Ts]) -> T:
        attempt = 1
        while True:
            self._on_event("source_requests")
            try:
                return await ask(*args)
            except errors.SourceNotReady:
                self.answered()
            except errors.SourceThrottled:
                # Answers to others say that the source is there; one that refuses everybody is as good as away.
                pass
            except errors.SourceUnavailable:
                if attempt >= self._limits.attempts or self._repetitions < 1:
                    raise
                self._repetitions -= 1
            await trio.sleep(pause_s(attempt, self._limits, self._random))
            self._on_event("source_retries")
            attempt += 1

    def answered(self) -> None:
        """Note that the source has answered, perhaps a question that was not asked through this client."""
        self._answers += 1
        self._answered_at_s = trio.current_time()
        self._repetitions = min(_REPETITIONS, self._repetitions + 1)
        if self._unreachable.is_set():
            self._unreachable = trio.Event()
            self._on_reachable(True)

    def _not_answered(self, patience: Patience) -> None:
        # An answer to anybody since this call began says that the source is there, and only this call was unlucky.
        if self._answers == patience.answers:
            self._unreachable.set()
            self._on_reachable(False)
