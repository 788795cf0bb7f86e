"""Streams of a Redis or Valkey server, for threads: each call has a time limit, and none is repeated.

redis-py would repeat a call whose answer is late, and so store it twice and wait for seconds; here it does not. What it
raises becomes a `StreamLost`, whose text says in a few words why.

Nothing grows without limit at the server: a stream keeps STREAM_BYTES of its latest messages, whoever reads them, and
leaves an hour after its last one. The server should not evict by itself (`noeviction`, as is its default).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from spiderfs.errors import StreamLost

# The password, which `redis-cli` takes from there too. In an option all who read the mount would see it.
PASSWORD_VARIABLE = "REDISCLI_AUTH"
PORT = 6379
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


class Entry(NamedTuple):
    """A message that is added to the stream `key`."""

    key: str
    content: bytes


class Message(NamedTuple):
    """A message of a stream; the server has numbered it."""

    number: str
    content: bytes


class Stream:
    def __init__(self, url: str) -> None:
        """`url` is that of the option `cluster`; nothing is asked yet."""
        # Few mounts need the library.
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        # The library takes the shape of an answer for granted: a server that is none of Redis answers anything.
        self._shapes = (TypeError, AttributeError, LookupError, RecursionError)
        self._errors = (redis.RedisError, OSError, ValueError, *self._shapes)
        parts = urlsplit(url)
        self._client: Any = redis.Redis(
            host=parts.hostname or "",
            port=parts.port or PORT,
            username=None if parts.username is None else unquote(parts.username),
            password=os.environ.get(PASSWORD_VARIABLE) or None,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            ssl=parts.scheme == "rediss",
            ssl_cert_reqs="required",
            ssl_check_hostname=True,
        )

    def append(self, entries: Sequence[Entry]) -> int:
        """Add messages, and return how many; raises StreamLost, and some may have been added then."""
        calls = self._client.pipeline(transaction=False)
        for key, content in entries:
            # A question whether it would be taken is not kept.
            most = max(2, STREAM_BYTES // len(content)) if key != QUESTION else 0
            calls.xadd(key, {_FIELD: content}, maxlen=most, approximate=most > 0)
        for key in dict.fromkeys(entry.key for entry in entries):
            calls.expire(key, KEPT_S)
        # What the library raises for a call of several has the whole message in it.
        for answer in self._done(lambda: calls.execute(raise_on_error=False)):
            if isinstance(answer, Exception):
                raise StreamLost(str(answer)) from answer
        return len(entries)

    def read(self, after: Mapping[str, str], wait_s: float) -> dict[str, list[Message]]:
        """What has come in each stream since the message with this number, waiting so long for it if there is nothing.

        `wait_s` is shorter than TIMEOUT_S. Raises StreamLost.
        """

        def read() -> dict[str, list[Message]]:
            answer = self._client.xread(dict(after), AT_A_TIME, int(wait_s * 1000)) or ()
            return {
                key.decode(): [Message(number.decode(), b"".join([fields.get(_FIELD, b"")])) for number, fields in some]
                for key, some in answer
                if some
            }

        found: dict[str, list[Message]] = self._done(read)
        return found

    def remove(self, key: str, numbers: Sequence[str]) -> int:
        """Remove messages of a stream, and return how many there were; raises StreamLost."""
        removed: int = self._done(lambda: self._client.xdel(key, *numbers))
        return removed

    def close(self) -> None:
        """End all connections, also under threads that wait for an answer."""
        self._client.connection_pool.disconnect()

    def _done(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self._errors as exc:
            if isinstance(exc, self._shapes):
                raise StreamLost("it answers as no Redis server does") from exc
            raise StreamLost(" ".join(str(exc).split()) or type(exc).__name__) from exc
