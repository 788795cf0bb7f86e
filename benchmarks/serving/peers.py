"""The systems that are measured side by side; each shows a directory at a mount point.

The table `PEERS` holds the name of each system and the command that mounts. All daemons run in the foreground as our
children, so that all their processes are known by pid. A mount is a context manager: however its context ends, the
mount point is unmounted and every process of the daemon has ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.common.mounts import SPIDERFS, is_mounted
from benchmarks.serving.process_cost import process_tree
from spiderfs import client
from spiderfs.protocol.requests import ENVIRONMENT, SCHEME

START_PATIENCE_S = 30.0
STOP_PATIENCE_S = 15.0
SPIDERFS_CAPACITY = "100GiB"
INSTALL_PEERS = Path(__file__).resolve().parents[1] / "install-peers"
PYTHON_OF_PEERS = INSTALL_PEERS.parents[1] / ".peers" / "bin" / "python"


@dataclass(frozen=True)
class Mounted:
    """A directory shown at `root` by the daemon `pid` (None for native, which needs no daemon)."""

    name: str
    root: Path
    pid: int | None

    def processes(self) -> list[int]:
        return [] if self.pid is None else process_tree(self.pid)


def _bindfs(source: Path | str, mountpoint: Path, scratch: Path) -> list[str]:
    # bindfs runs with its defaults: --multithreaded made no difference beyond the noise of this measurement.
    return ["bindfs", "-f", "--no-allow-other", "-o", "ro", str(source), str(mountpoint)]


def _rclone(source: Path | str, mountpoint: Path, scratch: Path) -> list[str]:
    cache = ["--vfs-cache-mode", "full", "--cache-dir", str(scratch / "rclone")]
    # --config is empty, so that no setting of this user changes what is measured.
    return ["rclone", "mount", f":local:{source}", str(mountpoint), "--config", "", "--read-only", *cache]


def _spiderfs(source: Path | str, mountpoint: Path, scratch: Path) -> list[str]:
    # The capacity is large enough for all files, because this benchmark is not about what to keep.
    options = f"capacity={SPIDERFS_CAPACITY},cache_dir={scratch / 'spiderfs'}"
    return [str(SPIDERFS), "mount", str(source), str(mountpoint), "--foreground", "-o", options]


def _immutable(source: Path | str, mountpoint: Path, scratch: Path) -> list[str]:
    return [*_spiderfs(source, mountpoint, scratch / "immutable"), "-o", "immutable"]


MountCommand = Callable[[Path | str, Path, Path], list[str]]
PEERS: dict[str, MountCommand | None] = {
    "native": None,
    "bindfs": _bindfs,
    "rclone": _rclone,
    "spiderfs": _spiderfs,
    "immutable": _immutable,
}


def install_missing(names: Collection[str]) -> None:
    """Install the peers that Debian packages if one of them is among the names and its program is missing."""
    if any(name in ("bindfs", "rclone", "s3fs") and shutil.which(name) is None for name in names):
        subprocess.run([INSTALL_PEERS], check=True)


def python_of_peers() -> Path:
    """The interpreter of the environment that holds streaming formats and image decoders, which is made if missing."""
    subprocess.run([INSTALL_PEERS, "python"], check=True)
    return PYTHON_OF_PEERS


@contextmanager
def mounted(name: str, source: Path | str, scratch: Path, options: str = "") -> Iterator[Mounted]:
    """Show `source` through the peer `name` while the context lasts; `scratch` holds its mount point, cache and log.

    `options` are more options for the peer's -o.
    Raises RuntimeError, with the end of the daemon's log, if the peer does not mount.
    """
    command = PEERS[name]
    if command is None:
        yield Mounted(name, Path(source), None)
        return
    mountpoint = scratch / f"mnt-{name}"
    further = ["-o", options] if options else []
    with shown(name, [*command(source, mountpoint, scratch), *further], mountpoint, scratch / f"{name}.log") as peer:
        yield peer


@contextmanager
def served(name: str, source: Path, scratch: Path, options: str = "") -> Iterator[int]:
    """Serve `source` as spiderfs://NAME, without a mount, while the context lasts; gives the daemon's process ID.

    Raises RuntimeError, with the end of the daemon's log, if it does not serve.
    """
    scratch.mkdir(parents=True)
    os.environ[ENVIRONMENT] = os.fspath(scratch / "sockets")
    chosen = f"capacity={SPIDERFS_CAPACITY},cache_dir={scratch / 'cache'}"
    command = [str(SPIDERFS), "serve", str(source), "--name", name, "--foreground", "-o", chosen]
    log = scratch / "log"
    daemon = _started([*command, "-o", options], log)
    try:
        _wait_until(partial(_answers, name), daemon, log)
        yield daemon.pid
    finally:
        daemon.terminate()
        daemon.wait(STOP_PATIENCE_S)
        del os.environ[ENVIRONMENT]


@contextmanager
def shown(name: str, command: list[str], mountpoint: Path, log_path: Path) -> Iterator[Mounted]:
    """Run the daemon `command` while the context lasts; it shows a directory at `mountpoint`, which is made first.

    Raises RuntimeError, with the end of the daemon's log, if the daemon does not mount.
    """
    mountpoint.mkdir(parents=True)
    daemon = _started(command, log_path)
    try:
        _wait_until(lambda: is_mounted(mountpoint), daemon, log_path)
        yield Mounted(name, mountpoint, daemon.pid)
    finally:
        _stop(daemon, mountpoint)


def _answers(name: str) -> bool:
    try:
        client.listdir(f"{SCHEME}{name}")
    except OSError:
        return False
    return True


def _started(command: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    with open(log_path, "wb") as log:
        # The daemon has a session of its own, so that Ctrl-C reaches us alone and we stop the daemons in order.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_until(begun: Callable[[], bool], daemon: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline = time.monotonic() + START_PATIENCE_S
    while not begun():
        if daemon.poll() is not None or time.monotonic() > deadline:
            said = log_path.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{daemon.args!r} did not begin; it said:\n{said}")
        time.sleep(0.02)


def _stop(daemon: subprocess.Popen[bytes], mountpoint: Path) -> None:
    """Unmount, and wait until all processes of the daemon have ended."""
    tree = process_tree(daemon.pid)
    if is_mounted(mountpoint):
        # This fails only if the mount is busy or has just ended; the signal below ends the daemon in any case.
        subprocess.run(["fusermount3", "-u", str(mountpoint)], capture_output=True, check=False)
    try:
        daemon.wait(STOP_PATIENCE_S)
    except subprocess.TimeoutExpired:
        print(f"{daemon.args!r} did not stop when unmounted; killing it", file=sys.stderr)
        for pid in tree:
            _kill(pid)
        daemon.wait()
    if is_mounted(mountpoint):
        subprocess.run(["fusermount3", "-u", "-z", str(mountpoint)], capture_output=True, check=False)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
