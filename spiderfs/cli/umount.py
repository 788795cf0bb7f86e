"""`spiderfs umount`: takes a mount away and waits until its daemon has let go of the cache."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

import click

from spiderfs.cli.control_files import find_mount, read_stats
from spiderfs.errors import MountError
from spiderfs.linux.mounts import mounts, unmount
from spiderfs.shared.layout import CacheLayout

# A daemon ends within a second; what may take longer is the disk, when LMDB flushes gigabytes of dirty pages.
RELEASE_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05


@click.command()
@click.argument("mountpoint")
@click.option("--lazy", is_flag=True, help="Detach it now even if it is in use or hangs; do not wait for the daemon.")
def umount(mountpoint: str, lazy: bool) -> None:
    """Take the mount at MOUNTPOINT away."""
    mount = find_mount(mountpoint)
    cache_dir, pid = "", ""
    if not lazy:
        try:
            stats = read_stats(mount)
            cache_dir, pid = str(stats.get("cache_dir", "")), str(stats.get("pid", ""))
        except OSError as exc:
            # The thread that waits for a hung daemon keeps the mount busy, and a dead daemon's readers may do so too.
            lazy = isinstance(exc, TimeoutError) or exc.errno == errno.ENOTCONN
            if isinstance(exc, TimeoutError):
                click.echo(f"spiderfs: {mountpoint} does not answer; it is detached without waiting for it", err=True)
    unmount(mount.mountpoint, lazy)
    same = (other.mountpoint for other in mounts() if other.device == mount.device)
    others = [str(place) for place in same if place != mount.mountpoint]
    if others and not lazy:
        raise MountError(
            f"{mountpoint} is unmounted, but the same is mounted at {', '.join(others)}: its daemon ends when that is "
            f"unmounted too"
        )
    if cache_dir and not wait_released(Path(cache_dir), RELEASE_TIMEOUT_S):
        raise MountError(
            f"{mountpoint} is unmounted, but its daemon (pid {pid}) has not let go of {cache_dir} for"
            f" {RELEASE_TIMEOUT_S:.0f} s: wait for it, or end it with 'kill {pid}'"
        )


def wait_released(cache_dir: Path, timeout_s: float) -> bool:
    """Whether no daemon holds this cache directory, at the latest after a time limit."""
    try:
        # The daemon holds flock(2) on this file as long as it lives.
        fd = os.open(CacheLayout(cache_dir).lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # Gone with its daemon, or another user's, whose end cannot be watched.
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
