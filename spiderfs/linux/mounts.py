"""Mounting and unmounting, and the kernel's mount table.

If a daemon hangs, every system call on its mount hangs too; if it is dead, every call fails with ENOTCONN. These
functions therefore read the kernel's mount table first (/proc/self/mountinfo, see proc_pid_mountinfo(5)), since that
never touches the mount. A call that must touch the mount runs in a thread, and the caller stops waiting for that thread
after a time limit. SIGKILL ends a thread that waits for FUSE, so an abandoned thread cannot keep its process alive.
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
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeVar

from spiderfs.errors import MountError

log = logging.getLogger(__name__)

FSTYPE = "fuse.spiderfs"
# The directory of a mount's control files, in its root.
CONTROL_DIR = ".spiderfs"
MOUNT_TABLE = Path("/proc/self/mountinfo")
FUSE_DEVICE = Path("/dev/fuse")
FUSE_CONF = Path("/etc/fuse.conf")
# The system mounts fusectl here, the file system that controls FUSE connections.
FUSE_CONNECTIONS = Path("/sys/fs/fuse/connections")

# A live mount answers in 0.1 ms; a mount that needs longer than this limit counts as hung.
PROBE_TIMEOUT_S = 2.0
# Files that the mount itself pushes ahead are open for a moment each. If it is in use for longer, others use it.
IN_USE_S = 0.5
# The daemon itself answers this attribute of a mount's root: neither the source nor the kernel's memory can.
PROBE_XATTR = "user.spiderfs.client"
# Says of an archive why it cannot be shown as a directory; nothing else has it.
FAILURE_XATTR = "user.spiderfs.failure"

# Several dead mounts can lie on one mount point. The limit ends the loop if something mounts there again and again.
MAX_STACKED_MOUNTS = 16
# The kernel follows as many symbolic links, see path_resolution(7).
MAX_SYMLINKS = 40

# mount(2), umount2(2)
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

# The numbers of fsopen(2), fsconfig(2) and fsmount(2), the same on every architecture, and the flags of these calls.
SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT = 430, 431, 432
FSOPEN_CLOEXEC, FSCONFIG_CMD_CREATE, FSMOUNT_CLOEXEC = 1, 6, 1

# fusermount3 exits with 1 whatever went wrong, so its messages give the reason: texts of strerror(3) and its own.
FUSERMOUNT_MESSAGES = {
    b"busy": errno.EBUSY,
    b"not found in": errno.EINVAL,
    b"Invalid argument": errno.EINVAL,
    b"No such file": errno.ENOENT,
    b"not permitted": errno.EPERM,
    b"Permission denied": errno.EPERM,
}

# To serve a cached file of 1 GiB, the daemon computes for 0.48 s with the kernel's default of 128 KiB, for 0.34 s with
# 256 KiB and for 0.29 s with 1,024 KiB. A reader nevertheless gets it fastest with 256 KiB (1.0, 1.3 and 0.8 GB/s),
# because with larger requests fewer of them are under way at a time.
READ_AHEAD_KIB = 256
# Where readers jump in large files: a page fault then asks for its page alone, and not for those around it.
NO_READ_AHEAD_KIB = 4

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)
_OCTAL_ESCAPE = re.compile(rb"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of the mount table."""

    source: str
    mountpoint: Path
    fstype: str
    device: str
    options: str = ""
    root: str = "/"
    """The directory of the file system that is mounted."""


def parse_mount_table(table: bytes) -> list[Mount]:
    """All mounts that a mountinfo text lists, in the order in which they were mounted."""
    mounts = []
    for line in table.splitlines():
        before, separator, after = line.partition(b" - ")
        fields, tail = before.split(b" "), after.split(b" ")
        if not separator or len(fields) < 6 or len(tail) < 2:
            continue
        source, root, mountpoint = _unescape(tail[1]), _unescape(fields[3]), Path(_unescape(fields[4]))
        fstype, device, options = map(os.fsdecode, (tail[0], fields[2], tail[-1]))
        mounts.append(Mount(source, mountpoint, fstype, device, options, root))
    return mounts


def mounts() -> list[Mount]:
    """All mounts that this process sees."""
    return parse_mount_table(MOUNT_TABLE.read_bytes())


