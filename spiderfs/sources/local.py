"""A source that is a local directory, which is also how an NFS mount appears.

Everything goes through one descriptor of the root, opened before anything is mounted: so the source can be mounted over
itself, renaming its parents does not matter, and worker processes inherit it. A path is walked component by component
with O_NOFOLLOW, so neither the last name nor a directory on the way that was replaced by a link leads out of the
source, and trees deeper than PATH_MAX work.

Only a positive "does not exist" means gone. An ENOENT is trusted only while the root itself is alive; a root that is
dead (removed, stale, or its mount taken away) makes the call fail as unavailable, and is opened again by its path for
the next call, provided that the path now leads to a file system of the same type. That condition keeps the source from
taking the empty directory under an unmounted NFS, or spiderfs' own mount on top of the source, for the data. In the
same way an EACCES is trusted only while the root answers.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import TypeVar

from spiderfs import errors
from spiderfs.linux.mounts import Mount, parse_mount_table
from spiderfs.sources.source import STREAMED_BYTES, UNKNOWN, SourceStat, Version

T = TypeVar("T")

# The errors that say something about the entry, or about this process. Every other errno (EIO, ESTALE, ETIMEDOUT ...)
# says only that there was no answer: SourceUnavailable.
_ERRORS: dict[int, type[errors.SourceError]] = {
    errno.ENOENT: errors.SourceNotFound,
    errno.ENAMETOOLONG: errors.SourceNotFound,
    errno.ENOTDIR: errors.SourceNotADirectory,
    errno.ELOOP: errors.SourceChanged,  # only from read(): the file's name is a link now
    errno.EACCES: errors.SourceDenied,
    errno.EPERM: errors.SourceDenied,
    # A file that another thread reads is closed in a moment.
    errno.EMFILE: errors.SourceThrottled,
    errno.ENFILE: errors.SourceThrottled,
}
_DEAD_ROOT = frozenset({errno.ESTALE, errno.ENOTCONN})
_NO_XATTR = frozenset({errno.ENODATA, errno.ENOTSUP})

_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_WALK = _LOOK | os.O_DIRECTORY
_ROOT = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a name that has become a FIFO must not hold the thread until someone writes to it.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


class LocalSource:
    """The directory tree below `root`; raises ConfigError when it cannot be opened."""

    undated_directories = False

    def __init__(self, root: str | bytes) -> None:
        self.root = os.path.abspath(os.fsencode(root))
        try:
            # The number stays the same when the root is opened again.
            self.root_fd = os.open(self.root, _ROOT)
        except OSError as exc:
            raise _unusable(self.root, exc) from exc
        try:
            # O_PATH needs no permission on the directory itself; say now, not at the first `ls`, that it is unreadable.
            os.close(os.open(b".", _LIST, dir_fd=self.root_fd))
        except OSError as exc:
            self.close()
            raise _unusable(self.root, exc) from exc
        self._file_system = _file_system_of(self.root_fd)
        self._reopen_lock = threading.Lock()

    @property
    def identity(self) -> str:
        return os.fsdecode(os.path.realpath(self.root))

    @property
    def shared_identity(self) -> str:
        """See `identity_between_nodes`: nodes may have mounted one export at different places."""
        mount = _mount_of(self.root_fd)
        if mount is None or not (":/" in mount.source or mount.source.startswith("//")):
            return os.fsdecode(self.root)
        below = os.path.relpath(self.identity, mount.mountpoint)
        return os.path.normpath(f"{mount.source}/{mount.root}/{below}")

    def stat(self, path: bytes) -> SourceStat:
        with self._translated(path), self._opened(path, _LOOK) as fd:
            found = os.fstat(fd)
            if not path:
                _check_linked(fd)
            if not _is_shown(found.st_mode):
                raise errors.SourceNotFound(f"{os.fsdecode(path)}: neither a file, a directory nor a symbolic link")
            return _source_stat(found)

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        # The descriptor stays open for the whole scan: os.DirEntry.stat() is relative to it.
        with self._translated(path), self._opened(path, _LIST) as fd, os.scandir(fd) as entries:
            yield b".", _source_stat(os.fstat(fd))
            failed = False
            for entry in entries:
                name = os.fsencode(entry.name)
                try:
                    if (name, _type_of(entry)) in known:
                        yield name, UNKNOWN
                        continue
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # removed since the directory was read
                except OSError:
                    # A dead mount, or a name that may not be looked up: the names beside it can be.
                    failed = True
                    yield name, UNKNOWN
                    continue
                if _is_shown(found.st_mode):
                    yield name, _source_stat(found)
            # A directory that was removed while it is open looks empty, and so does a dead root.
            _check_linked(fd)
            if failed:
                # Raises if it is not an entry that fails but all of a server, which may not be asked for an fstat.
                os.statvfs(fd)

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        with self._translated(path), self._opened(path, _READ) as fd:
            return _read(fd, path, offset, length, version)

    def stream(self, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
        with self._translated(path), self._opened(path, _READ) as fd:
            for at in range(offset, offset + length, STREAMED_BYTES):
                yield _read(fd, path, at, min(STREAMED_BYTES, offset + length - at), version)

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        with self._translated(path), self._opened(path, _READ) as fd:
            found = _source_stat(os.fstat(fd))
            if found.size > most_bytes:
                raise errors.SourceChanged(f"{os.fsdecode(path)}: larger than it was")
            return found, _read(fd, path, 0, found.size, found.version)

    def readlink(self, path: bytes) -> bytes:
        with self._translated(path), self._opened(path, _LOOK) as fd:
            if not stat.S_ISLNK(os.fstat(fd).st_mode):
                raise errors.SourceChanged(f"{os.fsdecode(path)}: no longer a symbolic link")
            return os.readlink(b"", dir_fd=fd)

    def listxattr(self, path: bytes) -> list[str]:
        return self._of_xattrs(path, os.listxattr) or []

    def getxattr(self, path: bytes, name: str) -> bytes | None:
        return self._of_xattrs(path, lambda entry: os.getxattr(entry, name))

    def _of_xattrs(self, path: bytes, ask: Callable[[str], T]) -> T | None:
        with self._translated(path), self._opened(path, _LOOK) as fd:
            try:
                # These calls refuse an O_PATH descriptor (open(2)), and not a path to its very object.
                return ask(f"/proc/self/fd/{fd}")
            except OSError as exc:
                if exc.errno in _NO_XATTR:
                    return None
                raise

    def statvfs(self) -> os.statvfs_result:
        with self._translated(b""):
            return os.statvfs(self.root_fd)

    def close(self) -> None:
        if self.root_fd >= 0:
            os.close(self.root_fd)
            self.root_fd = -1

    @contextmanager
    def _opened(self, path: bytes, flags: int) -> Iterator[int]:
        """A descriptor of the entry; no component on the way is followed if it is a link, and none leads upwards."""
        *parents, name = path.split(b"/") if path else [b"."]
        directory = root = self.root_fd
        try:
            for parent in parents:
                below = os.open(_plain(parent), _WALK, dir_fd=directory)
                if directory != root:
                    os.close(directory)
                directory = below
            fd = os.open(_plain(name) if path else name, flags, dir_fd=directory)
        finally:
            if directory != root:
                os.close(directory)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _translated(self, path: bytes) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            where = os.fsdecode(path) or "."
            kind = _ERRORS.get(exc.errno or errno.EIO, errors.SourceUnavailable)
            if kind is errors.SourceNotFound and (not path or not self._root_is_there()):
                kind = errors.SourceUnavailable
            if kind is errors.SourceDenied and not self._root_answers():
                kind = errors.SourceUnavailable
            if kind is errors.SourceUnavailable:
                self._reopen_dead_root()
                if path and self._root_is_there() and self._root_answers():
                    kind = errors.SourceEntryFailed
            raise kind(f"{where}: {exc.strerror}") from exc

    def _root_is_there(self) -> bool:
        """Whether an ENOENT below the root can be trusted."""
        try:
            if os.fstat(self.root_fd).st_nlink == 0:
                return False
            # O_PATH sends no request to the file system it ends at, which may be our own mount.
            os.close(os.open(self.root, _ROOT))
        except PermissionError:
            return True  # the path cannot be walked by this user any more; the descriptor is what counts
        except OSError:
            return False
        return True

    def _root_answers(self) -> bool:
        """Whether an error is the entry's own: a server gives EACCES for all of an NFS export that it has withdrawn.

        An NFS client never answers statvfs from what it remembers, and no permission of a file matters to it.
        """
        try:
            os.statvfs(self.root_fd)
        except OSError:
            return False
        return True

    def _reopen_dead_root(self) -> None:
        """Open a dead root by its path again, for the next call."""
        with self._reopen_lock:
            try:
                if os.fstat(self.root_fd).st_nlink > 0 and _file_system_of(self.root_fd):
                    return
            except OSError as exc:
                if exc.errno not in _DEAD_ROOT:
                    return
            try:
                fd = os.open(self.root, _ROOT)
            except OSError:
                return  # still not back; the caller's error says so
            try:
                if _file_system_of(fd) == self._file_system:
                    # dup2 keeps the number, so that no other thread can be left with a closed one.
                    os.dup2(fd, self.root_fd, inheritable=False)
            finally:
                os.close(fd)


def _source_stat(found: os.stat_result) -> SourceStat:
    # A broken server may claim any size. The kernel would take a negative size for a huge one, and not show the file.
    return SourceStat(found.st_mode, found.st_uid, found.st_gid, max(found.st_size, 0), found.st_mtime_ns)


def _is_shown(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


def _type_of(entry: os.DirEntry[str]) -> int:
    """The type of an entry as a mode has it, for which most file systems need not be asked; 0 for special files."""
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    return stat.S_IFREG if entry.is_file(follow_symlinks=False) else 0


def _plain(name: bytes) -> bytes:
    """The name itself, unless it would lead somewhere else than one level down."""
    if name in (b"", b".", b"..") or b"\0" in name:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return name


def _check_linked(fd: int) -> None:
    """Raise ENOENT if the directory has been removed."""
    if os.fstat(fd).st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _read(fd: int, path: bytes, offset: int, length: int, version: Version) -> bytes:
    _check_version(fd, path, version)
    end = min(offset + length, version.size)
    chunks: list[bytes] = []
    while offset < end:
        chunk = os.pread(fd, end - offset, offset)
        if not chunk:
            raise errors.SourceChanged(f"{os.fsdecode(path)}: shorter than it was when it was opened")
        chunks.append(chunk)
        offset += len(chunk)
    # The second look catches a writer that changed the file between our reads.
    _check_version(fd, path, version)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _check_version(fd: int, path: bytes, version: Version) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or _source_stat(found).version != version:
        raise errors.SourceChanged(f"{os.fsdecode(path)}: no longer the version that was asked for")


def _file_system_of(fd: int) -> str:
    """Type of the file system the descriptor lies on; empty if its mount was taken away."""
    mount = _mount_of(fd)
    return "" if mount is None else mount.fstype


def _mount_of(fd: int) -> Mount | None:
    """The mount that the descriptor lies on (proc_pid_mountinfo(5)); None if it was taken away.

    The mount number, not st_dev: it is known without asking the file system, and a detached mount keeps its st_dev.
    """
    with open(f"/proc/self/fdinfo/{fd}", "rb") as info:
        mount_id = next(line.split()[1] for line in info if line.startswith(b"mnt_id:"))
    with open("/proc/self/mountinfo", "rb") as mounts:
        for line in mounts:
            if line.split(b" ", 1)[0] == mount_id:
                return next(iter(parse_mount_table(line)), None)
    return None


def _unusable(root: bytes, exc: OSError) -> errors.ConfigError:
    advice = {
        errno.ENOENT: "does not exist; check the path, or mount it first",
        errno.ENOTDIR: "is not a directory; name the directory that holds the data",
        errno.EACCES: "cannot be read by this user; change its permissions or run as another user",
        errno.ENOTCONN: "is a stale mount; unmount it and mount it again",
        errno.ESTALE: "is a stale mount; unmount it and mount it again",
    }.get(exc.errno or errno.EIO, f"cannot be opened: {exc.strerror}")
    return errors.ConfigError(f"source {os.fsdecode(root)} {advice}")
