"""A source with the caches of other nodes in front of it: a small file's home is asked first, over HTTP.

Each node has a static web server (nginx) over its mount, so what the home has not cached it fetches, once for all who
ask, and keeps (`core/homes.py`). A peer is trusted as the source is, and nothing depends on it: if it does not know the
file, does not answer within the time limit of a question, or answers with anything else than the bytes asked for, the
source is read. After some failures in a row a peer is not asked for a while (the breaker), so a node that is down costs
its readers the time limit a few times and then nothing.

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
import logging
import mmap
import os
import re
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Container, Mapping
from typing import NamedTuple

from spiderfs.core.homes import Homes
from spiderfs.errors import ConfigError, SourceError, SourceUnavailable
from spiderfs.sources.source import FromPeer, Source, Version, version_hash
from spiderfs.sources.web.asking import Line, Web, left_s

log = logging.getLogger(__name__)

_ASKED = re.compile(rb"(.+)\.spiderfs-([0-9a-f]{16})", re.DOTALL)
_NAME_MAX = 255
# Files that are younger may be changing still (`vfs/settling.py`), and clocks differ.
YOUNG_S = 60.0
# After so many failures in a row a peer is not asked for this long, and twice as long after each further one.
FAILURES, PAUSE_S, LONGEST_PAUSE_S = 3, 1.0, 30.0
# How often addresses are looked up anew, and how soon again if that has failed. Nobody waits for it.
_ADDRESS_S, _ADDRESS_AGAIN_S = 60.0, 2.0
_ABSENT = (403, 404, 410)
_FIELDS = ("hits", "bytes", "absent", "timeouts", "down")


def asked_name(name: bytes, version: int) -> bytes:
    """The name under which a node is asked for one version of a file."""
    return b"%s.spiderfs-%016x" % (name, version)


def asked_version(name: bytes) -> tuple[bytes, int] | None:
    """The file's own name, and the version, of a name that `asked_name` has made; None for any other name."""
    found = _ASKED.fullmatch(name)
    return None if found is None else (found[1], int(found[2], 16))


def own_url(urls: Mapping[str, float], given: str) -> str:
    """Which node's URL is this machine's: `given`, or the only one with an address of it; raises ConfigError."""
    if given:
        return given
    own = [url for url in urls if _is_here(urllib.parse.urlsplit(url).hostname or "")]
    if len(own) != 1:
        which = "several nodes" if own else "no node"
        raise ConfigError(f"peers names {which} with an address of this machine: say which is this one, peer_self=URL")
    return own[0]


