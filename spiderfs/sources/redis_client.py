"""A client of a server of Redis or Valkey, for threads, and the manager's survey of such a server or cluster.

Each call ends within its time limit and is sent once. redis-py would repeat a late call, and so do twice what it does;
and its own time limit is for each piece of an answer, so a server that drips would hold a call without end.

**Survey.** The manager asks a server again and again for its shards, and for how much it has room. If `peers` has no
share, a server is the home of the first groups of its samples (`core/homes.py`). The server stores the number of groups
in the name of the data set, so all mounts read the same. It begins with all. A mount that finds that something was
refused for lack of memory stores a tenth less, and removes the samples of the groups without room, some at each look; a
key that it holds keeps other mounts from lowering the number meanwhile. If that mount ends first, the rest is removed
with the next tenth. All groups have room again when no one has mounted the data set for as long as a sample is kept, or
an operator has removed the key.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from binascii import crc_hqx
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any
from urllib.parse import unquote, urlsplit

from spiderfs.core.homes import GROUPS
from spiderfs.sources.members import other_source
from spiderfs.sources.node_names import Node, is_address
from spiderfs.sources.web.asking import left_s

# The password, which `redis-cli` takes from there too. In an option all who read the mount would see it.
PASSWORD_VARIABLE = "REDISCLI_AUTH"
PORT = 6379
# The library takes the shape of an answer for granted: a server that is none of Redis answers anything.
SHAPES = (TypeError, AttributeError, LookupError, RecursionError)
# How long a sample is kept that no one asks for.
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
        self._is_closed = is_closed = threading.Event()

        class Timely(redis.SSLConnection if secure else redis.Connection):  # type: ignore[misc]
            def _connect(self) -> Any:
                host = self.host  # type: ignore[has-type]
                self.socket_connect_timeout = left_s(times.until)
                self.host, times.is_reached = address or host, False
                try:
                    connected = redis.Connection._connect(self)  # type: ignore[no-untyped-call]
                    times.is_reached = True
                finally:
                    self.host = host
                if is_closed.is_set():
                    # A thread that was still at work when the client was closed: nothing would close this connection.
                    connected.close()
                    raise redis.ConnectionError("the client is closed")
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
        """redis-py's client for this thread: all it asks next is answered in this time, or fails by `errors()`."""
        self._times.until, self._times.is_reached = time.monotonic() + timeout_s, True
        return self._client

    @property
    def is_reached(self) -> bool:
        """Whether what this thread has asked last has come as far as to the server."""
        reached: bool = self._times.is_reached
        return reached

    def close(self) -> None:
        """End all connections, also under threads that wait for an answer; no call is answered from now on."""
        self._is_closed.set()
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


log = logging.getLogger(__name__)

# How long an answer may take, and how long samples are removed at each look. No one waits for it.
_ANSWER_S, _REMOVAL_S = 1.0, 1.0
# How many keys are scanned at a time.
_AT_A_TIME = 1000
# How long no other mount lowers the room: without a sign of the one that removes samples, and after its end, so that
# all have looked since at what has been refused.
_LOCKED_S, _SETTLED_S = 60, 3
_REFUSALS = ("NoPermissionError", "AuthenticationError")

_Key = tuple[str, str]


