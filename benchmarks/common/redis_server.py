"""A Redis server of its own on this machine, or a cluster, which keeps nothing on the disk."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis.crc import key_slot

from benchmarks.common.debian import environment_of, program
from benchmarks.common.web_server import free_port

# How long it may take to listen, on a busy machine.
PATIENCE_S = 30.0
_SLOTS = 1 << 14


class RedisServer:
    def __init__(self, place: Path, *settings: str, certificate: Path | None = None) -> None:
        """Start it. `settings` are those of redis.conf, each with two dashes; its log is in the directory `place`.

        `certificate`: a PEM file with a key; then it speaks TLS alone, as the host `localhost`.
        """
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        ports = ["--port", str(self.port)]
        if certificate is not None:
            self.url = f"rediss://localhost:{self.port}"
            files = [
                *("--tls-cert-file", str(certificate), "--tls-key-file", str(certificate)),
                *("--tls-ca-cert-file", str(certificate)),
            ]
            ports = ["--port", "0", "--tls-port", str(self.port), *files, "--tls-auth-clients", "no"]
        keeps_nothing = ["--save", "", "--appendonly", "no", "--dir", str(place)]
        self._command = ["redis-server", "--bind", "127.0.0.1", *ports, *keeps_nothing, *settings]
        self._log = place / "redis.log"
        self.start()

    def start(self) -> None:
        """Start it, again perhaps, and wait until it listens."""
        # Debian's program is in the package of tools, where it checks a file if it is called by its other name.
        path = program("redis-check-rdb", "redis-tools", "libjemalloc2", "liblzf1")
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, executable=path, env=environment_of(path), stdout=log, stderr=log
            )
        until = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"redis-server does not listen: {self._log.read_text()[-500:]}")
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class RedisCluster:
    """Three servers, each of which has a third of the slots."""

    def __init__(self, place: Path, *settings: str, certificate: Path | None = None) -> None:
        self.servers: list[RedisServer] = []
        self._certificate = certificate
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as starting:
            for number in range(3):
                directory = place / f"shard{number}"
                directory.mkdir()
                own = ["--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "2000"]
                # A shard that is down keeps nobody from the others.
                own += ["--cluster-require-full-coverage", "no"]
                if certificate is not None:
                    own += ["--tls-cluster", "yes", "--cluster-announce-hostname", "localhost"]
                server = RedisServer(directory, *own, *settings, certificate=certificate)
                self.servers.append(starting.enter_context(server))
            self._join()
            self._stack = starting.pop_all()
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

    def _join(self) -> None:
        clients = [self._stack.enter_context(contextlib.closing(self.client(number))) for number in range(3)]
        for number, client in enumerate(clients):
            first, after = (-(-_SLOTS * part // 3) for part in (number, number + 1))
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, after - 1)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            bus = client.config_get("cluster-port")["cluster-port"]
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", self.servers[number].port, bus)
        until = time.monotonic() + PATIENCE_S
        while not all(map(_is_whole, clients)):
            if time.monotonic() > until:
                raise RuntimeError("the servers do not become a cluster")
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _is_whole(client: Any) -> bool:
    is_ok = client.execute_command("CLUSTER INFO")["cluster_state"] == "ok"
    return is_ok and len(client.execute_command("CLUSTER SLOTS")) == 3
