"""Mounting, what is mounted where, and how to get rid of it.

A daemon that hangs makes every look at its mount hang too, and a dead one answers ENOTCONN. So the kernel's mount table
(/proc/self/mountinfo, see proc_pid_mountinfo(5)) is asked first, which never touches the mount, and where the mount
itself must be touched this happens in a thread that is given up on after a time limit. Waiting for FUSE can be ended by
SIGKILL, so such an abandoned thread does not keep the process from exiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import shutil
import socket
import stat
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeVar

from spiderfs.errors import MountError

log = logging.getLogger(__name__)

FSTYPE = "fuse.spiderfs"
MOUNT_TABLE = Path("/proc/self/mountinfo")
FUSE_DEVICE = Path("/dev/fuse")
FUSE_CONF = Path("/etc/fuse.conf")
# Where the system has mounted the file system by which connections are controlled (fusectl).
FUSE_CONNECTIONS = Path("/sys/fs/fuse/connections")

# An answer of a live mount takes 0.1 ms; a mount that needs longer than this is treated as hung.
PROBE_TIMEOUT_S = 2.0
# Of a mount's root: what it says comes neither from the source nor from what the kernel remembers.
PROBE_XATTR = "user.spiderfs.client"

# Crashes on one mount point can stack up; a limit keeps a mount that comes back at once from holding us forever.
MAX_STACKED_MOUNTS = 16

# As many as the kernel follows, see path_resolution(7).
MAX_SYMLINKS = 40

# mount(2), umount2(2)
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

# fsopen(2), fsconfig(2), fsmount(2): numbers of the calls, the same on every architecture, and their flags
SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT = 430, 431, 432
FSOPEN_CLOEXEC, FSCONFIG_CMD_CREATE, FSMOUNT_CLOEXEC = 1, 6, 1

# fusermount3 has no exit codes of its own; these are strerror(3) texts and its own words (fusermount.c).
FUSERMOUNT_MESSAGES = {
    b"busy": errno.EBUSY,
    b"not found in": errno.EINVAL,
    b"Invalid argument": errno.EINVAL,
    b"No such file": errno.ENOENT,
    b"not permitted": errno.EPERM,
    b"Permission denied": errno.EPERM,
}

# A file of 1 GiB out of the cache takes 0.48 s of the daemon's time with the kernel's own 128 KiB, 0.34 s with
# 256, 0.29 s with 1,024. Yet the second is the fastest (1.0, 1.3, 0.8 GB/s): with more, less is under way at a time.
READ_AHEAD_KIB = 256

T = TypeVar("T")

_OCTAL_ESCAPE = re.compile(rb"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of the mount table."""

    source: str
    mountpoint: Path
    fstype: str
    device: str


def parse_mount_table(table: bytes) -> list[Mount]:
    """Every mount of a mountinfo text, in the order of mounting."""
    mounts = []
    for line in table.splitlines():
        before, separator, after = line.partition(b" - ")
        fields, tail = before.split(b" "), after.split(b" ")
        if not separator or len(fields) < 6 or len(tail) < 2:
            continue
        mounts.append(
            Mount(_unescape(tail[1]), Path(_unescape(fields[4])), os.fsdecode(tail[0]), os.fsdecode(fields[2]))
        )
    return mounts


def mounts() -> list[Mount]:
    """Every mount that this process sees."""
    return parse_mount_table(MOUNT_TABLE.read_bytes())


def spiderfs_mounts() -> list[Mount]:
    """The spiderfs mounts that this process sees, live or not."""
    return [mount for mount in mounts() if mount.fstype == FSTYPE]


def canonical(path: str | Path) -> Path:
    """The absolute path with symbolic links resolved, without a stat of what is mounted at it.

    readlink(2) of a mount's root is answered by the kernel alone; lstat(2), as os.path.realpath does, would ask the
    daemon.
    """
    here = os.path.abspath(path)
    for _ in range(MAX_SYMLINKS):
        parent, name = os.path.split(here)
        if name in ("", ".", ".."):
            return Path(os.path.realpath(here))
        here = os.path.join(os.path.realpath(parent), name)
        try:
            here = os.path.join(os.path.dirname(here), os.readlink(here))
        except OSError:
            break
    return Path(here)