class Survey:
    def __init__(self, url: str, finds_room: bool, source: str = "") -> None:
        """`finds_room`: no share is written for this URL of `peers`. `source`: see `identity_between_nodes`."""
        self._url, self._finds_room, self._source = url, finds_room, source
        self._room_key = key_of(url, "groups")
        # In the same slot.
        self._lock_key = f"spiderfs:{{{self._room_key}}}"
        self._source_key = f"{self._lock_key}:source"
        self._to_scan: list[tuple[Node, int]] = []
        """The servers whose samples are still to be removed, and where to go on."""
        self._clients: dict[_Key, RedisClient] = {}
        self._refused: dict[_Key, int] = {}
        """What each server had refused at the last look."""
        self._logged: set[str] = set()

    def look(self, node: Node) -> Node:
        """The node with its shards and its room now; may take seconds."""
        servers = [node._replace(addresses=[address], shards=()) for address in node.addresses]
        if node.shards:
            # The name in the URL stands for some of the shards, or for none any more.
            servers[:0] = node.servers().values()
        for gone in self._clients.keys() - set(map(_key, servers)):
            self._clients.pop(gone).close()
        states = [(server, state) for server in servers if (state := self._ask(server, partial(self._state, server)))]
        clusters = [server for server, (is_cluster, _) in states if is_cluster]
        maps = filter(None, (self._ask(server, partial(_shards, server)) for server in clusters))
        node = node._replace(shards=next(maps, node.shards if clusters or not states else ()))
        has_refused = any(has_refused for _, (_, has_refused) in states)
        # Where the name has several addresses, one that has answered.
        home = next((server for server, _ in states if server.url == node.url), node)
        home = self._home_of_keys(node, home)
        if self._source:
            self._ask(home, self._compare_sources)
        return node._replace(room=self._room(node, home, has_refused) if self._finds_room else GROUPS)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _state(self, server: Node, redis: Any) -> tuple[bool, bool]:
        """Whether it is in a cluster, and whether it has had no memory for something since the last look."""
        said = redis.info()
        if said["maxmemory_policy"] != "noeviction":
            self._log_once(f"{server.url} loses samples by maxmemory-policy {said['maxmemory_policy']}: set noeviction")
        elif not said["maxmemory"]:
            self._log_once(f"{server.url} has no maxmemory, and takes samples until its machine has no memory left")
        refused = int(said.get("errorstat_OOM", {}).get("count", 0))
        known = self._refused.get(_key(server), refused)
        self._refused[_key(server)] = refused
        return said["cluster_enabled"] == 1, refused > known

    def _home_of_keys(self, node: Node, home: Node) -> Node:
        """The server with the keys of the data set itself."""
        slot = slot_of(self._room_key)
        for url, *_, slots in node.shards:
            if any(first <= slot <= last for first, last in zip(slots[::2], slots[1::2], strict=True)):
                return node.servers()[url]
        return home

    def _compare_sources(self, redis: Any) -> None:
        """Announce this mount, or find that one of another source is there; their samples have other names."""
        own = os.fsencode(self._source)
        said = os.fsdecode(redis.getex(self._source_key) or own)
        if said != self._source:
            self._log_once(f"{self._url} is used by another mount, too: {other_source(said, self._source)}")
        else:
            redis.set(self._source_key, own, ex=_LOCKED_S)

    def _room(self, node: Node, home: Node, has_refused: bool) -> int:
        servers = node.servers() if node.shards else {home.url: home}
        room = self._ask(home, self._published)
        if room is None:
            return node.room
        if self._to_scan:
            self._remove(home, room)
        elif room and room == node.room and has_refused:
            room = self._ask(home, partial(self._lowered, room, servers.values()), _LOCKED_S) or room
        elif room == node.room:
            return node.room
        if room != node.room:
            log.info("peers: %s has room for %.0f %% of its samples", self._url, 100 * room / GROUPS)
        # Samples that are refused before other mounts know the room, or before samples are removed, say nothing.
        self._refused.clear()
        return int(room)

    def _lowered(self, room: int, servers: Iterable[Node], redis: Any) -> int:
        """A tenth less than the room, published to all mounts; the room itself while a mount removes samples."""
        if redis.getex(self._lock_key) is not None:
            return room
        lower, cursor, removes = room * 9 // 10, 0, False
        while True:
            cursor, keys = _beyond(self._url, lower, cursor, redis)
            calls = _unlinking(keys, redis)
            # In the same message: a server that is full takes neither before, and others would fill it again.
            calls.set(self._lock_key, "", nx=True, ex=_LOCKED_S)
            calls.set(self._room_key, lower, ex=KEPT_S)
            *_, is_locked, is_published = calls.execute(raise_on_error=False)
            # None where another mount holds it, or this one has it from before.
            removes = removes or is_locked is not None
            if is_published is True:
                break
            if not cursor:
                raise is_published
        if removes:
            # From the next look on: by then no mount gives the servers what is removed.
            self._to_scan = [(server, 0) for server in servers]
        return lower

    def _remove(self, home: Node, room: int) -> None:
        """Go on with removing the samples of all groups but the first so many."""
        until = time.monotonic() + _REMOVAL_S
        while self._to_scan and time.monotonic() < until:
            server, cursor = self._to_scan.pop()
            if after := self._ask(server, partial(_remove_some, self._url, room, cursor)):
                self._to_scan.append((server, after))
        locked_s = _LOCKED_S if self._to_scan else _SETTLED_S
        self._ask(home, lambda redis: redis.getex(self._lock_key, ex=locked_s))

    def _published(self, redis: Any) -> int:
        said = redis.getex(self._room_key, ex=KEPT_S)
        return GROUPS if said is None else min(max(int(said), 0), GROUPS)

    def _ask(self, server: Node, question: Callable[[Any], Any], within_s: float = _ANSWER_S) -> Any:
        """What it answers; None if it does not."""
        if not server.addresses:
            return None
        try:
            if _key(server) not in self._clients:
                self._clients[_key(server)] = RedisClient(*_key(server))
            return question(self._clients[_key(server)].within(within_s))
        except errors() as exc:
            if type(exc).__name__ in _REFUSALS:
                self._log_once(f"{server.url} does not say which shards it has, or how much room: {exc}")
            return None

    def _log_once(self, what: str) -> None:
        if what not in self._logged:
            log.warning("peers: %s", what)
            self._logged.add(what)


