"""A source with the caches of other nodes in front of it: a file's home is asked first.

Each node has a static web server (nginx) over its mount, so the home fetches what it has not cached, once for all
nodes, and keeps it (`core/homes.py`). Or the homes are servers of Redis, or clusters (`RedisPeer`). Each STRIPE_BYTES
of a file have a home of their own (`key_at`), so nodes that read one large file together share out its bytes. Of a
large file, each stripe of a node that is down has another home meanwhile.

**Exactly this version.** The requested name ends with the number of the version (`asked_name`): a hash of path, size
and mtime or tag, and of the source's identity (`salt_of`). The home finds it only while the file's own name means that
version there. Size and mtime as a web server reports them would not do: whole seconds, and no tag. Files that may still
be changing are read from the source.

**No circles.** While lists of members differ, a node may be asked that takes another one for the home. It then reads
the source: the name has the stripe's number too, which its lookups note in `asked` (`MountContext.asked_by_peers`).

**Failure.** If a peer does not have the file, is late or returns other bytes, the source is read. A peer that is down
is not asked for a while (`Breaker`). Late is not down: on a busy machine a working home is slow, and avoiding it would
load the source further. A peer is down when none of its addresses can be reached, when FAILURES answers in a row are
wrong, or when, after a late answer, the next question is late too, with LONGER times the patience and no answer
between.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import logging
import math
import os
import queue
import re
import socket
import ssl
import threading
import time
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from spiderfs.errors import SourceError, SourceTimeout, SourceUnavailable, SourceUnreachable
from spiderfs.sources.members import FIELDS, OWN, STRIPE_BYTES, Members, key_at, mark_of
from spiderfs.sources.node_names import Node, is_server
from spiderfs.sources.redis_client import KEPT_S, SLOTS, RedisClient, errors, key_of, slot_of
from spiderfs.sources.source import STREAMED_BYTES, FromPeer, Source, Version, streamed, version_hash
from spiderfs.sources.web.asking import Line, Web, left_s

log = logging.getLogger(__name__)

# A peer that is down is not asked for this long, and twice as long after each further failure.
FAILURES, PAUSE_S, LONGEST_PAUSE_S = 3, 1.0, 30.0
# How many times as long a question may take that is asked of a peer which has just answered another one, or is late.
LONGER = 4.0


class Asked(NamedTuple):
    """Bytes of one version of a file, which has this number and size; they begin in the stripe that is meant."""

    path: bytes
    number: int
    offset: int
    length: int
    size: int
    patience_s: float = 0.0
    """How long one who has to fetch it may take, where that is more than the time limit of a question."""
    longest_s: float = math.inf
    """How long the question may take in any case."""


class Counts:
    """What one process has had from the peer with this URL, whose servers have one lock."""

    def __init__(self, cells: memoryview, url: str) -> None:
        self._cells, self._mark = cells, mark_of(url)
        self.lock = threading.Lock()
        self.resting: set[str] = set()
        """The URLs of the servers that are not asked."""

    def add(self, name: str, number: int = 1) -> None:
        self._cells[FIELDS.index(name)] += number
        self._cells[FIELDS.index("resting")] = self._mark * bool(self.resting)


class Breaker:
    """Whether a server is asked, and how long it may take; times are on the caller's clock."""

    def __init__(self) -> None:
        self.is_resting = False
        """Whether the server is down, and asked now and then only."""
        self._failed, self._pauses = 0, 0
        self._rested_s = self._answered_s = self._rests_until = -math.inf
        # When it was seen that a question is late, and nothing has been answered since.
        self._late_s = math.inf

    def patience_s(self, least_s: float, now: float) -> float:
        """How long a question may take that is asked now; 0 if it is not to be asked."""
        if self.is_resting:
            if now < self._rests_until:
                return 0.0
            # One tries whether it is back; the others learn of it.
            self._rests_until = now + LONGER * least_s
            return LONGER * least_s
        lately = self._late_s <= now or now < self._answered_s + LONGER * least_s
        return LONGER * least_s if lately else least_s

    def rests(self, now: float) -> bool:
        """Whether a question that is asked now would have no time at all."""
        return self.is_resting and now < self._rests_until

    def answered(self, now: float) -> None:
        self.is_resting, self._failed, self._pauses, self._late_s = False, 0, 0, math.inf
        self._answered_s = now

    def late(self, asked_s: float, now: float) -> None:
        """The question that was asked then was not answered in time."""
        self._rest(asked_s, now, is_down=asked_s >= self._late_s)
        if asked_s >= self._answered_s:
            self._late_s = min(self._late_s, now)

    def failed(self, asked_s: float, most: int, now: float) -> None:
        """The question could not be asked, or was answered with something else; after `most` failures it is down."""
        self._failed += 1
        self._rest(asked_s, now, is_down=self._failed >= most)

    def _rest(self, asked_s: float, now: float, is_down: bool) -> None:
        # What becomes of questions that were asked before says nothing new.
        if (is_down or self.is_resting) and asked_s >= self._rested_s:
            self._rests_until = now + min(PAUSE_S * 2.0 ** min(self._pauses, 9), LONGEST_PAUSE_S)
            self.is_resting, self._rested_s = True, now
            self._pauses += 1


