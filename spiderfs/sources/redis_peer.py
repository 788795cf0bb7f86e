"""A server of Redis or Valkey as a home of samples, or a cluster, for nodes without disks and where one runs already.

It holds whole files, by the numbers of their versions, in the name of a data set, and whoever had to read the source
gives it the file. It is to have `noeviction`: the share of the samples that has its home there is written in `peers`,
or found out (`redis_survey.py`), and a cache that lets the oldest go would lose each sample just before its next epoch.
What does not fit any more the server refuses, and what nobody has asked for in a week leaves: earlier versions.

In a cluster a sample is asked for where its slot is by the map that the manager has found (`Node.shards`), and nowhere
else: what that shard gives to another one (MOVED, ASK) counts as absent, until the manager has seen the new map. No
name server is asked on the way of a read.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence

from spiderfs.errors import SourceUnavailable
from spiderfs.sources.node_names import Node
from spiderfs.sources.peer import Asked, Counts, Peer, Server
from spiderfs.sources.redis_client import KEPT_S, SLOTS, RedisClient, errors, key_of, slot_of

# Bytes of files that wait to be given, and how many files are given at a time, within how long. Nobody waits for it.
_WAITING_BYTES, _AT_A_TIME, _GIVEN_S = 32 << 20, 16, 5.0


class RedisPeer(Peer):
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

    def _fetch(self, asked: Asked) -> bytes | None:
        if asked.length != asked.size:
            return None
        try:
            content: bytes | None = self._redis().within(self._timeout_s).getex(_key(self.node, asked), ex=KEPT_S)
        except errors() as exc:
            if type(exc).__name__ in ("MovedError", "AskError"):
                return None
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
            # What a store gave is no `bytes`, and redis-py takes nothing else.
            self._given.put((_key(self.node, asked), bytes(content)))
            if self._giver is None:
                self._giver = threading.Thread(target=self._give, daemon=True)
                self._giver.start()

    def close(self) -> None:
        if self._giver is not None:
            self._given.put(("", b""))
            self._giver.join(0 if self._failed else self._timeout_s)
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
            with contextlib.suppress(*errors()):
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
                    raise ConnectionError("its address is not known")
                self._reached, self._client = address, RedisClient(self.node.url, address)
            return self._client


def _key(node: Node, asked: Asked) -> str:
    return key_of(node.url, f"{asked.number:016x}")