def _key(server: Node) -> _Key:
    return server.url, server.addresses[0]


def _shards(asked: Node, redis: Any) -> tuple[Sequence[Any], ...]:
    """The shards of a cluster, as `Node.shards`; none if the server has lost the others. Raises ValueError."""
    if redis.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
        return ()
    parts = urlsplit(asked.url)
    user, at, _ = parts.netloc.rpartition("@")
    slots_of: dict[tuple[str, str, str], list[int]] = {}
    for first, last, (endpoint, port, _, *more), *_ in redis.execute_command("CLUSTER SLOTS"):
        words = [word.decode() for word in (more[0] if more else ())]
        named, said = dict(zip(words[::2], words[1::2], strict=True)), (endpoint or b"").decode()
        # A server that does not know where it is, is where it was asked.
        address = said if is_address(said) else named.get("ip", "") if said else asked.addresses[0]
        host = named.get("hostname") or said or asked.host
        if not (is_address(address) and host != "?" and 0 <= first <= last < SLOTS):
            raise ValueError(f"slots {first} to {last} at {host!r}, {address!r}")
        netloc = f"{user}{at}{f'[{host}]' if ':' in host else host}:{port}"
        slots_of.setdefault((parts._replace(netloc=netloc).geturl(), host, address), []).extend((first, last))
    return tuple([*shard, slots] for shard, slots in slots_of.items())


def _beyond(url: str, room: int, cursor: int, redis: Any) -> tuple[int, list[bytes]]:
    """Where to scan next, 0 at the end, and samples that are in none of the first so many groups."""
    after, keys = redis.scan(cursor, match=key_of(url, "?" * 16), count=_AT_A_TIME)
    return after, [key for key in keys if int(key[-16:], 16) % GROUPS >= room]


def _remove_some(url: str, room: int, cursor: int, redis: Any) -> int:
    after, keys = _beyond(url, room, cursor, redis)
    _unlinking(keys, redis).execute(raise_on_error=False)
    return after


def _unlinking(keys: list[bytes], redis: Any) -> Any:
    calls = redis.pipeline(transaction=False)
    for key in keys:
        # A cluster takes no call with keys of several slots.
        calls.unlink(key)
    return calls
