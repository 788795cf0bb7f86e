"""A source with the caches of other nodes in front of it: a small file's home is asked first, over HTTP.

Each node has a static web server (nginx) over its mount, so what the home has not cached it fetches, once for all who
ask, and keeps (`core/homes.py`). Or the homes are servers of Redis, or clusters (`redis_peer.py`).

**Exactly this version.** The name in a question ends with the number of the version (`asked_name`), which is the same
on all nodes: a hash of path, size and mtime or tag. The home finds such a name only while the file's own name means
that version there, and one inode never gives two. Size and mtime as a web server tells them would not do: whole
seconds, and no tag. Files that may still be changing are read from the source.

**No circles.** Nodes may have different lists of members for a while. Then a node may be asked that takes another one
for the home. What it is asked for, it reads from the source: its look-ups note the versions in the table `asked`, which
its reading processes share (`MountContext.asked_by_peers`).
"""

from __future__ import annotations

import errno
import http.client
import re
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Container
from functools import cached_property

from spiderfs.errors import SourceUnavailable
from spiderfs.sources.members import FIELDS, OWN, Members
from spiderfs.sources.node_names import Node, is_server
from spiderfs.sources.peer import Asked, Counts, Peer, Server
from spiderfs.sources.redis_peer import RedisPeer
from spiderfs.sources.source import FromPeer, Source, Version, version_hash
from spiderfs.sources.web.asking import Line, Web, left_s

_ASKED = re.compile(rb"(.+)\.spiderfs-([0-9a-f]{16})", re.DOTALL)
_NAME_MAX = 255
# Files that are younger may be changing still (`vfs/settling.py`), and clocks differ.
YOUNG_S = 60.0
_ABSENT = (403, 404, 410)
# How many times as long as the source takes a home may take that has to fetch a file, and the share of the latest read
# in how long that is.
_PATIENCE, _LATEST = 3.0, 0.1


def asked_name(name: bytes, version: int) -> bytes:
    """The name under which a node is asked for one version of a file."""
    return b"%s.spiderfs-%016x" % (name, version)


def asked_version(name: bytes) -> tuple[bytes, int] | None:
    """The file's own name, and the version, of a name that `asked_name` has made; None for any other name."""
    found = _ASKED.fullmatch(name)
    return None if found is None else (found[1], int(found[2], 16))


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

    def _fetch(self, asked: Asked) -> bytes | None:
        directory, slash, name = asked.path.rpartition(b"/")
        name = asked_name(name, asked.number)
        if len(name) > _NAME_MAX:
            return None
        extent = None if asked.length == asked.size else (asked.offset, asked.offset + asked.length)
        url = f"{self._base}/{urllib.parse.quote(directory + slash + name)}"
        within_s = max(self._timeout_s, asked.patience_s)
        answer = self._web.get(url, extent=extent, most_bytes=asked.length, within_s=within_s)
        if not answer.ok and answer.status not in _ABSENT:
            raise SourceUnavailable(f"status {answer.status}")
        if answer.ok and answer.size != asked.size:
            raise SourceUnavailable(f"of {answer.size} bytes instead of {asked.size}")
        return answer.body if answer.ok else None

    def close(self) -> None:
        self._web.close()

    def _connected(self, _: str, until: float) -> Line:
        error: OSError = OSError(errno.EHOSTUNREACH, "no address")
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
        raise error


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
        """No question takes longer than `longest_s`. `counts` is this process's row of `members`; versions in `asked`
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
        if length and offset + length <= version.size and not _is_young(version):
            number = version_hash(path, version)
            if self._members.is_elsewhere(number) and number not in self._asked:
                if self._edition != self._members.edition:
                    self._follow()
                peer = self._peers.get(self._members.home(number))
                if peer is not None:
                    # Its home may have to fetch it, from a source that is as busy as it is for this node.
                    patience_s = min(_PATIENCE * self._source_s, self._longest_s)
                    asked = Asked(path, number, offset, length, version.size, patience_s)
                    found = peer.ask(asked)
                    if found is None:
                        found = self._from_source(path, offset, length, version)
                        peer.offer(asked, found)
                        return found
                    return FromPeer(found)
        return self._from_source(path, offset, length, version)

    def _from_source(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        began_s = time.monotonic()
        found = self._inner.read(path, offset, length, version)
        self._source_s += _LATEST * (time.monotonic() - began_s - self._source_s)
        return found

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
                    known.node = node
                    del before[place]
                else:
                    counts = Counts(self._counts[place * width : (place + 1) * width], node.url)
                    if is_server(node.url):
                        known = RedisPeer(node, counts, self._timeout_s)
                    else:
                        tls = self._tls if node.url.startswith("https:") else None
                        known = WebPeer(node, counts, self._timeout_s, self._longest_s, tls)
                peers[place] = known
            self._peers, self._edition = peers, edition
        for gone in before.values():
            gone.close()


def _is_young(version: Version) -> bool:
    return not version.tag and version.mtime_ns > (time.time() - YOUNG_S) * 1e9
