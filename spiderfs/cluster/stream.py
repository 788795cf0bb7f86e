"""Streams of a Redis or Valkey server, for threads, and the nodes of a data set, which report through one.

Each call has a time limit, and none is repeated. An error of redis-py becomes a `StreamLost` with a short reason.
Nothing grows without limit at the server: a stream keeps STREAM_BYTES of its latest messages, whoever reads them, and
expires an hour after its last one. The server should not evict by itself (`noeviction`, its default).

**Beats.** Each node adds its URL to a stream every BEAT_S, and reads what was added since. A node has left when it
reports so, or when none of its beats comes between this node's own beats, MISSED times in a row. So a server that is
down changes nothing, and when it is back all nodes have reported before one of them is missed. No node's clock counts;
the server's clock decides what is too old for a node that joins.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from spiderfs.errors import StreamLost
from spiderfs.sources.members import other_source
from spiderfs.sources.node_names import Roll, is_web_server
from spiderfs.sources.redis_client import SHAPES, RedisClient, errors

log = logging.getLogger(__name__)

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


class StreamMessage(NamedTuple):
    """A message of a stream; the server has numbered it."""

    number: str
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

    def read(self, after: Mapping[str, str], wait_s: float) -> dict[str, list[StreamMessage]]:
        """What has come in each stream since the message with this number, waiting so long for it if there is nothing.

        `wait_s` is shorter than TIMEOUT_S. A key that is no stream is left out beside others, and the log says so once.
        Raises StreamLost.
        """

        def read(redis: Any, after: Mapping[str, str]) -> dict[str, list[StreamMessage]]:
            answer = redis.xread(dict(after), AT_A_TIME, int(wait_s * 1000)) or ()
            return {
                key.decode(): [
                    StreamMessage(number.decode(), b"".join([fields.get(_FIELD, b"")])) for number, fields in some
                ]
                for key, some in answer
                if some
            }

        found: dict[str, list[StreamMessage]]
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
