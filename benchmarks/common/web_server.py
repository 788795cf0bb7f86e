"""nginx over a mount, with the configuration that the documents give, or over any directory."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.debian import program

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/nginx-peers.conf"


# How long nginx may take to listen, on a busy machine.
# The program and its package.
NGINX = ("nginx", "nginx")
PATIENCE_S = 30.0


# The kernel gives connections ports from 32,768 on: one that was free a moment ago may be a client's by now, and who
# connects to it again and again until a server listens may come to be connected to itself.
SERVER_PORTS = range(15_000, 32_000)


def free_port() -> int:
    """A port that no server has, and that no client will be given."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.choice(SERVER_PORTS)))
            port: int = probe.getsockname()[1]
            return port


class WebServer:
    """The processes of one nginx."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def signal(self, number: int) -> None:
        """Send a signal to the master and all workers."""
        master = self._process.pid
        workers = Path(f"/proc/{master}/task/{master}/children").read_text().split()
        for pid in (master, *map(int, workers)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._process.wait(10)


@contextlib.contextmanager
def web_server(
    point: Path, place: Path, port: int, workers: int = 8, address: str = "127.0.0.1"
) -> Iterator[WebServer]:
    """nginx over a mount, at this port of this machine."""
    text = EXAMPLE.read_text()
    changes = {
        "user www-data;": "user root;" if os.geteuid() == 0 else "",
        "worker_processes 32;": f"worker_processes {workers}; daemon off;",
        "/var/log/nginx/spiderfs.log": str(place / "nginx.log"),
        "/run/nginx-spiderfs.pid": str(place / "nginx.pid"),
        "listen 8443;": f"listen {address}:{port};",
        "allow 10.0.0.0/24;": f"allow {ipaddress.ip_network(f'{address}/24', strict=False)};",
        "/mnt/imagenet": str(point),
        "access_log off;": f"access_log off; {temporary_paths(place)}",
    }
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new, 1)
    with nginx(text, place, port, address) as server:
        yield server


def temporary_paths(place: Path) -> str:
    """What a configuration says of where nginx may write."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    return " ".join(f"{kind}_temp_path {place}/nginx-{kind};" for kind in kinds)


@contextlib.contextmanager
def nginx(text: str, place: Path, port: int, address: str = "127.0.0.1") -> Iterator[WebServer]:
    """nginx with this configuration, once it listens at the port; its files lie in `place`."""
    configuration = place / "nginx.conf"
    configuration.write_text(text)
    command = [program(*NGINX), "-e", str(place / "nginx.log"), "-c", str(configuration), "-p", str(place)]
    server = WebServer(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _listens(address, port):
            if time.monotonic() > deadline:
                raise RuntimeError(f"nginx does not listen: see {place}/nginx.log")
            time.sleep(0.01)
        yield server
    finally:
        server.close()


def _listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0
