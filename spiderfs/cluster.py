"""Several nodes: managers send each other rows, scores and plans, and report that they are there, by streams of Redis.

**The link** of a manager: one task sends and one receives, each in a thread. The queue of unsent messages is bounded
and drops its oldest ones; a caller that can wait offers its message instead. What was in flight when the server failed
is not sent again, because it may have arrived. After a failure the link backs off, in each direction alone: a server
whose memory is full may still send. **Messages** are frames like those of the hook's protocol; they name samples by
their index in the list, which is the same on all nodes. **Streams** are for threads. Each call has a time limit, and
none is repeated. A stream keeps STREAM_BYTES of its latest messages, whoever reads them, and expires an hour after its
last one. The server should not evict by itself (`noeviction`, its default).

**Beats.** Each node adds its URL to a stream every BEAT_S, and reads what was added since. A node has left when it
reports so, or when none of its beats comes between this node's own beats, MISSED times in a row. So a server that is
down changes nothing, and when it is back all nodes have reported before one of them is missed. No node's clock counts;
the server's clock decides what is too old for a node that joins.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import trio

from spiderfs.errors import ProtocolError, StreamLost
from spiderfs.metrics import Counters
from spiderfs.protocol import Batch, Decoder, Float32s, Limits, Message, Progress, Uint32s, demand
from spiderfs.sources.members import other_source, salt_of
from spiderfs.sources.node_names import Roll, is_web_server
from spiderfs.sources.redis_client import SHAPES, RedisClient, errors


class SharedScores(Message, kind="shared_scores"):
    """Scores of different samples, made of embeddings of this dimension."""

    dimension: int
    ids: Uint32s
    scores: Float32s

    def check(self, limits: Limits) -> None:
        demand(0 < self.dimension <= limits.dimension, f"embeddings of dimension {self.dimension}")
        demand(len(self.scores) == len(self.ids) == len(np.unique(self.ids)), "not one score for each sample")
        demand(bool((np.isfinite(self.scores) & (self.scores > 0)).all()), "a score is not above 0")


class SharedHub(Message, kind="shared_hub"):
    """A hub, and its neighbours, nearest first."""

    id: int
    neighbours: Uint32s
    distances: Float32s

    def check(self, limits: Limits) -> None:
        demand(len(self.neighbours) == len(self.distances), "not one distance for each neighbour")
        demand(bool(np.isfinite(self.distances).all()), "a distance is not finite")


class RankEnded(Message, kind="rank_ended"):
    """A rank has ended this epoch: its rows of it have been sent."""

    rank: int
    epoch: int


class PlanPiece(Message, kind="plan_piece"):
    """Draws of the epoch that a reader begins, or goes on with, at the position `start`: those from `first` on.

    There are so many `draws` in all, and the pieces come in order. With none the reader has no plan any more.
    """

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
    def _is_logged(self) -> bool:
        return self._sending.is_logged or self._receiving.is_logged

    def status(self) -> LinkStatus:
        return LinkStatus(self._url, not self._sending.failures and not self._receiving.failures)

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
                # The server may have lost a silent stream since its last message: then it begins again.
                begun = {key: last for key, last in self._after.items() if key not in found and last != BEGINNING}
                if begun and trio.current_time() >= self._looks_at:
                    self._looks_at = trio.current_time() + WAIT_S
                    lost = await self._asked(self._receiving, partial(self._stream.lost_since, begun))
                    self._after.update(dict.fromkeys(lost or (), BEGINNING))
            for key, messages in (found or {}).items():
                self._after[key] = next(reversed(messages))
                if await receive(key.removesuffix(self._of_source), [*messages.values()]):
                    await self._asked(self._receiving, partial(self._stream.remove, key, [*messages]))

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


# A server in the same network answers within a millisecond.
TIMEOUT_S = 2.0
STREAM_BYTES = 32 << 20
KEPT_S = 3600
# Messages of each stream that are read at a time: 16,000 rows in batches of 128.
AT_A_TIME = 128
BEGINNING = "0-0"
# A stream for messages that show whether the server takes such.
QUESTION = "spiderfs:question"
_FIELD = b"m"
_WRONG_TYPE = "WRONGTYPE"


class StreamEntry(NamedTuple):
    """A message that is added to the stream `key`."""

    key: str
    content: bytes


class Stream:
    def __init__(self, url: str) -> None:
        """`url` is that of the option `cluster`; nothing is asked yet."""
        self._redis = RedisClient(url)
        self._reported: set[str] = set()

    def append(self, entries: Sequence[StreamEntry]) -> int:
        """Add messages, and return how many; raises StreamLost, and some may have been added then."""

        def add(redis: Any) -> Any:
            calls = redis.pipeline(transaction=False)
            for key, content in entries:
                # A question whether it would be taken is not kept.
                most = max(2, STREAM_BYTES // len(content)) if key != QUESTION else 0
                calls.xadd(key, {_FIELD: content}, maxlen=most, approximate=most > 0)
            for key in dict.fromkeys(entry.key for entry in entries):
                calls.expire(key, KEPT_S)
            # What the library raises for a call of several has the whole message in it.
            return calls.execute(raise_on_error=False)

        for answer in self.done(add):
            if isinstance(answer, Exception):
                raise StreamLost(str(answer)) from answer
        return len(entries)

    def append_to_few(self, entry: StreamEntry, few: int) -> bool:
        """Add a message if its stream has less than `few`, and return whether it was added; raises StreamLost.

        A user who may not ask how many there are adds it.
        """

        def has_room(redis: Any) -> bool:
            (answer,) = self._described(redis, [entry.key])
            return isinstance(answer, Exception) or answer["length"] < few

        return self.done(has_room) and self.append([entry]) > 0

    def read(self, after: Mapping[str, str], wait_s: float) -> dict[str, dict[str, bytes]]:
        """What has come in each stream since the message with this number, waiting so long for it if there is nothing.

        In their order, by the numbers that the server has given them. `wait_s` is shorter than TIMEOUT_S. A key that is
        no stream is left out beside others, and the log says so once. Raises StreamLost.
        """

        def read(redis: Any, after: Mapping[str, str]) -> dict[str, dict[str, bytes]]:
            answer = redis.xread(dict(after), AT_A_TIME, int(wait_s * 1000)) or ()
            return {
                key.decode(): {number.decode(): b"".join([fields.get(_FIELD, b"")]) for number, fields in some}
                for key, some in answer
                if some
            }

        found: dict[str, dict[str, bytes]]
        try:
            found = self.done(partial(read, after=after))
        except StreamLost as exc:
            streams = self._streams(after) if len(after) > 1 and str(exc).startswith(_WRONG_TYPE) else {}
            if not streams:
                raise
            found = self.done(partial(read, after=streams))
        return found

    def _streams(self, after: Mapping[str, str]) -> dict[str, str]:
        """Those of these keys that may be streams."""

        def kinds(redis: Any) -> list[bytes]:
            calls = redis.pipeline(transaction=False)
            for key in after:
                calls.type(key)
            return list(calls.execute())

        may_be = dict(zip(after, (kind in (b"stream", b"none") for kind in self.done(kinds)), strict=True))
        for key in after:
            if not may_be[key] and key not in self._reported:
                self._reported.add(key)
                log.warning("nothing is received from %s: the server has something else in this name", key)
        return {key: number for key, number in after.items() if may_be[key]}

    def remove(self, key: str, numbers: Sequence[str]) -> int:
        """Remove messages of a stream, and return how many there were; raises StreamLost."""
        removed: int = self.done(lambda redis: redis.xdel(key, *numbers))
        return removed

    def lost_since(self, after: Mapping[str, str]) -> list[str]:
        """The streams that the server has lost since the message with this number; raises StreamLost.

        Its numbers begin with the time. If its clock is behind, those of new messages are smaller than that one. A user
        who may not ask gets none.
        """

        def is_lost(number: str, answer: Any) -> bool:
            if isinstance(answer, Exception):
                return "no such key" in str(answer)
            return place(answer["last-generated-id"].decode()) < place(number)

        def lost(redis: Any) -> list[str]:
            answers = zip(after.items(), self._described(redis, after), strict=True)
            return [key for (key, number), answer in answers if is_lost(number, answer)]

        found: list[str] = self.done(lost)
        return found

    def _described(self, redis: Any, keys: Iterable[str]) -> list[Any]:
        """What the server says of these streams: for each a table, or what it raised."""
        calls = redis.pipeline(transaction=False)
        for key in keys:
            calls.xinfo_stream(key)
        return list(calls.execute(raise_on_error=False))

    def close(self) -> None:
        """End all connections, also under threads that wait for an answer."""
        self._redis.close()

    def done(self, call: Callable[[Any], Any]) -> Any:
        """What this makes of redis-py's client; raises StreamLost."""
        try:
            return call(self._redis.within(TIMEOUT_S))
        except SHAPES as exc:
            raise StreamLost("it answers as no Redis server does") from exc
        except errors() as exc:
            raise StreamLost(" ".join(str(exc).split()) or type(exc).__name__) from exc