class Server(ABC):
    """One server, with a breaker; for the threads of one process."""

    def __init__(self, node: Node, counts: Counts, timeout_s: float) -> None:
        self.node = node
        """As it is known now; its URL stays."""
        self._counts, self._timeout_s = counts, timeout_s
        self._lock = counts.lock
        self._breaker = Breaker()
        self._turns = 0
        # Under the lock: what a thread that still asks it finds out says nothing about the peer.
        self.is_gone = False

    @property
    def rests(self) -> bool:
        """Whether it is down, and not to be asked now."""
        return self._breaker.rests(time.monotonic())

    def offer(self, asked: Asked, content: bytes) -> None:  # noqa: B027
        """Take what the source gave, if it is one that is filled by those who ask; waits for nothing."""

    @abstractmethod
    def close(self) -> None: ...

    def ask(self, asked: Asked) -> bytes | None:
        """The bytes; None if it does not have them, or does not give them in time."""
        least_s, asked_s = min(max(self._timeout_s, asked.patience_s), asked.longest_s), time.monotonic()
        if not self.node.addresses:
            return None
        with self._lock:
            patience_s = self._breaker.patience_s(least_s, asked_s)
        if not patience_s:
            return None
        try:
            content = self._fetch(asked, min(patience_s, asked.longest_s))
            if content is not None and not isinstance(content, bytes):
                raise SourceUnavailable("something else than bytes")
            if content is not None and len(content) != asked.length:
                raise SourceUnavailable(f"{len(content)} bytes instead of {asked.length}")
        except SourceError as exc:
            log.debug("%s: %s: %s", self.node.url, os.fsdecode(asked.path), exc)
            with self._lock:
                self._turns += 1
                if isinstance(exc, SourceTimeout):
                    self._breaker.late(asked_s, time.monotonic())
                else:
                    most = len(self.node.addresses) if isinstance(exc, SourceUnreachable) else FAILURES
                    self._breaker.failed(asked_s, most, time.monotonic())
                if self._breaker.is_resting and not self.is_gone:
                    self._counts.resting.add(self.node.url)
                self._counts.add("timeouts")
            return None
        with self._lock:
            self._breaker.answered(time.monotonic())
            if not self.is_gone:
                self._counts.resting.discard(self.node.url)
            self._counts.add("absent" if content is None else "hits")
            self._counts.add("bytes", len(content or b""))
        return content

    @property
    def _addresses(self) -> list[str]:
        """Where it is to be tried, in this order: after a question that has failed, the next address comes first."""
        known = self.node.addresses
        first = self._turns % max(1, len(known))
        return known[first:] + known[:first]

    @abstractmethod
    def _fetch(self, asked: Asked, within_s: float) -> bytes | None:
        """The bytes within this time, None if it lacks them; raises SourceUnreachable, SourceTimeout, SourceError."""


# Bytes of files that wait to be given, and how many files are given at a time, within how long. No one waits for it.
_WAITING_BYTES, _AT_A_TIME, _GIVEN_S = 32 << 20, 16, 5.0


