"""A Redis server of its own on this machine, which keeps nothing on the disk."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.common.debian import environment_of, program
from benchmarks.common.web_server import free_port

# Debian's program is in the package of tools, where it checks a file if it is called by its other name.
REDIS = ("redis-check-rdb", "redis-tools", "libjemalloc2", "liblzf1")
# How long it may take to listen, on a busy machine.
PATIENCE_S = 30.0


class RedisServer:
    def __init__(
        self, place: Path, *settings: str, certificate: Path | None = None, address: str = "127.0.0.1"
    ) -> None:
        """Start it. `settings` are those of redis.conf, each with two dashes; its log is in the directory `place`.

        `certificate`: a PEM file with a key; then it speaks TLS alone, as the host `localhost`.
        """
        self.address, self.port = address, free_port()
        self.url = f"redis://{address}:{self.port}"
        ports = ["--port", str(self.port)]
        if certificate is not None:
            self.url = f"rediss://localhost:{self.port}"
            files = [
                *("--tls-cert-file", str(certificate), "--tls-key-file", str(certificate)),
                *("--tls-ca-cert-file", str(certificate)),
            ]
            ports = ["--port", "0", "--tls-port", str(self.port), *files, "--tls-auth-clients", "no"]
        # Without a password a server answers other machines only in unprotected mode.
        keeps_nothing = ["--protected-mode", "no", "--save", "", "--appendonly", "no", "--dir", str(place)]
        self._command = ["redis-server", "--bind", address, *ports, *keeps_nothing, *settings]
        self._log = place / "redis.log"
        self.start()

    def start(self) -> None:
        """Start it, again perhaps, and wait until it listens."""
        path = program(*REDIS)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, executable=path, env=environment_of(path), stdout=log, stderr=log
            )
        until = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 1):
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
