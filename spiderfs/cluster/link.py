"""A manager's link to the managers of the other nodes, and the messages that they exchange.

One task sends and one receives, each in a thread. The queue of unsent messages is bounded and drops its oldest ones; a
caller that can wait until the others have received offers its message instead. What was in flight when the server
failed is not sent again, because it may have arrived. After a failure the link backs off; a server whose memory is full
may fail in one direction alone. The first failure and the recovery are logged once each.

**Messages** are frames like those of the hook's protocol, and name samples by their index in the list, which is the
same on all nodes. Rows to score are a `Batch` of the samples that were served, and `RankEnded` follows the last one of
an epoch; `SharedScores` and `SharedHub` are the results. A `PlanPiece` and a `Progress` describe those samples of a
plan that the receiving node keeps for the sender's job; the `list` of a `Progress` names the owner of the plan.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import trio

from spiderfs.cluster.stream import BEGINNING, QUESTION, Stream, StreamEntry
from spiderfs.errors import ProtocolError, StreamLost
from spiderfs.metrics import Counters
from spiderfs.protocol import Batch, Decoder, Limits, Message, Progress
from spiderfs.protocol.messages import Float32s, Uint32s, demand
from spiderfs.sources.members import salt_of


@dataclass(frozen=True, eq=False)
class SharedScores(Message):
    """Scores of different samples, made of embeddings of this dimension."""

    TYPE = "shared_scores"
    dimension: int
    ids: Uint32s
    scores: Float32s

    def check(self, limits: Limits) -> None:
        demand(0 < self.dimension <= limits.dimension, f"embeddings of dimension {self.dimension}")
        demand(len(self.scores) == len(self.ids) == len(np.unique(self.ids)), "not one score for each sample")
        demand(bool((np.isfinite(self.scores) & (self.scores > 0)).all()), "a score is not above 0")


@dataclass(frozen=True, eq=False)
class SharedHub(Message):
    """A hub, and its neighbours, nearest first."""

    TYPE = "shared_hub"
    id: int
    neighbours: Uint32s
    distances: Float32s

    def check(self, limits: Limits) -> None:
        demand(len(self.neighbours) == len(self.distances), "not one distance for each neighbour")
        demand(bool(np.isfinite(self.distances).all()), "a distance is not finite")


@dataclass(frozen=True)
class RankEnded(Message):
    """A rank has ended this epoch: its rows of it have been sent."""

    TYPE = "rank_ended"
    rank: int
    epoch: int


@dataclass(frozen=True, eq=False)
class PlanPiece(Message):
    """Draws of the epoch that a reader begins, or goes on with, at the position `start`: those from `first` on.

    There are so many `draws` in all, and the pieces come in order. With none the reader has no plan any more.
    """

    TYPE = "plan_piece"
    reader: str
    epoch: int
    start: int
    draws: int
    first: int
    order: Uint32s

    def check(self, limits: Limits) -> None:
        demand(self.start <= self.draws <= limits.samples, f"position {self.start} in a plan of {self.draws}")
        demand(self.first + len(self.order) <= self.draws, "draws beyond the end of a plan")
        demand(bool(len(self.order)) or not self.draws, "a piece of no draws")


_SAID = (Batch, RankEnded, SharedScores, SharedHub, PlanPiece, Progress)
_KINDS: dict[str, type[Message]] = {kind.TYPE: kind for kind in _SAID}


def unpacked(frames: bytes, samples: int) -> list[Message]:
    """The messages of these frames about a list of so many samples; raises ProtocolError."""
    decoder = Decoder(kinds=_KINDS)
    found: list[Message] = []
    for message in decoder.feed(frames):
        match message:
            case Batch(indices=named) | SharedScores(ids=named) | PlanPiece(order=named):
                largest = int(named.max(initial=0))
            case SharedHub(id=hub, neighbours=near):
                largest = max(hub, int(near.max(initial=0)))
            case RankEnded() | Progress():
                largest = 0
            case _:
                raise message if isinstance(message, ProtocolError) else ProtocolError("no message of another node")
        demand(largest < samples, f"sample {largest} of a list of {samples}", "index")
        found.append(message)
    demand(bool(found) and not decoder.in_frame, "a frame that breaks off")
    return found


log = logging.getLogger(__name__)

# What waits to be sent: a minute of 1,000 rows of 64 numbers a second. And about how much is sent at a time.
WAITING_BYTES, SENT_BYTES = 8 << 20, 1 << 20
PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
# How long the server waits until something comes. A list that is declared meanwhile is asked for after that.
WAIT_S = 0.5
# Where nothing is to be received, it is asked this often whether anything is: no one says that a node became a member.
LOOK_S = 1.0


Wanted = Callable[[], Collection[str]]
Receive = Callable[[str, Sequence[bytes]], Awaitable[bool]]
_Found = TypeVar("_Found")


class LinkStatus(NamedTuple):
    url: str
    up: bool
    """Whether the server has done what it was asked last, if it was asked."""


class _Outgoing(NamedTuple):
    entry: StreamEntry
    rows: int


@dataclass
class _Direction:
    """How often asking the server has failed since it worked last, and until when it is not asked."""

    failures: int = 0
    rests_until: float = -math.inf
    is_logged: bool = False
    """Whether a failure was logged, and nothing that is of use has worked since."""

    def failed(self, now: float) -> None:
        self.rests_until = now + min(PAUSE_S * 2.0 ** min(self.failures, 9), LONGEST_PAUSE_S)
        self.failures += 1


class Link:
    def __init__(self, url: str, counters: Counters, identity: str = "") -> None:
        """`identity` is that of the source between nodes; mounts of another one use other streams."""
        self._url, self._of_source = url, f":{salt_of(identity):016x}" if identity else ""
        self._stream = Stream(url)
        self._counters = counters
        self._waiting: deque[_Outgoing] = deque()
        self._waiting_bytes = 0
        self._after: dict[str, str] = {}
        """The last message that was received of each stream."""
        self._looks_at = -math.inf
        self._to_send, self._to_look = trio.Event(), trio.Event()
        self._sending, self._receiving = _Direction(), _Direction()

    @property
    def _up(self) -> bool:
        return not self._sending.failures and not self._receiving.failures

    @property
    def _is_logged(self) -> bool:
        return self._sending.is_logged or self._receiving.is_logged

    def status(self) -> LinkStatus:
        return LinkStatus(self._url, self._up)

    def send(self, key: str, message: bytes, rows: int = 0) -> None:
        """Have a message sent to a stream, after those of earlier calls; with it go so many rows of trainers."""
        self._waiting.append(_Outgoing(StreamEntry(key + self._of_source, message), rows))
        self._waiting_bytes += len(message)
        while self._waiting_bytes > WAITING_BYTES and len(self._waiting) > 1:
            self._give_up([self._next()])
        self._to_send.set()

    async def offer(self, key: str, message: bytes, few: int) -> bool:
        """Send a message at once, beside those that wait, if its stream has less than `few`; whether it was taken."""
        if self._sending.failures:
            return False
        taken = await self._asked(
            self._sending, partial(self._stream.append_to_few, StreamEntry(key + self._of_source, message), few)
        )
        if taken is None:
            # Whether the server works again is asked there.
            self._to_send.set()
        return bool(taken)

    def look_again(self) -> None:
        """This manager may want other streams from now on."""
        self._to_look.set()

    async def run(self, wanted: Wanted, receive: Receive) -> None:
        """Send, and pass to `receive` what comes in the streams that `wanted` names now, those of one stream at a time.

        `receive` returns whether the messages are done with: then no one else receives them.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_all)
                nursery.start_soon(self._receive_all, wanted, receive)
        finally:
            self._stream.close()

    async def _send_all(self) -> None:
        size = 0
        while True:
            if self._sending.failures:
                # Nothing is risked before the server takes something again.
                await trio.sleep_until(self._sending.rests_until)
                question = partial(self._stream.append, [StreamEntry(QUESTION, bytes(size))])
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

    async def _receive_all(self, wanted: Wanted, receive: Receive) -> None:
        while True:
            self._to_look = trio.Event()
            self._after = {key: self._after.get(key, BEGINNING) for key in (one + self._of_source for one in wanted())}
            if not self._after:
                self._receiving.failures = 0
                with trio.move_on_after(LOOK_S):
                    await self._to_look.wait()
                continue
            await trio.sleep_until(self._receiving.rests_until)
            found = await self._asked(self._receiving, partial(self._stream.read, self._after, WAIT_S))
            if found is not None:
                await self._receive_again({key: last for key, last in self._after.items() if key not in found})
            for key, messages in (found or {}).items():
                self._after[key] = messages[-1].number
                if await receive(key.removesuffix(self._of_source), [message.content for message in messages]):
                    numbers = [message.number for message in messages]
                    await self._asked(self._receiving, partial(self._stream.remove, key, numbers))

    async def _receive_again(self, silent: dict[str, str]) -> None:
        """Receive those of the silent streams from their beginning that the server has lost since the last message."""
        begun = {key: last for key, last in silent.items() if last != BEGINNING}
        if begun and trio.current_time() >= self._looks_at:
            self._looks_at = trio.current_time() + WAIT_S
            lost = await self._asked(self._receiving, partial(self._stream.lost_since, begun))
            self._after.update(dict.fromkeys(lost or (), BEGINNING))

    async def _asked(self, direction: _Direction, call: Callable[[], _Found], is_of_use: bool = True) -> _Found | None:
        """What the server answers; None if it does not do what it is asked."""
        try:
            found = await trio.to_thread.run_sync(call, abandon_on_cancel=True)
        except StreamLost as exc:
            if not self._is_logged:
                log.warning("%s fails (%s): this mount continues with its scores", self._url, exc)
            direction.is_logged = True
            direction.failed(trio.current_time())
            return None
        direction.failures = 0
        if direction.is_logged and is_of_use:
            # A server may take the question, and no message: that is no return.
            direction.is_logged = False
            if not self._is_logged:
                log.warning("%s is back: the nodes of a training run share scores again", self._url)
        return found

    def _next(self) -> _Outgoing:
        taken = self._waiting.popleft()
        self._waiting_bytes -= len(taken.entry.content)
        return taken

    def _give_up(self, some: Sequence[_Outgoing]) -> None:
        self._counters.add("cluster_rows_lost", sum(lost.rows for lost in some))