def spiderfs_mounts() -> dict[Path, Mount]:
    """The topmost spiderfs mount of each mount point that this process sees, those of dead daemons included."""
    return {mount.mountpoint: mount for mount in mounts() if mount.fstype == FSTYPE}


def canonical(path: str | Path) -> Path:
    """The absolute path with symbolic links resolved, without a stat of what is mounted there.

    The kernel alone answers readlink(2) for the root of a mount; os.path.realpath calls lstat(2), which the daemon
    would have to answer.
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
    """The topmost mount at this path if it is a spiderfs mount, even if its daemon hangs or is dead."""
    here = canonical(path)
    on_top = [mount for mount in mounts() if mount.mountpoint == here][-1:]
    return on_top[0] if on_top and on_top[0].fstype == FSTYPE else None


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """The result of a call that may hang; after the limit, raises TimeoutError and leaves the call's thread behind."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:
            future.set_exception(exc)

    # The interpreter does not wait for a daemon thread at exit, as it would for a pool of concurrent.futures.
    threading.Thread(target=run, name="may-hang", daemon=True).start()
    return future.result(timeout_s)


def is_stale(path: str | Path) -> bool:
    """Whether the path shows a spiderfs mount whose daemon is dead (ENOTCONN); a daemon that hangs is not dead."""
    mount = mounted_at(path)
    if mount is None:
        return False
    try:
        # The kernel may answer stat(2) without the daemon.
        within(PROBE_TIMEOUT_S, lambda: os.getxattr(mount.mountpoint, PROBE_XATTR))
    except TimeoutError:
        return False
    except OSError as exc:
        return exc.errno == errno.ENOTCONN
    return False


def clean_stale(path: str | Path) -> bool:
    """Unmount what crashed daemons left mounted at this path; returns whether there was anything."""
    cleaned = False
    for _ in range(MAX_STACKED_MOUNTS):
        if not is_stale(path):
            break
        # A lazy unmount works even while programs have the mount open; no one will ever answer them anyway.
        unmount(path, lazy=True)
        cleaned = True
    return cleaned


def check_mountable(path: str | Path) -> None:
    """Raise MountError unless the path is a directory without a spiderfs mount, or with one whose daemon is dead."""
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


def mount(path: str | Path, source: str, allow_other: bool, programs_run: bool, immutable: bool = False) -> int:
    """Mount at this path and return the descriptor that gives the kernel's requests.

    `source` is the name that the mount table shows; `programs_run` says whether programs in the mount may be run, and
    `immutable` whether the kernel opens files without asking the daemon.
    """
    options = ["allow_other"] if allow_other else []
    # With default_permissions the kernel checks permissions. Without allow_other only the daemon's own user gets in,
    # and the daemon refuses opens to write, if it is asked.
    if allow_other or immutable:
        options.append("default_permissions")
    here = canonical(path)
    if os.geteuid() == 0:
        return _mount2(here, source, options, MS_NOSUID | MS_NODEV | (0 if programs_run else MS_NOEXEC))
    # fusermount3 adds nosuid and nodev by itself.
    return _fusermount_mount(here, source, options + ([] if programs_run else ["noexec"]))


def set_read_ahead(path: str | Path, kib: int = READ_AHEAD_KIB, instead_of: int | None = None) -> None:
    """Change the kernel's read-ahead for files opened from now on, from `instead_of` if given; only root may."""
    on_top = mounted_at(path)
    if on_top is not None:
        setting = Path(f"/sys/class/bdi/{on_top.device}/read_ahead_kb")
        with contextlib.suppress(OSError):
            if instead_of is None or setting.read_text().strip() == f"{instead_of}":
                setting.write_text(f"{kib}\n")


def unmount(path: str | Path, lazy: bool = False) -> None:
    """Unmount what is at this path; `lazy` unmounts even while programs use the mount or while it hangs."""
    here = canonical(path)
    attempt, until_s = _umount2 if os.geteuid() == 0 else _fusermount, time.monotonic() + IN_USE_S
    while (failure := attempt(here, lazy)) == errno.EBUSY and time.monotonic() < until_s:
        time.sleep(0.005)
    if failure == 0:
        return
    if failure == errno.EBUSY:
        raise MountError(
            f"{path} is in use: 'fuser -vm {path}' lists by whom, and 'spiderfs umount --lazy {path}' detaches it"
        )
    if failure in (errno.EINVAL, errno.ENOENT) and mounted_at(path) is None:
        raise MountError(f"nothing is mounted at {path}: 'spiderfs status' lists the mounts")
    # fusermount3 does not find a mount of another user and then reports EINVAL or ENOENT.
    if failure in (errno.EPERM, errno.EINVAL, errno.ENOENT):
        raise MountError(f"this user may not unmount {path}: unmount it as the user who mounted it, or as root")
    raise MountError(f"cannot unmount {path} ({os.strerror(failure)}): try 'umount {path}', which may say more")


