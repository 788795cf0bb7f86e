"""The home of samples that is elsewhere, as a reading process asks it.

A peer is trusted as the source is, and nothing depends on it: if it does not know the file, does not answer within the
time limit of a question, or answers with anything else than the bytes asked for, the source is read. After some
failures in a row a peer is not asked for a while (the breaker), so a node that is down costs its readers the time limit
a few times and then nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from typing import NamedTuple

from spiderfs.errors import SourceError, SourceUnavailable
from spiderfs.sources.members import FIELDS, mark_of
from spiderfs.sources.node_names import Node

log = logging.getLogger(__name__)

# After so many failures in a row a peer is not asked for this long, and twice as long after each further one.
FAILURES, PAUSE_S, LONGEST_PAUSE_S = 3, 1.0, 30.0


class Asked(NamedTuple):
    """Bytes of one version of a file, which has this number and size."""

    path: bytes
    number: int
    offset: int
    length: int
    size: int
    patience_s: float = 0.0
    """How long one who has to fetch it may take, where that is more than the time limit of a question."""


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


class Peer(ABC):
    """For the threads of one process."""

    node: Node
    """As it is known now; its URL stays."""

    @abstractmethod
    def ask(self, asked: Asked) -> bytes | None:
        """The bytes; None if the peer does not have them, or does not give them in time."""

    def offer(self, asked: Asked, content: bytes) -> None:  # noqa: B027
        """Take what the source gave, if it is one that is filled by those who ask; waits for nothing."""

    @abstractmethod
    def close(self) -> None: ...


class Server(Peer):
    """One server, with a breaker."""

    def __init__(self, node: Node, counts: Counts, timeout_s: float) -> None:
        self.node = node
        self._counts, self._timeout_s = counts, timeout_s
        self._lock = counts.lock
        self._failed, self._rests_until = 0, 0.0
        self._turns = 0
        # Under the lock: what a thread that still asks it finds out says nothing about the peer.
        self.is_gone = False

    def ask(self, asked: Asked) -> bytes | None:
        if not self.node.addresses or not self._may_be_asked():
            return None
        try:
            content = self._fetch(asked)
            if content is not None and not isinstance(content, bytes):
                raise SourceUnavailable("something else than bytes")
            if content is not None and len(content) != asked.length:
                raise SourceUnavailable(f"{len(content)} bytes instead of {asked.length}")
        except SourceError as exc:
            self._note(failed=True)
            log.debug("%s: %s: %s", self.node.url, os.fsdecode(asked.path), exc)
            return None
        self._note(failed=False, content=content)
        return content

    @property
    def _addresses(self) -> list[str]:
        """Where it is to be tried, in this order: after a question that has failed, the next address comes first."""
        known = self.node.addresses
        first = self._turns % max(1, len(known))
        return known[first:] + known[:first]

    @abstractmethod
    def _fetch(self, asked: Asked) -> bytes | None:
        """The bytes, within the time limit; None if it does not have them. Raises SourceError."""

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
                self._turns += 1
                if self._failed >= FAILURES:
                    pause_s = min(PAUSE_S * 2.0 ** min(self._failed - FAILURES, 9), LONGEST_PAUSE_S)
                    self._rests_until = time.monotonic() + pause_s
                    if not self.is_gone:
                        self._counts.resting.add(self.node.url)
                self._counts.add("timeouts")
                return
            self._failed = 0
            if not self.is_gone:
                self._counts.resting.discard(self.node.url)
            self._counts.add("absent" if content is None else "hits")
            self._counts.add("bytes", len(content or b""))
