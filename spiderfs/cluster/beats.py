"""The nodes of a data set, as they tell each other by a stream of Redis or Valkey that they are there.

Each adds its URL to the stream every BEAT_S, and reads what has come since it last did. A node has left when it says
so, or when it is not heard between this node's own beats, MISSED times in a row. So a server that is down changes
nothing, and when it is back all have said again that they are there before one of them is missed. No node's clock
counts; that of the server says what is too old for a node that comes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from typing import Any

from spiderfs.cluster.stream import KEPT_S, Stream, place
from spiderfs.errors import StreamLost
from spiderfs.sources.node_names import Roll, is_web_server

log = logging.getLogger(__name__)

BEAT_S = 5.0
# A node that comes hears this much of the time before: in it, each that is there has said so.
FIRST_MS = 10_000
# Messages in a stream: several beats of as many nodes as there may be.
MOST = 1024
_HERE, _GONE = b"here", b"gone"


class Beats:
    def __init__(self, server: str, name: str, own: str, known: Collection[str]) -> None:
        """`own` is this node's URL; `known` are those that counted before."""
        self._server, self._stream, self._key = server, Stream(server), f"spiderfs:nodes:{name}"
        self._own, self._roll = own, Roll(known)
        self._last, self._is_up = "0-0", True

    def beat(self) -> list[str]:
        """Say that this node is there, and return who counts; while the server fails, who counted before."""
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
        """Say that this node leaves: the others know it at their next beats."""
        with contextlib.suppress(StreamLost):
            self._stream.done(lambda redis: self._say(redis, _GONE))
        self._stream.close()

    def _exchanged(self, redis: Any) -> dict[str, bool]:
        """Of whom something was heard, and whether they are there."""
        number = self._say(redis, _HERE)
        # Else the stream is new to this node, or has begun anew and the server's clock is behind.
        if not (0, 0) < place(self._last) < place(number):
            self._last = f"{max(0, place(number)[0] - FIRST_MS)}-0"
        ((_, messages),) = redis.xread({self._key: self._last}, MOST)
        self._last = messages[-1][0].decode()
        said = [(url.decode(), kind == _HERE) for _, fields in messages for kind, url in fields.items()]
        return {url: is_here for url, is_here in said if is_web_server(url)}

    def _say(self, redis: Any, kind: bytes) -> str:
        number: str = redis.xadd(self._key, {kind: self._own}, maxlen=MOST).decode()
        redis.expire(self._key, KEPT_S)
        return number
