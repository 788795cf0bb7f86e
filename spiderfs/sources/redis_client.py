"""A client of a server of Redis or Valkey, for threads: what is asked is answered in time, and asked once.

redis-py would repeat a call whose answer is late, and so do twice what it does; and its own limit of time is for each
piece of an answer, so that a server which drips holds a call for as long as it likes. Here neither.
"""

from __future__ import annotations

import os
import threading
import time
from binascii import crc_hqx
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

from spiderfs.sources.web.asking import left_s

# The password, which `redis-cli` takes from there too. In an option all who read the mount would see it.
PASSWORD_VARIABLE = "REDISCLI_AUTH"
PORT = 6379
# The library takes the shape of an answer for granted: a server that is none of Redis answers anything.
SHAPES = (TypeError, AttributeError, LookupError, RecursionError)
# How long a sample is kept that nobody asks for.
KEPT_S = 7 * 24 * 3600
# A cluster deals these out to its shards.
SLOTS = 1 << 14


def key_of(url: str, name: str) -> str:
    """The key with this name in the data set that the URL ends with."""
    return f"spiderfs:{urlsplit(url).path.strip('/')}:{name}"


def slot_of(key: str) -> int:
    return crc_hqx(key.encode(), 0) % SLOTS


class RedisClient:
    def __init__(self, url: str, address: str = "") -> None:
        """`url` is that of an option. `address`: where its host is, so that no name server is asked."""
        # Few mounts need the library.
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        parts = urlsplit(url)
        secure: dict[str, Any] = (
            {"ssl_cert_reqs": "required", "ssl_check_hostname": True} if parts.scheme == "rediss" else {}
        )
        # Until when the call of a thread has to be answered.
        times = self._times = threading.local()

        class Timely(redis.SSLConnection if secure else redis.Connection):  # type: ignore[misc]
            def _connect(self) -> Any:
                host = self.host  # type: ignore[has-type]
                self.socket_connect_timeout = left_s(times.until)
                self.host = address or host
                try:
                    connected = redis.Connection._connect(self)  # type: ignore[no-untyped-call]
                finally:
                    self.host = host
                return _Timed(self._wrap_socket_with_ssl(connected) if secure else connected, times)

        pool = redis.ConnectionPool(
            connection_class=Timely,
            host=parts.hostname or "",
            port=parts.port or PORT,
            username=None if parts.username is None else unquote(parts.username),
            password=os.environ.get(PASSWORD_VARIABLE) or None,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **secure,
        )
        self._client = redis.Redis(connection_pool=pool)

    def within(self, timeout_s: float) -> Any:
        """redis-py's client, for what this thread asks next: all of it is answered in this time, or fails.

        A failure is one of `errors()`.
        """
        self._times.until = time.monotonic() + timeout_s
        return self._client

    def close(self) -> None:
        """End all connections, also under threads that wait for an answer."""
        self._client.connection_pool.disconnect()


class _Timed:
    """A socket on which whole answers come in time."""

    def __init__(self, connected: Any, times: threading.local) -> None:
        self._connected, self._times = connected, times

    def __getattr__(self, name: str) -> Any:
        # With no time at all the library looks whether anything is there.
        if name in ("recv", "recv_into", "sendall") and self._connected.gettimeout() != 0:
            self._connected.settimeout(left_s(self._times.until))
        return getattr(self._connected, name)


@cache
def errors() -> tuple[type[Exception], ...]:
    """What a call of redis-py may raise because of the server or of the way to it."""
    import redis

    return redis.RedisError, OSError, ValueError, *SHAPES
