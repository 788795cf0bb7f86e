"""A server of Redis or Valkey as a home of samples, for nodes without disks and for those who run one already.

It holds whole files, by the numbers of their versions, in the name of a data set, and whoever had to read the source
gives it the file. It is to have `noeviction`: the share of the samples that has its home there is set by `peers`, and
a cache that lets the oldest go would lose each sample just before its next epoch. What does not fit any more the server
refuses, and what nobody has asked for in a week leaves: earlier versions.

redis-py would repeat a call whose answer is late; here it does not, and asks no name server on the way of a read.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

from spiderfs.errors import SourceUnavailable
from spiderfs.sources.node_names import Node
from spiderfs.sources.peer import Asked, Peer
from spiderfs.sources.web.asking import left_s

PASSWORD_VARIABLE = "REDISCLI_AUTH"
PORT = 6379
KEPT_S = 7 * 24 * 3600
# Bytes of files that wait to be given, and how many files are given at a time, within how long. Nobody waits for it.
_WAITING_BYTES, _AT_A_TIME, _GIVEN_S = 32 << 20, 16, 5.0


class RedisPeer(Peer):
    def __init__(self, node: Node, counts: memoryview, timeout_s: float) -> None:
        super().__init__(node, counts, timeout_s)
        self._prefix = f"spiderfs:{urlsplit(node.url).path.strip('/')}"
        self._client: Any = None
        self._reached: list[str] = []
        self._given: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._giver: threading.Thread | None = None
        # Until when the call of a thread has to be answered.
        self._times = threading.local()

    def _fetch(self, asked: Asked) -> bytes | None:
        if asked.length != asked.size:
            return None
        errors = _errors()
        self._times.until = time.monotonic() + self._timeout_s
        try:
            content: bytes | None = self._redis().getex(self._key(asked), ex=KEPT_S)
        except errors as exc:
            raise SourceUnavailable(type(exc).__name__) from None
        return content

    def offer(self, asked: Asked, content: bytes) -> None:
        if len(content) != asked.size or self._failed or not self.node.addresses:
            return
        with self._lock:
            # One that finds no room is offered again by whoever reads it next.
            if self._waiting_bytes and self._waiting_bytes + asked.size > _WAITING_BYTES:
                return
            self._waiting_bytes += asked.size
            self._given.put((self._key(asked), content))
            if self._giver is None:
                self._giver = threading.Thread(target=self._give, daemon=True)
                self._giver.start()

    def close(self) -> None:
        if self._giver is not None:
            self._given.put(("", b""))
            self._giver.join(self._timeout_s)
        if self._client is not None:
            self._client.close()

    def _give(self) -> None:
        while True:
            some = [self._given.get()]
            while len(some) < _AT_A_TIME and not self._given.empty():
                some.append(self._given.get())
            if not all(key for key, _ in some):
                return
            self._times.until = time.monotonic() + _GIVEN_S
            # Whoever asks a server next that fails finds that out too, and one that is full says so for each file.
            with contextlib.suppress(*_errors()):
                calls = self._redis().pipeline(transaction=False)
                for key, content in some:
                    calls.set(key, content, ex=KEPT_S)
                calls.execute(raise_on_error=False)
            with self._lock:
                self._waiting_bytes -= sum(len(content) for _, content in some)

    def _key(self, asked: Asked) -> str:
        return f"{self._prefix}:{asked.number:016x}"

    def _redis(self) -> Any:
        with self._lock:
            if self._client is None or self._reached != self.node.addresses:
                self._client, self._reached = self._made(), self.node.addresses
            return self._client

    def _made(self) -> Any:
        # Few mounts need the library.
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        node, times = self.node, self._times
        parts = urlsplit(node.url)

        class Reached(redis.Connection):
            def _connect(self) -> Any:
                self.host, self.socket_connect_timeout = node.addresses[0], left_s(times.until)
                return _Timed(super()._connect(), times)  # type: ignore[no-untyped-call]

        class ReachedByTls(redis.SSLConnection):
            def _connect(self) -> Any:
                self.host, self.socket_connect_timeout = node.addresses[0], left_s(times.until)
                plain = redis.Connection._connect(self)  # type: ignore[no-untyped-call]
                self.host = node.host
                return _Timed(self._wrap_socket_with_ssl(plain), times)  # type: ignore[no-untyped-call]

        secure: dict[str, Any] = (
            {"ssl_cert_reqs": "required", "ssl_check_hostname": True} if parts.scheme == "rediss" else {}
        )
        pool = redis.ConnectionPool(
            connection_class=ReachedByTls if secure else Reached,
            host=node.host,
            port=parts.port or PORT,
            username=None if parts.username is None else unquote(parts.username),
            password=os.environ.get(PASSWORD_VARIABLE) or None,
            socket_timeout=self._timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **secure,
        )
        return redis.Redis(connection_pool=pool)


class _Timed:
    """A socket on which a whole answer comes in time: the library's own limit is for each piece of it."""

    def __init__(self, connected: Any, times: threading.local) -> None:
        self._connected, self._times = connected, times

    def __getattr__(self, name: str) -> Any:
        # With no time at all the library looks whether anything is there.
        if name in ("recv", "recv_into", "sendall") and self._connected.gettimeout() != 0:
            self._connected.settimeout(left_s(self._times.until))
        return getattr(self._connected, name)


@cache
def _errors() -> tuple[type[Exception], ...]:
    import redis

    return redis.RedisError, OSError, ValueError
