"""A manager's link to those of the other nodes: what it has to say goes out, what they say comes in, while it can.

One task sends and one hears, each in a thread. What waits to be sent has a limit, and the oldest of it leaves; who can
wait himself until the others have heard what was said before offers it instead. What was on its way when the server
failed is not sent again, for it may have arrived. After a failure the server is not asked for a while, longer after
each further one; a server whose memory is full may fail in one direction alone. The log hears of it once when one of
them fails, and once when both work again.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import trio

from spiderfs.cluster.stream import BEGINNING, QUESTION, Entry, Stream
from spiderfs.errors import StreamLost
from spiderfs.metrics import Counters

log = logging.getLogger(__name__)

# What waits to be sent: a minute of 1,000 rows of 64 numbers a second. And about how much is sent at a time.
WAITING_BYTES, SENT_BYTES = 8 << 20, 1 << 20
PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
# How long the server waits until something comes. A list that is declared meanwhile is asked for after that.
WAIT_S = 0.5
# Where nothing is to be heard, it is asked this often whether anything is: nobody says that a node became a member.
LOOK_S = 1.0


Wanted = Callable[[], Collection[str]]
Heard = Callable[[str, Sequence[bytes]], Awaitable[bool]]
_Found = TypeVar("_Found")


class LinkStatus(NamedTuple):
    url: str
    up: bool
    """Whether the server has done what it was asked last, if it was asked."""


class _Outgoing(NamedTuple):
    entry: Entry
    rows: int


@dataclass
class _Direction:
    """How often asking the server has failed since it worked last, and until when it is not asked."""

    failures: int = 0
    rests_until: float = -math.inf
    is_told: bool = False
    """Whether the log has heard of a failure, and nothing that is of use has worked since."""

    def failed(self, now: float) -> None:
        self.rests_until = now + min(PAUSE_S * 2.0 ** min(self.failures, 9), LONGEST_PAUSE_S)
        self.failures += 1


class Link:
    def __init__(self, url: str, counters: Counters) -> None:
        self._url = url
        self._stream = Stream(url)
        self._counters = counters
        self._waiting: deque[_Outgoing] = deque()
        self._waiting_bytes = 0
        self._after: dict[str, str] = {}
        """The last message that was heard of each stream."""
        self._looks_at = 0.0
        self._to_send, self._to_look = trio.Event(), trio.Event()
        self._sending, self._hearing = _Direction(), _Direction()

    @property
    def _up(self) -> bool:
        return not self._sending.failures and not self._hearing.failures

    @property
    def _is_told(self) -> bool:
        return self._sending.is_told or self._hearing.is_told

    def status(self) -> LinkStatus:
        return LinkStatus(self._url, self._up)

    def send(self, key: str, message: bytes, rows: int = 0) -> None:
        """Have a message sent to a stream, after those of earlier calls; with it go so many rows of trainers."""
        self._waiting.append(_Outgoing(Entry(key, message), rows))
        self._waiting_bytes += len(message)
        while self._waiting_bytes > WAITING_BYTES and len(self._waiting) > 1:
            self._give_up([self._next()])
        self._to_send.set()

    async def offer(self, key: str, message: bytes, few: int) -> bool:
        """Send a message at once, beside those that wait, if its stream has less than `few`; whether it was taken."""
        if self._sending.failures:
            return False
        taken = await self._asked(self._sending, partial(self._stream.append_to_few, Entry(key, message), few))
        if taken is None:
            # Whether the server works again is asked there.
            self._to_send.set()
        return bool(taken)

    def look_again(self) -> None:
        """What this manager wants to hear may be other streams from now on."""
        self._to_look.set()

    async def run(self, wanted: Wanted, heard: Heard) -> None:
        """Send, and tell `heard` what comes in the streams that `wanted` names now, those of one stream at a time.

        `heard` says whether the messages are done with: then nobody else hears them.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_all)
                nursery.start_soon(self._hear_all, wanted, heard)
        finally:
            self._stream.close()

    async def _send_all(self) -> None:
        size = 0
        while True:
            if self._sending.failures:
                # Nothing is risked before the server takes something again.
                await trio.sleep_until(self._sending.rests_until)
                question = partial(self._stream.append, [Entry(QUESTION, bytes(size))])
                await self._asked(self._sending, question, is_of_use=False)
                continue
            await self._to_send.wait()
            if self._sending.failures:
                continue
            some: list[_Outgoing] = []
            size = 0
            while self._waiting and size < SENT_BYTES:
                some.append(self._next())
                size += len(some[-1].entry.content)
            if not self._waiting:
                self._to_send = trio.Event()
            if not some:
                continue
            if await self._asked(self._sending, partial(self._stream.append, [sent.entry for sent in some])) is None:
                self._give_up(some)
            else:
                self._counters.add("cluster_rows_sent", sum(sent.rows for sent in some))

    async def _hear_all(self, wanted: Wanted, heard: Heard) -> None:
        while True:
            self._to_look = trio.Event()
            self._after = {key: self._after.get(key, BEGINNING) for key in wanted()}
            if not self._after:
                self._hearing.failures = 0
                with trio.move_on_after(LOOK_S):
                    await self._to_look.wait()
                continue
            await trio.sleep_until(self._hearing.rests_until)
            found = await self._asked(self._hearing, partial(self._stream.read, self._after, WAIT_S))
            if found is not None:
                await self._begin_anew({key: last for key, last in self._after.items() if key not in found})
            for key, messages in (found or {}).items():
                self._after[key] = messages[-1].number
                if await heard(key, [message.content for message in messages]):
                    numbers = [message.number for message in messages]
                    await self._asked(self._hearing, partial(self._stream.remove, key, numbers))

    async def _begin_anew(self, silent: dict[str, str]) -> None:
        """Hear those of the silent streams from their beginning that the server has lost since the last message."""
        heard = {key: last for key, last in silent.items() if last != BEGINNING}
        if heard and trio.current_time() >= self._looks_at:
            self._looks_at = trio.current_time() + WAIT_S
            lost = await self._asked(self._hearing, partial(self._stream.begun_anew, heard))
            self._after.update(dict.fromkeys(lost or (), BEGINNING))

    async def _asked(self, direction: _Direction, call: Callable[[], _Found], is_of_use: bool = True) -> _Found | None:
        """What the server answers; None if it does not do what it is asked."""
        try:
            found = await trio.to_thread.run_sync(call, abandon_on_cancel=True)
        except StreamLost as exc:
            if not self._is_told:
                log.warning("%s fails (%s): this mount goes on with the scores that it has", self._url, exc)
            direction.is_told = True
            direction.failed(trio.current_time())
            return None
        direction.failures = 0
        if direction.is_told and is_of_use:
            # A server may take the question, and no message: that is no return.
            direction.is_told = False
            if not self._is_told:
                log.warning("%s is back: what the nodes of a training learn is shared again", self._url)
        return found

    def _next(self) -> _Outgoing:
        taken = self._waiting.popleft()
        self._waiting_bytes -= len(taken.entry.content)
        return taken

    def _give_up(self, some: Sequence[_Outgoing]) -> None:
        self._counters.add("cluster_rows_lost", sum(lost.rows for lost in some))
