"""`spiderfs umount`: unmounts a directory and waits until its daemon has released the cache directory."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

import click

from spiderfs.cli.control_files import find_mount, mountpoints, read_stats
from spiderfs.errors import MountError
from spiderfs.linux.mounts import Mount, mounts, unmount
from spiderfs.shared.layout import CacheLayout

# A daemon ends within a second, but its disk may take longer, when LMDB flushes gigabytes of dirty pages.
RELEASE_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05


@click.command()
@click.argument("mountpoint", shell_complete=mountpoints)
@click.option("--lazy", is_flag=True, help="Detach it even while it is in use or hangs; do not wait for the daemon.")
def umount(mountpoint: str, lazy: bool) -> None:
    """Unmount the mount at MOUNTPOINT, and wait until its daemon has ended."""
    mount = find_mount(mountpoint)
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
                click.echo(f"spiderfs: {mountpoint} does not answer: it is detached without its daemon", err=True)
    before = _places_of(mount)
    unmount(mount.mountpoint, lazy)
    # A mount that somebody has made since may have the number of the one that is gone.
    others = sorted(map(str, before & _places_of(mount) - {mount.mountpoint}))
    if others and not lazy:
        raise MountError(
            f"{mountpoint} is unmounted, but the same mount is also at {', '.join(others)}: unmount that too, then its "
            f"daemon ends"
        )
    if cache_dir and not wait_released(Path(cache_dir), RELEASE_TIMEOUT_S):
        raise MountError(
            f"{mountpoint} is unmounted, but after {RELEASE_TIMEOUT_S:.0f} s its daemon still uses {cache_dir}: wait"
            f" until it ends, or end it with 'kill {pid}'"
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
