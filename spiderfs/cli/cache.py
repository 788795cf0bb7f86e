"""`spiderfs cache`: lists the cache directories on this machine, and removes those that no mount uses."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from spiderfs.cli.control_files import printable, read_stats, warn
from spiderfs.cli.mount import wait_released
from spiderfs.errors import MountError, UsageError
from spiderfs.linux.mounts import canonical, spiderfs_mounts
from spiderfs.options.units import round_size
from spiderfs.shared.layout import CacheLayout
from spiderfs.store.disks import Disks

# mkfs(8) leaves this directory where a whole disk is the cache.
_NAMES = {*CacheLayout.FILES, *CacheLayout.DIRECTORIES, "lost+found"}


@click.command()
@click.argument("action", type=click.Choice(["list", "remove"]))
@click.argument("directories", nargs=-1, type=click.Path(path_type=Path), metavar="[DIRECTORY]...")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON for programs.")
def cache(action: str, directories: tuple[Path, ...], as_json: bool) -> None:
    """List caches with their sources and sizes, or remove the caches in these directories.

    Without a DIRECTORY, `list` shows those of running mounts, in /var/cache/spiderfs and in ~/.cache/spiderfs.
    """
    if action == "list":
        _list(directories, as_json)
    elif not directories or as_json:
        raise UsageError("cache remove: name each DIRECTORY, as 'spiderfs cache list' shows it")
    else:
        for directory in directories:
            freed = _remove(directory)
            click.echo(printable(f"removed {directory}: {round_size(freed)}"))


def _list(directories: tuple[Path, ...], as_json: bool) -> None:
    found = []
    for path in directories or _places():
        try:
            found.append(_described(path))
        except MountError as exc:
            if directories:
                raise
            warn(str(exc))
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    if not found:
        click.echo("there is no cache in /var/cache/spiderfs or ~/.cache/spiderfs")
    for row in found:
        state = "mounted" if row["mounted"] else f"last mounted {row['used'].partition('T')[0]}"
        click.echo(printable(f"{row['directory']}: {round_size(row['bytes_on_disk'])} of {row['source']}, {state}"))


def _places() -> list[Path]:
    """Every cache directory that this user can find, with those that a cache has on other disks."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with contextlib.suppress(RuntimeError):  # a user without a home
        own = own.expanduser()
    found = {lock.parent for root in (Path("/var/cache"), own) for lock in (root / "spiderfs").glob("*/lock")}
    for mount in spiderfs_mounts().values():
        # A mount that hangs, or is of another version.
        with contextlib.suppress(OSError, KeyError):
            found.add(Path(str(read_stats(mount)["cache_dir"])))
    disks = [Disks.of_store(CacheLayout(place).content) for place in found]
    return sorted(found.union(cache.directory(number) for cache in disks for number in cache.numbers))


def _described(directory: Path) -> dict[str, Any]:
    """The cache as JSON has it; `used` is when it was last mounted. Raises MountError if it is none, or not ours."""
    layout = CacheLayout(_checked(directory))
    try:
        source = os.fsdecode(layout.source.read_bytes()).strip() if layout.source.exists() else "an unknown source"
        used = datetime.fromtimestamp(layout.lock.stat().st_mtime).astimezone()
        return {
            "directory": str(directory),
            "source": source,
            "bytes_on_disk": _bytes_on_disk(directory),
            "used": used.isoformat(),
            "mounted": not wait_released(directory, 0),
        }
    except OSError as exc:
        raise _unreadable(directory, exc) from exc


def _checked(directory: Path) -> Path:
    """The directory, if it has the names of a cache and no others."""
    try:
        names = set(os.listdir(directory))
    except OSError as exc:
        raise _unreadable(directory, exc) from exc
    if directory.is_symlink() or "lock" not in names or not names <= _NAMES:
        raise MountError(f"{directory} is no cache directory: 'spiderfs cache list' shows them")
    return directory


def _unreadable(directory: Path, exc: OSError) -> MountError:
    return MountError(f"{directory} cannot be used ({exc.strerror}): run the command as the user who mounted, or root")


def _bytes_on_disk(directory: Path) -> int:
    def fail(exc: OSError) -> None:
        # A mounted cache loses files meanwhile.
        if exc.errno != errno.ENOENT:
            raise exc

    total = 0
    for folder, _, names in os.walk(directory, onerror=fail):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def _remove(directory: Path) -> int:
    """Delete a cache that no mount uses; returns the bytes that it had on the disk."""
    layout = CacheLayout(_checked(canonical(directory)))
    try:
        with open(layout.lock, "rb") as lock:
            # Held until the end: a mount that begins meanwhile is refused.
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise MountError(
                    f"{directory} is in use: unmount it first, 'spiderfs status' lists the mounts"
                ) from exc
            freed = _bytes_on_disk(layout.cache)
            for name in sorted(_NAMES - {"lock", "lost+found"}):
                path = layout.cache / name
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            layout.lock.unlink()
            # A whole disk stays, as does what is mounted.
            with contextlib.suppress(OSError):
                layout.cache.rmdir()
    except OSError as exc:
        raise _unreadable(directory, exc) from exc
    return freed