class RedisPeer:
    """A server of Redis, or the shards of a cluster."""

    rests = False

    def __init__(self, node: Node, counts: Counts, timeout_s: float) -> None:
        self._counts, self._timeout_s = counts, timeout_s
        self._servers: dict[str, _Server] = {}
        self._of_slot: Sequence[_Server | None] = ()
        self.node = node

    @property
    def node(self) -> Node:
        return self._node

    @node.setter
    def node(self, node: Node) -> None:
        before, self._node, self._servers = self._servers, node, {}
        for url, server in node.servers().items():
            known = before.pop(url) if url in before else _Server(server, self._counts, self._timeout_s)
            known.node, self._servers[url] = server, known
        of_slot: list[_Server | None] = [None if node.shards else self._servers[node.url]] * SLOTS
        for url, _, _, slots in node.shards:
            for first, last in zip(slots[::2], slots[1::2], strict=True):
                of_slot[first : last + 1] = [self._servers[url]] * (last + 1 - first)
        self._of_slot = of_slot
        with self._counts.lock:
            self._counts.resting &= self._servers.keys()
            for gone in before.values():
                gone.is_gone = True
        for gone in before.values():
            gone.close()

    def ask(self, asked: Asked) -> bytes | None:
        server = self._of_slot[slot_of(_key(self._node, asked))]
        return None if server is None else server.ask(asked)

    def offer(self, asked: Asked, content: bytes) -> None:
        server = self._of_slot[slot_of(_key(self._node, asked))]
        if server is not None:
            server.offer(asked, content)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


class _Server(Server):
    def __init__(self, node: Node, counts: Counts, timeout_s: float) -> None:
        super().__init__(node, counts, timeout_s)
        self._client: RedisClient | None = None
        self._reached = ""
        self._given: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._giver: threading.Thread | None = None

    def _fetch(self, asked: Asked, within_s: float) -> bytes | None:
        if asked.length != asked.size:
            return None
        client = self._redis()
        try:
            content: bytes | None = client.within(within_s).getex(_key(self.node, asked), ex=KEPT_S)
        except errors() as exc:
            name = type(exc).__name__
            if name in ("MovedError", "AskError"):
                return None
            if not client.is_reached:
                raise SourceUnreachable(name) from None
            raise (SourceTimeout if name == "TimeoutError" else SourceUnavailable)(name) from None
        return content

    def offer(self, asked: Asked, content: bytes) -> None:
        if len(content) != asked.size or self._breaker.is_resting or not self.node.addresses:
            return
        with self._lock:
            # One that finds no room is offered again by whoever reads it next.
            if self._waiting_bytes and self._waiting_bytes + asked.size > _WAITING_BYTES:
                return
            self._waiting_bytes += asked.size
            # What a store gave is no `bytes`, and redis-py takes nothing else.
            self._given.put((_key(self.node, asked), bytes(content)))
            if self._giver is None:
                self._giver = threading.Thread(target=self._give, daemon=True)
                self._giver.start()

    def close(self) -> None:
        if self._giver is not None:
            self._given.put(("", b""))
            self._giver.join(0 if self._breaker.is_resting else self._timeout_s)
        if self._client is not None:
            self._client.close()

    def _give(self) -> None:
        while True:
            some = [self._given.get()]
            while len(some) < _AT_A_TIME and not self._given.empty():
                some.append(self._given.get())
            if not all(key for key, _ in some):
                return
            # Whoever asks a server next that fails finds that out too, and one that is full says so for each file.
            with contextlib.suppress(SourceUnreachable, *errors()):
                calls = self._redis().within(_GIVEN_S).pipeline(transaction=False)
                for key, content in some:
                    calls.set(key, content, ex=KEPT_S)
                calls.execute(raise_on_error=False)
            with self._lock:
                self._waiting_bytes -= sum(len(content) for _, content in some)

    def _redis(self) -> RedisClient:
        with self._lock:
            address = next(iter(self._addresses), "")
            if self._client is None or address not in ("", self._reached):
                if not address:
                    raise SourceUnreachable("its address is not known")
                self._reached, self._client = address, RedisClient(self.node.url, address)
            return self._client


def _key(node: Node, asked: Asked) -> str:
    return key_of(node.url, f"{asked.number:016x}")