def mounted_at(path: str | Path) -> Mount | None:
    """The spiderfs mount that is on top at this path, whatever state it is in."""
    here = canonical(path)
    on_top = [mount for mount in mounts() if mount.mountpoint == here][-1:]
    return on_top[0] if on_top and on_top[0].fstype == FSTYPE else None


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """The result of a call that may hang; raises TimeoutError after the limit and leaves the call's thread behind."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:
            future.set_exception(exc)

    # A daemon thread: concurrent.futures' own pools would be joined at exit.
    threading.Thread(target=run, name="may-hang", daemon=True).start()
    return future.result(timeout_s)


def is_stale(path: str | Path) -> bool:
    """Whether a spiderfs mount is here whose daemon has gone (ENOTCONN); a hung daemon still lives."""
    mount = mounted_at(path)
    if mount is None:
        return False
    try:
        within(PROBE_TIMEOUT_S, lambda: _ask(mount.mountpoint))
    except TimeoutError:
        return False
    except OSError as exc:
        return exc.errno == errno.ENOTCONN
    return False


def clean_stale(path: str | Path) -> bool:
    """Take away what a crashed daemon left mounted here; says whether there was anything."""
    cleaned = False
    for _ in range(MAX_STACKED_MOUNTS):
        if not is_stale(path):
            break
        # Lazily: readers may still sit in it, and no answer will ever come to them anyway.
        unmount(path, lazy=True)
        cleaned = True
    return cleaned


def check_mountable(path: str | Path) -> None:
    """Raise MountError unless this is a directory that is free, or was left behind by a crash."""
    mount = mounted_at(path)
    if mount is not None:
        if is_stale(path):
            return
        raise MountError(
            f"{path} already shows {mount.source} through spiderfs: unmount it first with 'spiderfs umount {path}'"
        )
    if not os.path.lexists(path):
        raise MountError(f"the mount point {path} does not exist: create it with 'mkdir -p {path}'")
    if not os.path.isdir(path):
        raise MountError(f"the mount point {path} is not a directory: choose or create one")


def mount(path: str | Path, source: str, allow_other: bool, programs_run: bool) -> int:
    """Mount at this path, to be shown as `source`, and return the descriptor that the kernel's requests come from.

    `programs_run`: whether programs in it may be run.
    """
    # With other users the kernel checks permissions; without, everybody who gets in is the daemon's own user, and
    # leaving it to the daemon makes every attempt to write answer EROFS.
    options = ["allow_other", "default_permissions"] if allow_other else []
    here = canonical(path)
    if os.geteuid() == 0:
        return _mount2(here, source, options, MS_NOSUID | MS_NODEV | (0 if programs_run else MS_NOEXEC))
    # fusermount3 adds nosuid and nodev by itself.
    return _fusermount_mount(here, source, options + ([] if programs_run else ["noexec"]))


def widen_read_ahead(path: str | Path) -> None:
    """Have the kernel read ahead of sequential readers by more than its 128 KiB, where this user may say so (root)."""
    on_top = mounted_at(path)
    if on_top is not None:
        with contextlib.suppress(OSError):
            Path(f"/sys/class/bdi/{on_top.device}/read_ahead_kb").write_text(f"{READ_AHEAD_KIB}\n")


def unmount(path: str | Path, lazy: bool = False) -> None:
    """Take the mount at this path away; `lazy` does so even while it is in use or hangs."""
    here = canonical(path)
    failure = _umount2(here, lazy) if os.geteuid() == 0 else _fusermount(here, lazy)
    if failure == 0:
        return
    if failure == errno.EBUSY:
        raise MountError(
            f"{path} is in use: see by whom with 'fuser -vm {path}', or detach it with 'spiderfs umount --lazy {path}'"
        )
    if failure in (errno.EINVAL, errno.ENOENT) and mounted_at(path) is None:
        raise MountError(f"nothing is mounted at {path}: see 'spiderfs status' for what is")
    # What another user has mounted, fusermount3 does not find either.
    if failure in (errno.EPERM, errno.EINVAL, errno.ENOENT):
        raise MountError(f"not allowed to unmount {path}: do it as the user who mounted it, or as root")
    raise MountError(f"cannot unmount {path}: {os.strerror(failure)}; see whether 'umount {path}' says more")


def take_away(path: Path) -> None:
    """Unmount what is at this path, if anything is, also while it is in use: then it goes with its last user."""
    if mounted_at(path) is None:
        return
    try:
        unmount(path)
    except MountError:
        log.warning("%s is in use: detached, it goes when the last file is closed", path)
        try:
            unmount(path, lazy=True)
        except MountError as exc:
            log.warning("%s", exc)


def open_abort(path: str | Path) -> int | None:
    """A descriptor for `abort` of the connection of the mount at this path; None where this user cannot have one.

    It means this connection for good, also once another one has its number, and keeps nothing mounted or in use.
    """
    on_top = mounted_at(path)
    if on_top is None:
        return None
    name = f"{on_top.device.partition(':')[2]}/abort"
    with contextlib.suppress(OSError):
        return os.open(FUSE_CONNECTIONS / name, os.O_WRONLY | os.O_CLOEXEC)
    try:
        directory = _detached_fusectl()
    except OSError:
        return None
    try:
        return os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    finally:
        os.close(directory)


def abort(connection: int) -> None:
    """End a connection: requests end with an error, and none is taken any more; nothing if it has ended."""
    with contextlib.suppress(OSError):
        os.write(connection, b"1")


def check_fuse_available(allow_other: bool = False) -> None:
    """Raise MountError where this machine, or this user, cannot mount through FUSE."""
    if not FUSE_DEVICE.exists():
        raise MountError(
            f"{FUSE_DEVICE} is missing: load it with 'modprobe fuse', or start the container with '--device /dev/fuse"
            " --cap-add SYS_ADMIN'"
        )
    if os.geteuid() == 0:
        try:
            os.close(os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC))
        except OSError as exc:
            raise MountError(
                f"{FUSE_DEVICE} cannot be opened ({exc.strerror}): give the container '--device /dev/fuse'"
            ) from exc
    else:
        if shutil.which("fusermount3") is None:
            raise MountError("fusermount3 is missing: install the package fuse3, or mount as root")
        if allow_other and not _others_may_be_allowed():
            raise MountError(
                f"allow_other is for root only here: add the line 'user_allow_other' to {FUSE_CONF}, or mount as root"
            )


def _ask(path: Path) -> None:
    """Ask the daemon of the mount at this path; what stat(2) says, the kernel may know without it."""
    os.getxattr(path, PROBE_XATTR)


def _unescape(field: bytes) -> str:
    """A mountinfo field without its octal escapes; names need not be UTF-8."""
    return os.fsdecode(_OCTAL_ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field))


def _mount2(path: Path, source: str, options: list[str], flags: int) -> int:
    descriptor = os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    root_mode = stat.S_IFMT(os.stat(path).st_mode)
    data = [
        f"fd={descriptor}",
        f"rootmode={root_mode:o}",
        f"user_id={os.getuid()}",
        f"group_id={os.getgid()}",
        *options,
    ]
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (os.fsencode(source), os.fsencode(path), FSTYPE.encode(), flags, ",".join(data).encode())
    if libc.mount(*arguments) != 0:
        failure = os.strerror(ctypes.get_errno())
        os.close(descriptor)
        raise MountError(f"cannot mount on {path}: {failure}")
    return descriptor


def _fusermount_mount(path: Path, source: str, options: list[str]) -> int:
    """fusermount3 is setuid root; it mounts and hands the descriptor over a socket (libfuse, lib/mount.c)."""
    # A comma would end the option; fusermount3 unescapes the backslash.
    name = source.replace("\\", "\\\\").replace(",", "\\,")
    text = ",".join([f"fsname={name}", f"subtype={FSTYPE.partition('.')[2]}", *options])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = ["fusermount3", "-o", text, "--", os.fspath(path)]
        environment = {**os.environ, "_FUSE_COMMFD": str(theirs.fileno())}
        done = subprocess.run(command, capture_output=True, env=environment, pass_fds=[theirs.fileno()], check=False)
        if done.returncode != 0:
            raise MountError(f"cannot mount on {path}: {' '.join(done.stderr.decode(errors='replace').split())}")
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
    os.set_inheritable(descriptor, False)
    return descriptor


def _detached_fusectl() -> int:
    """A directory of the connections that is mounted nowhere, for root; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(*arguments: object) -> int:
        result: int = libc.syscall(*arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), "fusectl")
        return result

    context = call(SYS_FSOPEN, b"fusectl", FSOPEN_CLOEXEC)
    try:
        call(SYS_FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0)
        return call(SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, 0)
    finally:
        os.close(context)


def _umount2(path: Path, lazy: bool) -> int:
    """errno of umount2(2), or 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), UMOUNT_NOFOLLOW | (MNT_DETACH if lazy else 0)) == 0:
        return 0
    return ctypes.get_errno()


def _fusermount(path: Path, lazy: bool) -> int:
    """The errno that fusermount3's message stands for, or 0."""
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", os.fspath(path)]
    try:
        done = subprocess.run(command, capture_output=True, env={**os.environ, "LC_ALL": "C"}, check=False)
    except FileNotFoundError as exc:
        raise MountError("fusermount3 is missing: install the package fuse3, or unmount as root") from exc
    if done.returncode == 0:
        return 0
    return next((code for text, code in FUSERMOUNT_MESSAGES.items() if text in done.stderr), errno.EIO)


def _others_may_be_allowed() -> bool:
    """Whether fuse.conf lets users pass allow_other; an unreadable file is left for fusermount3 to judge."""
    try:
        text = FUSE_CONF.read_text(errors="replace")
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return any(line.split("#")[0].strip() == "user_allow_other" for line in text.splitlines())
