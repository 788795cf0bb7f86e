"""A cluster of Redis servers on this machine, which keeps nothing on the disk."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from mounting import eventually
from redis.crc import key_slot

from benchmarks.common.redis_server import RedisServer
from benchmarks.common.web_server import free_port

_SLOTS = 1 << 14


class RedisCluster:
    """Three servers, each of which has a third of the slots."""

    def __init__(self, place: Path, *settings: str, certificate: Path | None = None) -> None:
        self.servers: list[RedisServer] = []
        self._place, self._settings, self._certificate = place, settings, certificate
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as starting:
            starting.push(self._stack)
            for _ in range(3):
                self._start()
            self._join()
            starting.pop_all()
        self.url = self.servers[0].url

    def client(self, number: int) -> Any:
        """One that knows of no other server."""
        tls: dict[str, Any] = {"ssl": True, "ssl_cert_reqs": "none"} if self._certificate is not None else {}
        return redis.Redis("127.0.0.1", self.servers[number].port, protocol=2, **tls)

    def owner(self, key: str) -> int:
        """The number of the server that has this key's slot."""
        return key_slot(key.encode()) * 3 // _SLOTS

    def signal(self, number: int) -> None:
        for server in self.servers:
            server.signal(number)

    def add_replica(self, of: int) -> int:
        """Have one more server, which has what another one has; returns its number."""
        self._start()
        number = len(self.servers) - 1
        replica = self._meet(number)
        known = self._meet(of).execute_command("CLUSTER MYID").decode()
        eventually(lambda: known in str(replica.execute_command("CLUSTER NODES")))
        replica.execute_command("CLUSTER", "REPLICATE", known)
        eventually(lambda: replica.info()["master_link_status"] == "up")
        return number

    def _start(self) -> None:
        directory = self._place / f"shard{len(self.servers)}"
        directory.mkdir()
        # On a busy machine a server may be silent for seconds, and is not down. A test in which one is gives less.
        own = ["--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "20000"]
        # A shard that is down keeps no one from the others.
        own += ["--cluster-require-full-coverage", "no"]
        if self._certificate is not None:
            own += ["--tls-cluster", "yes", "--cluster-announce-hostname", "localhost"]
        server = RedisServer(directory, *own, *self._settings, certificate=self._certificate)
        self.servers.append(self._stack.enter_context(server))

    def _join(self) -> None:
        for number in range(3):
            first, after = (-(-_SLOTS * part // 3) for part in (number, number + 1))
            with contextlib.closing(self.client(number)) as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, after - 1)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        clients = [self._meet(number) for number in range(3)]
        eventually(lambda: all(map(_is_whole, clients)))

    def _meet(self, number: int) -> Any:
        """A client of a server that the first one knows then."""
        client = self._stack.enter_context(contextlib.closing(self.client(number)))
        bus = client.config_get("cluster-port")["cluster-port"]
        with contextlib.closing(self.client(0)) as first:
            first.execute_command("CLUSTER", "MEET", "127.0.0.1", self.servers[number].port, bus)
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _is_whole(client: Any) -> bool:
    is_ok = client.execute_command("CLUSTER INFO")["cluster_state"] == "ok"
    return is_ok and len(client.execute_command("CLUSTER SLOTS")) == 3