_ASKED = re.compile(rb"(.+)\.spiderfs-([0-9a-f]{16})(?:-([0-9a-f]{1,13}))?", re.DOTALL)
_NAME_MAX = 255
# Files that are younger may be changing still (`vfs/rules.py`), and clocks differ.
YOUNG_S = 60.0
_ABSENT = (403, 404, 410)
# How many times as long as the source takes a home may take that has to fetch a file, and the share of the latest read
# in how long that is.
_PATIENCE, _LATEST = 3.0, 0.1
# How many homes of a stripe are looked for, one after the other, while they are down.
_HOMES = 3


def asked_name(name: bytes, version: int, offset: int = 0) -> bytes:
    """The name under which a node is asked for the stripe at an offset of one version of a file."""
    stripe = offset // STRIPE_BYTES
    return b"%s.spiderfs-%016x%s" % (name, version, b"-%x" % stripe if stripe else b"")


def asked_version(name: bytes) -> tuple[bytes, int, int] | None:
    """The file's own name, the version, and where the stripe begins, of a name that `asked_name` has made; or None."""
    found = _ASKED.fullmatch(name)
    return None if found is None else (found[1], int(found[2], 16), int(found[3] or b"0", 16) * STRIPE_BYTES)


class WebPeer(Server):
    """A node with a web server over its mount; for the threads of one process."""

    def __init__(
        self, node: Node, counts: Counts, timeout_s: float, longest_s: float, tls: ssl.SSLContext | None
    ) -> None:
        """`longest_s`: see `PeerSource`."""
        super().__init__(node, counts, timeout_s)
        parts = urllib.parse.urlsplit(node.url)
        path = urllib.parse.quote(parts.path.rstrip("/"), safe="/%")
        self._base = f"{parts.scheme}://{parts.netloc}{path}"
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls
        self._web = Web(longest_s, self._connected)

    def _fetch(self, asked: Asked, within_s: float) -> bytes | None:
        directory, slash, name = asked.path.rpartition(b"/")
        name = asked_name(name, asked.number, asked.offset)
        if len(name) > _NAME_MAX:
            return None
        extent = None if asked.length == asked.size else (asked.offset, asked.offset + asked.length)
        url = f"{self._base}/{urllib.parse.quote(directory + slash + name)}"
        answer = self._web.get(url, extent=extent, most_bytes=asked.length, within_s=within_s)
        if not answer.ok and answer.status not in _ABSENT:
            raise SourceUnavailable(f"status {answer.status}")
        if answer.ok and answer.size != asked.size:
            raise SourceUnavailable(f"of {answer.size} bytes instead of {asked.size}")
        return answer.body if answer.ok else None

    def close(self) -> None:
        self._web.close()

    def _connected(self, _: str, until: float) -> Line:
        error, is_reached = OSError(errno.EHOSTUNREACH, "no address"), False
        # A home may take long to fetch a file, but not to say that it is there.
        until = min(until, time.monotonic() + self._timeout_s)
        for address in self._addresses:
            try:
                connected = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            except OSError as exc:
                # A kernel without IPv6.
                error = exc
                continue
            try:
                connected.settimeout(left_s(until))
                connected.connect((address, self._port))
                is_reached = True
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    connected = self._tls.wrap_socket(connected, server_hostname=self.node.host)
            except OSError as exc:
                connected.close()
                error = exc
                continue
            connection = http.client.HTTPConnection(self.node.host, self._port)
            connection.sock = connected
            return Line(connection)
        raise error if is_reached else SourceUnreachable(str(error)) from error


Peer = RedisPeer | WebPeer


