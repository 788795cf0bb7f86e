"""The control files of a mount, seen from outside: `MOUNTPOINT/.spiderfs/NAME`.

Every access has a time limit, because a daemon that hangs must not hang the commands that are there to find that out.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from spiderfs.errors import MountError
from spiderfs.linux.mounts import Mount, mounted_at, within

CONTROL_DIR = ".spiderfs"

# Stats of a busy mount come within milliseconds; a manager that is being restarted takes a second or two.
ANSWER_TIMEOUT_S = 5.0


def find_mount(path: str | Path) -> Mount:
    """The spiderfs mount at a path; MountError where there is none."""
    mount = mounted_at(path)
    if mount is None:
        raise MountError(f"no spiderfs is mounted at {path}: see 'spiderfs status' for where one is")
    return mount


def read_control(mount: Mount, name: str) -> str:
    """The text of a control file; raises TimeoutError for a hung mount and OSError for one that fails."""
    return within(ANSWER_TIMEOUT_S, (mount.mountpoint / CONTROL_DIR / name).read_bytes).decode(errors="replace")


def read_stats(mount: Mount) -> dict[str, Any]:
    """`stats.json`; raises like read_control, and OSError (EIO) for what is not a JSON object."""
    try:
        stats = json.loads(read_control(mount, "stats.json"))
    except ValueError as exc:
        raise OSError(errno.EIO, "stats.json is not JSON") from exc
    if not isinstance(stats, dict):
        raise OSError(errno.EIO, "stats.json is not a JSON object")
    return stats


def write_control(mount: Mount, name: str, text: str) -> None:
    """One write to a control file; raises like read_control."""

    def write() -> None:
        fd = os.open(mount.mountpoint / CONTROL_DIR / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, os.fsencode(text))
        finally:
            os.close(fd)

    within(ANSWER_TIMEOUT_S, write)


def shown(text: object) -> str:
    """Text that any terminal takes: a path need not be UTF-8."""
    return os.fsencode(str(text)).decode(errors="replace")


def why(mount: Mount, exc: OSError) -> MountError:
    """What a failed access to a control file means for a person."""
    here = mount.mountpoint
    if isinstance(exc, TimeoutError):
        return MountError(f"the daemon behind {here} does not answer: detach it with 'spiderfs umount --lazy {here}'")
    if exc.errno == errno.ENOTCONN:
        return MountError(f"the daemon behind {here} has gone: clean up with 'spiderfs umount {here}', or mount again")
    if exc.errno in (errno.EACCES, errno.EPERM):
        return MountError(f"{here} is not open to this user: ask as the user who mounted it, or as root")
    if exc.errno == errno.EAGAIN:
        return MountError(f"the manager behind {here} is being restarted: try again in a moment")
    return MountError(f"{here}/{CONTROL_DIR} cannot be used ({exc.strerror}): see the daemon's log")
