"""The cache directory is its user's alone: it is made, checked and closed to others before anything in it is used.

A user who can read the cache directory reads the source with the daemon's rights, and a user who can write to it
decides what readers get. So no file in it may be open to other users, or have been put there by other users. That holds
for a mount of root too: root would otherwise trust the files of an ordinary user. If an earlier version has left
files open to be read, they are closed.

A user who may write to a directory above could exchange the cache directory as a whole. The owners and groups of the
directories above are trusted, unless everybody could have made such a directory (as in /tmp).
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from spiderfs.errors import ConfigError, MountError
from spiderfs.linux.mounts import mounted_at
from spiderfs.shared.layout import CacheLayout
from spiderfs.store import environment

log = logging.getLogger(__name__)

PRIVATE_UMASK = 0o077
CHOOSE_ANOTHER = "choose another one with -o cache_dir=DIR"
_OTHERS = 0o077
# A process id and a path.
_HOLDER_BYTES = 16 + 4096
# The names in a cache directory of this or an earlier version of spiderfs, and the directory that mkfs(8) leaves there.
_KNOWN = {*CacheLayout.FILES, *CacheLayout.DIRECTORIES, "lost+found"}


def real_path(path: Path) -> Path:
    """The path without links on the way; the last name may still be a link."""
    return Path(os.path.realpath(path.parent), path.name)


def open_cache_directory(path: Path, is_first: bool = True) -> int:
    """A descriptor of the directory's lock file. `path` is real. Raises ConfigError.

    The first directory of a cache is made if it is missing. The others are not: without its disk, a directory would be
    made on the disk that has the mount point.
    From here on all files that this process and its children make are their user's alone.
    """
    os.umask(PRIVATE_UMASK)
    try:
        if path.is_symlink():
            raise ConfigError(
                f"the cache directory {path} is a symbolic link: name the directory that it leads to "
                f"(-o cache_dir={os.path.realpath(path)})"
            )
        _check_above(path)
        if is_first:
            path.mkdir(parents=True, exist_ok=True)
        # All goes by the descriptor, so that the directory that was checked is the one that is closed to others.
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _close_to_others(path, directory)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(CacheLayout(path).lock.name, flags, 0o600, dir_fd=directory)
        finally:
            os.close(directory)
    except OSError as exc:
        raise ConfigError(f"the cache directory {path} cannot be used ({exc.strerror}): {CHOOSE_ANOTHER}") from exc


def lock_cache_directory(path: Path, mountpoint: Path, is_first: bool = True) -> int:
    """The lock that this process and its children hold; raises ConfigError, and MountError if another mount has it."""
    lock = open_cache_directory(path, is_first)
    try:
        # Children inherit it, so the next mount waits for the last of them.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        what_to_do = _what_to_do(path, os.pread(lock, _HOLDER_BYTES, 0))
        os.close(lock)
        raise MountError(f"the cache directory {path} is in use by another mount{what_to_do}") from exc
    os.ftruncate(lock, 0)
    os.pwrite(lock, b"%d %s" % (os.getpid(), os.fsencode(mountpoint)), 0)
    tighten(path)
    return lock


def _what_to_do(path: Path, holder: bytes) -> str:
    """How to get rid of the mount that has written `holder` into the lock file."""
    pid, _, mountpoint = os.fsdecode(holder).partition(" ")
    if not pid.isdecimal():
        return f": unmount it, or {CHOOSE_ANOTHER}"
    try:
        remote = os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
    except FileNotFoundError:
        return (
            f", on {mountpoint}, whose daemon (process {pid}) is of another pid namespace, or has ended and left a"
            f" process that waits in the kernel: end it ('fuser {CacheLayout(path).lock}' says which),"
            f" or {CHOOSE_ANOTHER}"
        )
    except OSError:
        remote = False
    if remote:
        return (
            f", on {mountpoint} in another mount namespace, which need not have any other process any more: "
            f"end it with 'kill {pid}', or {CHOOSE_ANOTHER}"
        )
    if Path(mountpoint).is_socket():
        return f", served as spiderfs://{Path(mountpoint).name} (process {pid}): end that, or {CHOOSE_ANOTHER}"
    if mounted_at(mountpoint) is None:
        return (
            f": process {pid} still serves files that were open when {mountpoint} was detached; close them, or run"
            f" 'kill {pid}', which gives their readers errors, or {CHOOSE_ANOTHER}"
        )
    return f", on {mountpoint} (process {pid}): unmount it, or {CHOOSE_ANOTHER}"


def _check_above(path: Path) -> None:
    """Refuse a path if any user could exchange a part of it; directories that are missing will be our own."""
    # A user who has become root through sudo may use a directory of their own.
    trusted = {"0", str(os.geteuid()), os.environ.get("SUDO_UID")}
    anybody_makes = False
    for above in reversed(path.parents):
        if not above.exists():
            return
        found = above.stat()
        if anybody_makes and str(found.st_uid) not in trusted:
            raise ConfigError(
                f"the cache directory {path} could be exchanged by {_named(found.st_uid)}, to whom {above} belongs: "
                f"{CHOOSE_ANOTHER}"
            )
        anybody_makes = bool(found.st_mode & stat.S_IWOTH)
        if anybody_makes and not found.st_mode & stat.S_ISVTX:
            raise ConfigError(
                f"the cache directory {path} could be exchanged by everybody, who may write to {above}: "
                f"{CHOOSE_ANOTHER}, or run chmod o-w {above}"
            )


def _named(uid: int) -> str:
    """What messages call a user: all that a user namespace does not map have one number there (user_namespaces(7))."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= uid < first + count:
            return f"user {uid}"
    return "a user from outside of this user namespace"