def place(number: str) -> tuple[int, ...]:
    """The server's time in ms, by which it has numbered a message, and which one of that millisecond it is."""
    return tuple(map(int, number.split("-")))


BEAT_S = 5.0
# A node that comes reads the stream of so long before: in it, each that is there has reported.
FIRST_MS = 10_000
# Messages in a stream: several beats of as many nodes as there may be.
MOST = 1024
_HERE, _GONE, _SOURCE = b"here", b"gone", b"source"


class Beats:
    def __init__(self, server: str, name: str, own: str, known: Collection[str], source: str = "") -> None:
        """`own` is this node's URL; `known` are those that counted before. A node of another source does not count."""
        self._source, self._strangers = source, set[str]()
        self._server, self._stream, self._key = server, Stream(server), f"spiderfs:nodes:{name}"
        self._own, self._roll = own, Roll(known)
        self._last, self._is_up = "0-0", True

    def beat(self) -> list[str]:
        """Announce this node, and return the nodes that count; while the server fails, those that counted before."""
        here: dict[str, bool] = {}
        try:
            here = self._stream.done(self._exchanged) | {self._own: True}
        except StreamLost as exc:
            if self._is_up:
                log.warning("peers: %s fails (%s): the nodes that are known stay", self._server, exc)
        if here and not self._is_up:
            log.info("peers: %s is back", self._server)
        self._is_up = bool(here)
        return self._roll.after([url for url in here if here[url]], [url for url in here if not here[url]])

    def leave(self) -> None:
        """Announce that this node leaves: the others know it at their next beats."""
        with contextlib.suppress(StreamLost):
            self._stream.done(lambda redis: self._publish(redis, _GONE))
        self._stream.close()

    def _exchanged(self, redis: Any) -> dict[str, bool]:
        """The nodes that reported, and whether they are there."""
        number = self._publish(redis, _HERE)
        # Else the stream is new to this node, or has begun again and the server's clock is behind.
        if not (0, 0) < place(self._last) < place(number):
            self._last = f"{max(0, place(number)[0] - FIRST_MS)}-0"
        ((_, messages),) = redis.xread({self._key: self._last}, MOST)
        self._last = messages[-1][0].decode()
        found: dict[str, bool] = {}
        for _, fields in messages:
            source = os.fsdecode(fields.pop(_SOURCE, os.fsencode(self._source)))
            for kind, said in fields.items():
                url = said.decode()
                if source == self._source and is_web_server(url):
                    found[url] = kind == _HERE
                elif source != self._source and url not in self._strangers:
                    self._strangers.add(url)
                    log.warning("peers: %.99r is left out: %s", url, other_source(source, self._source))
        return found

    def _publish(self, redis: Any, kind: bytes) -> str:
        number: str = redis.xadd(self._key, {kind: self._own, _SOURCE: os.fsencode(self._source)}, maxlen=MOST).decode()
        redis.expire(self._key, KEPT_S)
        return number