def _is_here(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
                return True
            except OSError:
                continue
    return False


class PeerStatus(NamedTuple):
    up: bool
    hits: int
    bytes: int
    absent: int
    timeouts: int


class PeerCounts:
    """What all reading processes of a mount have had from each peer; make it before they are forked."""

    def __init__(self, processes: int, members: int) -> None:
        self._row_cells = members * len(_FIELDS)
        self._processes = processes
        self._cells = memoryview(mmap.mmap(-1, max(1, processes * self._row_cells) * 8)).cast("Q")

    def row(self, process: int) -> memoryview:
        return self._cells[process * self._row_cells : (process + 1) * self._row_cells]

    def of(self, member: int) -> PeerStatus:
        """The sums over all processes; a peer is up while no process lets it rest."""
        first = member * len(_FIELDS)
        hits, size, absent, timeouts, down = (
            sum(self._cells[row * self._row_cells + first + field] for row in range(self._processes))
            for field in range(len(_FIELDS))
        )
        return PeerStatus(not down, hits, size, absent, timeouts)


class _Peer:
    """One node, for the threads of one process."""

    def __init__(self, url: str, counts: memoryview, timeout_s: float) -> None:
        self.url = url
        parts = urllib.parse.urlsplit(url)
        self._host, path = parts.hostname or "", urllib.parse.quote(parts.path.rstrip("/"), safe="/%")
        self._base = f"{parts.scheme}://{parts.netloc}{path}"
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._web = Web(timeout_s, self._connected)
        self._counts, self._timeout_s = counts, timeout_s
        self._addresses: list[tuple[socket.AddressFamily, tuple[object, ...]]] = []
        self._looked_up = threading.Event()
        self._lock = threading.Lock()
        self._failed, self._rests_until = 0, 0.0

    def keep_looked_up(self) -> None:
        """Find the node's addresses again and again; does not return."""
        while True:
            time.sleep(_ADDRESS_S if self._look_up() else _ADDRESS_AGAIN_S)

    def _look_up(self) -> bool:
        """Find the node's addresses; whether they are known now."""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._addresses = [(socket.AddressFamily(family), address) for family, _, _, _, address in found]
        except (OSError, UnicodeError) as exc:
            log.debug("%s: %s", self.url, exc)
        self._looked_up.set()
        return bool(self._addresses)

    def ask(self, path: bytes, offset: int, length: int, size: int) -> bytes | None:
        """Bytes of a file of this size; None if the node does not have them, or does not give them in time."""
        until = time.monotonic() + self._timeout_s
        if not self._looked_up.wait(self._timeout_s) or not self._addresses or not self._may_be_asked():
            return None
        extent = None if length == size else (offset, offset + length)
        url = f"{self._base}/{urllib.parse.quote(path)}"
        try:
            answer = self._web.get(url, extent=extent, most_bytes=length, within_s=until - time.monotonic())
            if not answer.ok and answer.status not in _ABSENT:
                raise SourceUnavailable(f"status {answer.status}")
            if answer.ok and (len(answer.body), answer.size) != (length, size):
                raise SourceUnavailable(f"{len(answer.body)} bytes of {answer.size} instead of {length} of {size}")
        except SourceError as exc:
            self._note(failed=True)
            log.debug("%s: %s: %s", self.url, os.fsdecode(path), exc)
            return None
        content = answer.body if answer.ok else None
        self._note(failed=False, content=content)
        return content

    def _connected(self, _: str, until: float) -> Line:
        error: OSError = OSError(errno.EHOSTUNREACH, "no address")
        for family, address in self._addresses:
            connected = socket.socket(family, socket.SOCK_STREAM)
            try:
                connected.settimeout(left_s(until))
                connected.connect(address)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    connected = self._tls.wrap_socket(connected, server_hostname=self._host)
            except OSError as exc:
                connected.close()
                error = exc
                continue
            connection = http.client.HTTPConnection(self._host, self._port)
            connection.sock = connected
            return Line(connection)
        raise error

    # -- the breaker

    def _may_be_asked(self) -> bool:
        with self._lock:
            if self._failed < FAILURES:
                return True
            if time.monotonic() < self._rests_until:
                return False
            # One tries whether the node is back; the others learn of it.
            self._rests_until = time.monotonic() + self._timeout_s
            return True

    def _note(self, failed: bool, content: bytes | None = None) -> None:
        with self._lock:
            if failed:
                self._failed += 1
                self._counts[_FIELDS.index("timeouts")] += 1
                if self._failed >= FAILURES:
                    pause_s = min(PAUSE_S * 2.0 ** min(self._failed - FAILURES, 9), LONGEST_PAUSE_S)
                    self._rests_until = time.monotonic() + pause_s
                    self._counts[_FIELDS.index("down")] = 1
                return
            self._failed = 0
            self._counts[_FIELDS.index("down")] = 0
            if content is None:
                self._counts[_FIELDS.index("absent")] += 1
            else:
                self._counts[_FIELDS.index("hits")] += 1
                self._counts[_FIELDS.index("bytes")] += len(content)


class PeerSource:
    """`inner`, and in front of it the nodes of `homes`, whose names are their URLs; for one reading process."""

    def __init__(
        self, inner: Source, homes: Homes, timeout_s: float, counts: memoryview, asked: Container[int]
    ) -> None:
        """`counts` is this process's row of `PeerCounts`; versions in `asked` are read from `inner` alone."""
        self._inner = inner
        self._homes = homes
        self._asked = asked
        width = len(_FIELDS)
        self._peers = [
            _Peer(url, counts[member * width : (member + 1) * width], timeout_s)
            for member, url in enumerate(homes.members)
        ]
        self._begun, self._beginning = False, threading.Lock()
        self.undated_directories = inner.undated_directories
        self.stat, self.scan, self.statvfs = inner.stat, inner.scan, inner.statvfs
        self.read_present, self.readlink = inner.read_present, inner.readlink
        self.listxattr, self.getxattr = inner.listxattr, inner.getxattr

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        """As `Source.read`; what a peer gave is a `FromPeer`."""
        if length and offset + length <= version.size and not _is_young(version):
            number = version_hash(path, version)
            if self._homes.is_elsewhere(number) and number not in self._asked:
                self._begin()
                directory, slash, name = path.rpartition(b"/")
                name = asked_name(name, number)
                if len(name) <= _NAME_MAX:
                    peer = self._peers[self._homes.home(number)]
                    found = peer.ask(directory + slash + name, offset, length, version.size)
                    if found is not None:
                        return FromPeer(found)
        return self._inner.read(path, offset, length, version)

    def close(self) -> None:
        self._inner.close()

    def _begin(self) -> None:
        # A thread does not survive the fork of the reading process, which comes after this object was made.
        with self._beginning:
            if not self._begun:
                self._begun = True
                # A name server that does not answer keeps a thread for half a minute, and no other peer waiting.
                for member, peer in enumerate(self._peers):
                    if member != self._homes.own:
                        threading.Thread(target=peer.keep_looked_up, daemon=True).start()


def _is_young(version: Version) -> bool:
    return not version.tag and version.mtime_ns > (time.time() - YOUNG_S) * 1e9