def _close_to_others(path: Path, directory: int) -> None:
    found = os.fstat(directory)
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"the cache directory {path} belongs to {_named(found.st_uid)}, and this mount to user {os.geteuid()}: "
            f"{CHOOSE_ANOTHER}, or delete it"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"everybody may write to the cache directory {path} (mode {mode:04o}), so its files may be anybody's: "
            f"{CHOOSE_ANOTHER}, or delete it"
        )
    if mode & _OTHERS:
        # A directory that has other uses is never changed: root may have named /var/cache.
        if not _KNOWN.issuperset(os.listdir(directory)):
            raise ConfigError(
                f"the cache directory {path} is open to others (mode {mode:04o}) and holds more than a cache: "
                f"{CHOOSE_ANOTHER}, or run chmod 700 {path}"
            )
        os.fchmod(directory, mode & ~_OTHERS)


def tighten(path: Path) -> None:
    """Close everything in a locked cache directory to others; raises ConfigError if something is not its owner's."""
    try:
        for place in _all_of(path):
            found = place.lstat()
            if stat.S_ISLNK(found.st_mode):
                raise ConfigError(f"{place} is a symbolic link, and no part of a cache: delete it, or {CHOOSE_ANOTHER}")
            if found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
                whose = "everybody may write to it" if found.st_mode & stat.S_IWOTH else f"of {_named(found.st_uid)}"
                raise ConfigError(f"{place} may hold anything ({whose}): delete {path}, or {CHOOSE_ANOTHER}")
            if found.st_mode & _OTHERS:
                place.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
    except OSError as exc:
        raise ConfigError(f"{exc.filename} cannot be closed to others ({exc.strerror}): {CHOOSE_ANOTHER}") from exc


def _all_of(path: Path) -> Iterator[Path]:
    """Each directory before its entries. The entries of `run` are left out: a mount deletes them before it begins."""
    for name in (*CacheLayout.FILES, *CacheLayout.DIRECTORIES):
        if os.path.lexists(path / name):
            yield path / name
    layout = CacheLayout(path)
    for kept in (layout.store, layout.archives):
        for directory, inner, files in os.walk(kept, onerror=_raise):
            yield from (Path(directory, name) for name in (*inner, *files))


def _raise(exc: OSError) -> None:
    if not isinstance(exc, FileNotFoundError):
        raise exc


def lock_other_directories(paths: Iterable[Path], mountpoint: Path, identity: str) -> dict[Path, int]:
    """The locks of the other directories that can be used; raises MountError if another mount, or source, has one."""
    locks = {}
    for path in paths:
        try:
            locks[path] = lock_cache_directory(path, mountpoint, is_first=False)
        except ConfigError as exc:
            log.warning("the cache goes without %s until the next mount: %s", path, exc)
            continue
        bind_to_source(CacheLayout(path), identity)
    return locks


def bind_to_source(layout: CacheLayout, identity: str) -> None:
    """Note the first source of a cache directory (see `OpenedSource.identity`); raises MountError for another one."""
    path = os.fsencode(identity)
    try:
        bound_to = layout.source.read_bytes().removesuffix(b"\n") if layout.source.exists() else path
        if not bound_to:
            # The machine went down before the note was on the disk, and what is cached may be another source's.
            environment.wipe(layout.store)
        elif bound_to != path:
            raise MountError(
                f"the cache directory {layout.cache} holds the files of {os.fsdecode(bound_to)}: "
                f"{CHOOSE_ANOTHER}, or delete it"
            )
        layout.source.write_bytes(path + b"\n")
    except OSError as exc:
        raise MountError(
            f"the cache directory {layout.cache} cannot be used ({exc.strerror}): {CHOOSE_ANOTHER}"
        ) from exc


def bind_to_view(layout: CacheLayout, view: bytes) -> None:
    """Forget all names if they are of another view than this one; no one may have the store open. Raises MountError.

    `view` says what the root shows (`Forms.of_root`), and is empty for originals. What is cached stays, under
    the numbers of its view.
    """
    try:
        bound_to = layout.view.read_bytes() if layout.view.exists() else b""
        if bound_to != view:
            shutil.rmtree(layout.names, ignore_errors=True)
            layout.view.write_bytes(view)
    except OSError as exc:
        raise MountError(
            f"the cache directory {layout.cache} cannot be used ({exc.strerror}): {CHOOSE_ANOTHER}"
        ) from exc


def same_file(path: Path, descriptor: int) -> bool:
    """Whether a descriptor is of the file that lies there now."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False
