"""Reads and writes the control files of a mount, `MOUNTPOINT/.spiderfs/NAME`, as any program does.

What is served without a mount, `spiderfs://NAME`, is a `Mount` of the type `SERVED` here, at the path of its socket.
Every access has a time limit: a daemon that hangs must not hang the commands that find out whether it does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from spiderfs.errors import MountError
from spiderfs.linux.mounts import CONTROL_DIR, Mount, mounted_at, spiderfs_mounts, within
from spiderfs.protocol.requests import SCHEME, Connection, address_of, served_directory, socket_of

SERVED = "served"
# A busy mount answers within milliseconds; a manager that is being started again needs a second or two.
ANSWER_TIMEOUT_S = 5.0


def find_mount(path: str | Path) -> Mount:
    """The spiderfs mount at a path; raises MountError if there is none."""
    if (mount := mount_at(path)) is None:
        # This import is here because it takes longer than the rest of most commands.
        from spiderfs.sources.open import without_secrets

        # Someone may have named the source in place of the mount point.
        raise MountError(f"no spiderfs mount is at {without_secrets(path)}: 'spiderfs status' lists the mounts")
    return mount


def mount_at(path: str | Path) -> Mount | None:
    """The mount at a user's path, if there is one; raises MountError if the path hangs, or no daemon serves NAME."""
    try:
        address = address_of(path)
    except ValueError as exc:
        raise MountError(str(exc)) from exc
    if address is not None:
        mount = served_as(address.name)
        with explaining(mount):
            return mount._replace(source=str(read_stats(mount)["source"]))
    try:
        return within(ANSWER_TIMEOUT_S, lambda: mounted_at(path))
    except TimeoutError as exc:
        from spiderfs.sources.open import without_secrets

        # For a mount point itself the kernel answers, but not for what lies below it.
        raise MountError(
            f"{without_secrets(path)} hangs: check its server, or detach the mount that it lies in"
        ) from exc


def served_as(name: str) -> Mount:
    return Mount("?", socket_of(name), SERVED, "")


def every_place() -> dict[str, Mount]:
    """All mounts, and what this user's daemons serve without one, by the place that people name."""
    return {place_of(mount): mount for mount in (*spiderfs_mounts().values(), *all_served())}


def all_served() -> list[Mount]:
    """What this user serves without a mount, and the sockets of daemons that were killed."""
    try:
        return [served_as(path.name) for path in sorted(served_directory().iterdir()) if path.is_socket()]
    except OSError:
        return []


def place_of(mount: Mount) -> str:
    """What people call the place where the files are shown."""
    return f"{SCHEME}{mount.mountpoint.name}" if mount.fstype == SERVED else str(mount.mountpoint)


def daemon_of(mount: Mount) -> int:
    """The pid of the daemon that serves without a mount; raises OSError if there is none."""
    with contextlib.closing(Connection(mount.mountpoint)) as connection:
        return connection.peer.pid


def mountpoints(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """What a shell can complete a MOUNTPOINT to."""
    return [place for place in every_place() if place.startswith(incomplete)]


def read_control(mount: Mount, name: str) -> str:
    """The text of a control file; raises TimeoutError if the mount hangs, and OSError if reading fails."""
    if mount.fstype == SERVED:
        # This import is here because it takes longer than the rest of most commands.
        from spiderfs.client.served import Served

        served = Served(mount.mountpoint.name, ANSWER_TIMEOUT_S)
        return served.read_bytes(f"{CONTROL_DIR}/{name}").decode(errors="replace")
    return within(ANSWER_TIMEOUT_S, (mount.mountpoint / CONTROL_DIR / name).read_bytes).decode(errors="replace")


def read_stats(mount: Mount) -> dict[str, Any]:
    """The content of `stats.json`; raises as read_control does, and OSError (EIO) if it is not a JSON object."""
    try:
        stats = json.loads(read_control(mount, "stats.json"))
    except ValueError as exc:
        raise OSError(errno.EIO, "stats.json is not JSON") from exc
    if not isinstance(stats, dict):
        raise OSError(errno.EIO, "stats.json is not a JSON object")
    return stats


def write_control(mount: Mount, name: str, text: str, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
    """Write to a control file in one call; raises as read_control does."""
    if mount.fstype == SERVED:
        from spiderfs.client.served import Served

        with Served(mount.mountpoint.name, timeout_s).open(f"{CONTROL_DIR}/{name}", "wb", 0) as file:
            file.write(os.fsencode(text))
        return

    def write() -> None:
        fd = os.open(mount.mountpoint / CONTROL_DIR / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, os.fsencode(text))
        finally:
            os.close(fd)

    within(timeout_s, write)


def printable(text: object) -> str:
    """The text in a form that any terminal can print; a path need not be UTF-8."""
    return os.fsencode(str(text)).decode(errors="replace")


def warn(remark: str) -> None:
    """Show a remark on stderr; an empty one is none."""
    if remark:
        click.echo(f"spiderfs: warning: {printable(remark)}", err=True)


@contextlib.contextmanager
def explaining(mount: Mount) -> Iterator[None]:
    """Raise `explained` errors where access to the mount's control files fails."""
    try:
        yield
    except OSError as exc:
        raise explained(mount, exc) from exc


def explained(mount: Mount, exc: OSError) -> MountError:
    """The error with the reason why an access to a control file failed, and what to do."""
    here = place_of(mount)
    if mount.fstype == SERVED and exc.errno == errno.ENOTCONN:
        return MountError(str(exc.strerror))
    if mount.fstype != SERVED and mounted_at(here) is None:
        return MountError(f"{here} was unmounted meanwhile: mount it again")
    if isinstance(exc, TimeoutError):
        return MountError(f"the daemon of {here} does not answer: detach it with 'spiderfs umount --lazy {here}'")
    if exc.errno == errno.ENOTCONN:
        return MountError(f"the daemon of {here} is dead: unmount with 'spiderfs umount {here}', or mount again")
    if exc.errno in (errno.EACCES, errno.EPERM):
        return MountError(f"this user may not read {here}: run the command as the user who mounted it, or as root")
    if exc.errno in (errno.EAGAIN, errno.EBUSY):
        return MountError(
            f"the control files of {here} cannot be used now: try again in a moment, and if that does not help,"
            " see the daemon's log"
        )
    return MountError(f"{here}/{CONTROL_DIR} cannot be used ({exc.strerror}): see the daemon's log")