class PeerSource:
    """`inner`, and in front of it the other `members`; for one reading process."""

    def __init__(
        self,
        inner: Source,
        members: Members,
        timeout_s: float,
        longest_s: float,
        counts: memoryview,
        asked: Container[int],
    ) -> None:
        """No question takes longer than `longest_s`. `counts` is this process's row of `members`; stripes in `asked`
        are read from `inner` alone.
        """
        self._inner = inner
        self._members = members
        self._timeout_s, self._longest_s, self._counts = min(timeout_s, longest_s), longest_s, counts
        # How long the source lately took: a mean in which the latest read counts a tenth.
        self._source_s = 0.0
        # The process before this one has died with what it let rest.
        for cell in range(FIELDS.index("resting"), len(counts), len(FIELDS)):
            counts[cell] = 0
        self._asked = asked
        self._peers: dict[int, Peer] = {}
        self._edition, self._following = -1, threading.Lock()
        self.undated_directories = inner.undated_directories
        self.stat, self.scan, self.statvfs = inner.stat, inner.scan, inner.statvfs
        self.read_present, self.readlink = inner.read_present, inner.readlink
        self.listxattr, self.getxattr = inner.listxattr, inner.getxattr

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        """As `Source.read`; what a peer gave is a `FromPeer`."""
        peer, number = self._home(path, offset, version, is_whole=length == version.size)
        if peer is None or not length or offset + length > version.size:
            return self._from_source(path, offset, length, version)
        # Its home may have to fetch it, from a source that is as busy as it is for this node.
        patience_s, known_as = _PATIENCE * self._source_s, number ^ self._members.salt
        asked = Asked(path, known_as, offset, length, version.size, patience_s, self._longest_s)
        if (found := peer.ask(asked)) is not None:
            return FromPeer(found)
        found = self._from_source(path, offset, length, version)
        peer.offer(asked, found)
        return found

    def stream(self, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
        """What `read` gives, piece by piece: no question to a peer is about more, and one to the source about all."""
        end = offset + length
        while offset < end:
            own = offset
            while own < end and self._home(path, own, version)[0] is None:
                own = min(end, (own // STRIPE_BYTES + 1) * STRIPE_BYTES)
            began_s = time.monotonic()
            for piece in streamed(self._inner, path, offset, own - offset, version) if own > offset else ():
                if began_s:
                    self._source_took(time.monotonic() - began_s)
                    began_s = 0.0
                yield piece
            offset = own
            if offset < end:
                piece_bytes = min(STREAMED_BYTES, end - offset)
                yield self.read(path, offset, piece_bytes, version)
                offset += piece_bytes

    def _home(self, path: bytes, offset: int, version: Version, is_whole: bool = False) -> tuple[Peer | None, int]:
        """Who is asked for the bytes at an offset, None for the source; and the version's number."""
        if not version.tag and version.mtime_ns > (time.time() - YOUNG_S) * 1e9:
            return None, 0
        number = version_hash(path, version)
        key = key_at(number, offset)
        for _ in range(_HOMES):
            if not self._members.is_remote(key) or key in self._asked:
                return None, number
            if self._edition != self._members.edition:
                self._follow()
            peer = self._peers.get(self._members.home(key))
            if is_whole or peer is None or not peer.rests:
                return peer, number
            # The same one for all nodes that find it down. A small file may as well be read from the source.
            key = key_at(key, STRIPE_BYTES)
        return None, number

    def _from_source(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        began_s = time.monotonic()
        found = self._inner.read(path, offset, length, version)
        self._source_took(time.monotonic() - began_s)
        return found

    def _source_took(self, took_s: float) -> None:
        self._source_s += _LATEST * (took_s - self._source_s)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._inner.close()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def _follow(self) -> None:
        """Have the peers that are members now; the breaker and the connections of each that was one stay."""
        with self._following:
            edition = self._members.edition
            nodes = self._members.nodes()
            if not nodes:
                return
            before, width = dict(self._peers), len(FIELDS)
            peers: dict[int, Peer] = {}
            for place, node in enumerate(nodes):
                if place == OWN or node is None:
                    continue
                known = before.get(place)
                if known is not None and known.node.url == node.url:
                    peers[place], known.node = known, node
                    del before[place]
                    continue
                counts = Counts(self._counts[place * width : (place + 1) * width], node.url)
                if is_server(node.url):
                    peers[place] = RedisPeer(node, counts, self._timeout_s)
                else:
                    tls = self._tls if node.url.startswith("https:") else None
                    peers[place] = WebPeer(node, counts, self._timeout_s, self._longest_s, tls)
            self._peers, self._edition = peers, edition
        for gone in before.values():
            gone.close()
