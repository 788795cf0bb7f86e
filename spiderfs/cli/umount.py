"""`spiderfs umount`: unmounts one directory or all, and waits until the daemons have released their caches."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import click

from spiderfs.cli.control_files import SERVED, daemon_of, find_mount, mountpoints, printable, read_stats
from spiderfs.errors import MountError, UsageError
from spiderfs.linux.mounts import FSTYPE, Mount, mounts, unmount
from spiderfs.shared.layout import CacheLayout

# A daemon ends within a second, but its disk may take longer, when LMDB flushes gigabytes of dirty pages.
RELEASE_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05


class _Detached(NamedTuple):
    mount: Mount
    places: set[Path]
    """Where it was mounted."""
    cache_dir: str
    pid: str
    lazy: bool


@click.command()
@click.argument("mountpoint", required=False, shell_complete=mountpoints)
@click.option("--all", "every", is_flag=True, help="Unmount all mounts that you made; as root, all mounts.")
@click.option("--lazy", is_flag=True, help="Detach it even while it is in use or hangs; do not wait for the daemon.")
@click.pass_context
def umount(ctx: click.Context, mountpoint: str | None, every: bool, lazy: bool) -> None:
    """Unmount the mount at MOUNTPOINT, or end serving spiderfs://NAME, and wait until its daemon has ended."""
    if mountpoint is not None and not every:
        _wait(_detach(find_mount(mountpoint), lazy))
        return
    if mountpoint is not None or not every:
        raise UsageError("name one MOUNTPOINT to unmount, or write --all")
    detached, failures = [], 0
    # The last one first: it may lie in an earlier one.
    for mount in reversed(_own_mounts()):
        try:
            detached.append(_detach(mount, lazy))
        except MountError as exc:
            failures += 1
            click.echo(f"spiderfs: {printable(exc)}", err=True)
    for done in detached:
        try:
            _wait(done)
        except MountError as exc:
            failures += 1
            click.echo(f"spiderfs: {printable(exc)}", err=True)
        else:
            click.echo(printable(f"unmounted {done.mount.mountpoint}"))
    ctx.exit(1 if failures else 0)


def _own_mounts() -> list[Mount]:
    """The mounts that this user made, or all for root; those below another on one mount point too."""
    user = os.geteuid()
    found = [mount for mount in mounts() if mount.fstype == FSTYPE]
    return [mount for mount in found if user == 0 or f"user_id={user}" in mount.options.split(",")]


def _detach(mount: Mount, lazy: bool) -> _Detached:
    if mount.fstype == SERVED:
        stats = read_stats(mount)
        os.kill(daemon_of(mount), signal.SIGTERM)
        return _Detached(mount, set(), "" if lazy else str(stats["cache_dir"]), str(stats["pid"]), lazy)
    cache_dir, pid = "", ""
    if not lazy:
        try:
            stats = read_stats(mount)
            cache_dir, pid = str(stats.get("cache_dir", "")), str(stats.get("pid", ""))
        except OSError as exc:
            # Our own thread, which still waits for the hung daemon, keeps the mount in use, and so may the readers of a
            # dead daemon. Only a lazy unmount works then.
            lazy = isinstance(exc, TimeoutError) or exc.errno == errno.ENOTCONN
            if isinstance(exc, TimeoutError):
                click.echo(
                    printable(f"spiderfs: {mount.mountpoint} does not answer: it is detached without its daemon"),
                    err=True,
                )
    places = _places_of(mount)
    unmount(mount.mountpoint, lazy)
    return _Detached(mount, places, cache_dir, pid, lazy)


def _wait(done: _Detached) -> None:
    """Wait until the daemon of a mount has ended; raises MountError if it does not end."""
    mount, cache_dir = done.mount, done.cache_dir
    # A mount that someone has made since may have the number of the one that is gone.
    others = sorted(map(str, done.places & _places_of(mount) - {mount.mountpoint}))
    if others and not done.lazy:
        raise MountError(
            f"{mount.mountpoint} is unmounted, but the same mount is also at {', '.join(others)}: unmount that too, "
            f"then its daemon ends"
        )
    if cache_dir and not wait_released(Path(cache_dir), RELEASE_TIMEOUT_S):
        raise MountError(
            f"{mount.mountpoint} is unmounted, but after {RELEASE_TIMEOUT_S:.0f} s its daemon still uses {cache_dir}:"
            f" wait until it ends, or end it with 'kill {done.pid}'"
        )


def _places_of(mount: Mount) -> set[Path]:
    return {other.mountpoint for other in mounts() if other.device == mount.device}


def wait_released(cache_dir: Path, timeout_s: float) -> bool:
    """Wait until no daemon uses this cache directory; returns False if one still does after the time limit."""
    try:
        # While the daemon lives, it holds a flock(2) on this file.
        fd = os.open(CacheLayout(cache_dir).lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # Either the directory is gone together with its daemon, or it is another user's and cannot be watched.
        return True
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
            time.sleep(POLL_INTERVAL_S)
    finally:
        os.close(fd)