def unmount_or_detach(path: Path) -> None:
    """Unmount what is at this path, if anything is; detach it if it is in use, so that it ends with its last user."""
    if mounted_at(path) is None:
        return
    try:
        unmount(path)
    except MountError:
        log.warning("%s is in use: it is detached now and ends when its last file is closed", path)
        try:
            unmount(path, lazy=True)
        except MountError as exc:
            log.warning("%s", exc)


def open_abort(path: str | Path) -> int | None:
    """A descriptor for `abort`, of just this FUSE connection, which keeps nothing in use; None if refused."""
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
    """End a FUSE connection: all its requests fail from now on. Does nothing if the connection has already ended."""
    with contextlib.suppress(OSError):
        os.write(connection, b"1")


def check_fuse_available(allow_other: bool = False) -> None:
    """Raise MountError if this machine or this user cannot mount through FUSE."""
    if not FUSE_DEVICE.exists():
        raise MountError(
            f"{FUSE_DEVICE} is missing: load the kernel module with 'modprobe fuse', start the container with"
            " '--device /dev/fuse --cap-add SYS_ADMIN', or do without a mount ('spiderfs serve')"
        )
    if os.geteuid() == 0:
        try:
            os.close(os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC))
        except OSError as exc:
            raise MountError(
                f"{FUSE_DEVICE} cannot be opened ({exc.strerror}): start the container with '--device /dev/fuse'"
            ) from exc
    else:
        if shutil.which("fusermount3") is None:
            raise MountError("fusermount3 is missing: install the package fuse3, or mount as root")
        if allow_other and not _others_may_be_allowed():
            raise MountError(
                f"only root may use allow_other here: add the line 'user_allow_other' to {FUSE_CONF}, or mount as root"
            )


def _unescape(field: bytes) -> str:
    """A field of mountinfo with its octal escapes resolved; a name need not be UTF-8."""
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
    arguments = (os.fsencode(source), os.fsencode(path), FSTYPE.encode(), flags, ",".join(data).encode())
    if _libc.mount(*arguments) != 0:
        failure = os.strerror(ctypes.get_errno())
        os.close(descriptor)
        raise MountError(f"cannot mount on {path}: {failure}")
    return descriptor


def _fusermount_mount(path: Path, source: str, options: list[str]) -> int:
    """Mount through fusermount3, which is setuid root and sends the descriptor over a socket (libfuse, lib/mount.c)."""
    # A comma would end the option unless a backslash stands before it; fusermount3 removes the backslash.
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
    """The directory of FUSE connections as an open directory that is mounted nowhere; raises OSError unless root."""

    def call(*arguments: object) -> int:
        result: int = _libc.syscall(*arguments)
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
    if _libc.umount2(os.fsencode(path), UMOUNT_NOFOLLOW | (MNT_DETACH if lazy else 0)) == 0:
        return 0
    return ctypes.get_errno()


def _fusermount(path: Path, lazy: bool) -> int:
    """Unmount through fusermount3; returns the errno that its message stands for, or 0."""
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", os.fspath(path)]
    try:
        done = subprocess.run(command, capture_output=True, env={**os.environ, "LC_ALL": "C"}, check=False)
    except FileNotFoundError as exc:
        raise MountError("fusermount3 is missing: install the package fuse3, or unmount as root") from exc
    if done.returncode == 0:
        return 0
    return next((code for text, code in FUSERMOUNT_MESSAGES.items() if text in done.stderr), errno.EIO)


def _others_may_be_allowed() -> bool:
    """Whether fuse.conf lets users pass allow_other; true if it cannot be read, for fusermount3 checks again."""
    try:
        text = FUSE_CONF.read_text(errors="replace")
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return any(line.split("#")[0].strip() == "user_allow_other" for line in text.splitlines())
