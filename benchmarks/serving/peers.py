"""The systems that are measured side by side, each as something that shows a directory at a mount point.

`PEERS` is the table: a name and the command that mounts. All daemons run in the foreground as our children, so that
their whole process tree is known by pid. A mount is a context manager; on the way out, however it is left, the mount
point is unmounted and every process of the daemon is gone.
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
from pathlib import Path

from benchmarks.common.mounts import SPIDERFS, is_mounted
from benchmarks.serving.process_cost import process_tree

START_PATIENCE_S = 30.0
STOP_PATIENCE_S = 15.0
SPIDERFS_CAPACITY = "100GiB"
INSTALL_PEERS = Path(__file__).resolve().parents[1] / "install-peers"


@dataclass(frozen=True)
class Mounted:
    """A directory shown at `root` by the daemon `pid` (None for native, which needs no daemon)."""

    name: str
    root: Path
    pid: int | None

    def processes(self) -> list[int]:
        return [] if self.pid is None else process_tree(self.pid)


def _bindfs(source: Path, mountpoint: Path, scratch: Path) -> list[str]:
    # Its defaults: --multithreaded was now faster, now slower, within the noise of this measurement.
    return ["bindfs", "-f", "--no-allow-other", "-o", "ro", str(source), str(mountpoint)]


def _rclone(source: Path, mountpoint: Path, scratch: Path) -> list[str]:
    cache = ["--vfs-cache-mode", "full", "--cache-dir", str(scratch / "rclone")]
    # An empty --config: nothing of this user's settings may change what is measured.
    return ["rclone", "mount", f":local:{source}", str(mountpoint), "--config", "", "--read-only", *cache]


def _spiderfs(source: Path, mountpoint: Path, scratch: Path) -> list[str]:
    # Everything fits: this benchmark is about serving, not about what to keep.
    options = f"capacity={SPIDERFS_CAPACITY},cache_dir={scratch / 'spiderfs'}"
    return [str(SPIDERFS), "mount", str(source), str(mountpoint), "--foreground", "-o", options]


MountCommand = Callable[[Path, Path, Path], list[str]]
PEERS: dict[str, MountCommand | None] = {
    "native": None,
    "bindfs": _bindfs,
    "rclone": _rclone,
    "spiderfs": _spiderfs,
}
VERSION_COMMANDS = {
    "bindfs": ["bindfs", "--version"],
    "rclone": ["rclone", "version"],
    "spiderfs": [str(SPIDERFS), "--version"],
}


def version(name: str) -> str:
    """The first line of what the peer says about itself."""
    if name not in VERSION_COMMANDS:
        return f"Linux {os.uname().release}"
    done = subprocess.run(VERSION_COMMANDS[name], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).partition("\n")[0].strip()


def install_missing(names: Collection[str]) -> None:
    """Install bindfs and rclone if one of them is among the names and its program is missing."""
    if any(name in ("bindfs", "rclone") and shutil.which(name) is None for name in names):
        subprocess.run([INSTALL_PEERS], check=True)


@contextmanager
def mounted(name: str, source: Path, scratch: Path, options: str = "") -> Iterator[Mounted]:
    """Show `source` through the peer `name` while the context lasts; `scratch` holds its mount point, cache and log.

    `options` are further ones for the peer's -o.
    Raises RuntimeError, with the end of the daemon's log, if it does not come up.
    """
    command = PEERS[name]
    if command is None:
        yield Mounted(name, source, None)
        return
    mountpoint = scratch / f"mnt-{name}"
    further = ["-o", options] if options else []
    with shown(name, [*command(source, mountpoint, scratch), *further], mountpoint, scratch / f"{name}.log") as peer:
        yield peer


@contextmanager
def shown(name: str, command: list[str], mountpoint: Path, log_path: Path) -> Iterator[Mounted]:
    """What the daemon `command` shows at `mountpoint`, which is made, while the context lasts.

    Raises RuntimeError, with the end of the daemon's log, if it does not come up.
    """
    mountpoint.mkdir(parents=True)
    with open(log_path, "wb") as log:
        # A session of its own: Ctrl-C in the terminal reaches us alone, and we stop the daemons in order.
        daemon = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_mounted(daemon, mountpoint, log_path)
        yield Mounted(name, mountpoint, daemon.pid)
    finally:
        _stop(daemon, mountpoint)


def _wait_until_mounted(daemon: subprocess.Popen[bytes], mountpoint: Path, log_path: Path) -> None:
    deadline = time.monotonic() + START_PATIENCE_S
    while not is_mounted(mountpoint):
        if daemon.poll() is not None or time.monotonic() > deadline:
            said = log_path.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{daemon.args!r} did not mount; it said:\n{said}")
        time.sleep(0.02)


def _stop(daemon: subprocess.Popen[bytes], mountpoint: Path) -> None:
    """Unmount, and see the whole process tree out."""
    tree = process_tree(daemon.pid)
    if is_mounted(mountpoint):
        # Fails only if the mount is busy or gone just now; the signal below ends the daemon in any case.
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
