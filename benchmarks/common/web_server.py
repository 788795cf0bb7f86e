"""nginx over a mount, with the configuration that the documents give.

Where nginx is not installed, Debian's package is unpacked beside the virtual environment: installing it would start a
server on this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/nginx-peers.conf"


# How long nginx may take to listen, on a busy machine.
PATIENCE_S = 30.0


class NoWebServer(Exception):
    """There is no nginx on this machine; the message says what to do."""


@functools.cache
def nginx_program() -> str:
    """The path of nginx; raises NoWebServer."""
    installed = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if installed:
        return installed
    place = Path(sys.prefix) / "nginx"
    program = place / "usr/sbin/nginx"
    place.mkdir(exist_ok=True)
    with open(place / "lock", "w") as lock:
        # Several processes run tests.
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not program.exists():
            try:
                subprocess.run(["apt-get", "download", "-qq", "nginx"], cwd=place, capture_output=True, check=True)
                (package,) = place.glob("nginx_*.deb")
                subprocess.run(["dpkg-deb", "-x", package, place], capture_output=True, check=True)
            except (OSError, subprocess.CalledProcessError, ValueError) as exc:
                raise NoWebServer(f"there is no nginx, and apt-get gives none ({exc}): install nginx") from exc
    return str(program)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
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
def web_server(point: Path, place: Path, port: int, workers: int = 8) -> Iterator[WebServer]:
    """nginx over a mount, at this port of this machine."""
    program = nginx_program()
    text = EXAMPLE.read_text()
    changes = {
        "user www-data;": "user root;" if os.geteuid() == 0 else "",
        "worker_processes 32;": f"worker_processes {workers}; daemon off;",
        "/var/log/nginx/spiderfs.log": str(place / "nginx.log"),
        "/run/nginx-spiderfs.pid": str(place / "nginx.pid"),
        "listen 8443;": f"listen 127.0.0.1:{port};",
        "allow 10.0.0.0/24;": "allow 127.0.0.1;",
        "/mnt/imagenet": str(point),
        "access_log off;": "access_log off; "
        + " ".join(
            f"{kind}_temp_path {place}/nginx-{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        ),
    }
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new, 1)
    configuration = place / "nginx.conf"
    configuration.write_text(text)
    command = [program, "-e", str(place / "nginx.log"), "-c", str(configuration), "-p", str(place)]
    server = WebServer(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _listens(port):
            if time.monotonic() > deadline:
                raise NoWebServer(f"nginx does not listen: see {place}/nginx.log")
            time.sleep(0.01)
        yield server
    finally:
        server.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
