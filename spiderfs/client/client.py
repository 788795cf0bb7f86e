"""Reading a mount's files past FUSE, and through it where that is not possible.

A `Client` belongs to one mount and may be used from any thread and after a fork. It finds the mount's cache by an
attribute of the mount's root, holds it while it can be used, and looks for it anew when the kernel's mount table has
changed, when the manager has gone, and after a fork. While it has no cache (the mount is another user's, or of another
pid namespace, or is gone), it opens everything through the mount. So a client can do all that `open` can, and every
error is the mount's.
"""

from __future__ import annotations

import builtins
import errno
import io
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, NoReturn

from spiderfs.client.cache import STORES, Cache, Gone
from spiderfs.errors import StoreCorrupt, StoreDamaged, StoreError
from spiderfs.linux.mounts import FSTYPE, MOUNT_TABLE, canonical, mounts
from spiderfs.shared.bypass_terms import CLIENT_XATTR

log = logging.getLogger(__name__)

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

# How soon after a failure a cache is looked for again: a manager that died is back after half a second.
RETRY_S = 0.25
_CONTROL = b".spiderfs"
_READ_MODES = {"r", "rt", "tr", "rb", "br"}


class MountTable:
    """The mount points of this process, as of the last call of `state`.

    Reading `/proc/self/mountinfo` takes a tenth of a millisecond. An epoll on it, which says whether the table has
    changed since the last epoll, takes a third of a microsecond (proc_pid_mounts(5)). Each open file of the table tells
    of a change once, to the first thread that asks. So a process has one `MountTable`, and a child of fork opens the
    file again.
    """

    def __init__(self) -> None:
        self._state = 0
        self._watch: select.epoll | None = None
        self._file = -1
        self._points: list[tuple[bytes, bool]] = []
        self._beginning = threading.Lock()

    def state(self) -> int:
        """A number that changes whenever the table changes, and in a child of fork."""
        watch = self._watch
        if watch is None:
            self._begin()
        elif watch.poll(0):
            self._read()
        return self._state

    def spiderfs_points(self) -> list[bytes]:
        """The mount points on which a spiderfs mount is the topmost one; the longest paths come first."""
        on_top = dict(self._points)
        return sorted((point for point, ours in on_top.items() if ours), key=len, reverse=True)

    def below(self, point: bytes) -> tuple[bytes, ...]:
        """Prefixes of the paths below `point` that belong to other mounts."""
        inner = (other for other, _ in self._points if other.startswith(point + b"/"))
        return tuple(prefix for other in inner for prefix in (other, other + b"/"))

    def _begin(self) -> None:
        with self._beginning:
            if self._watch is None:
                self._file = os.open(MOUNT_TABLE, os.O_RDONLY | os.O_CLOEXEC)
                watch = select.epoll()
                watch.register(self._file, select.EPOLLPRI)
                self._read()
                self._watch = watch

    def _read(self) -> None:
        self._points = [(os.fsencode(mount.mountpoint), mount.fstype == FSTYPE) for mount in mounts()]
        self._state += 1

    def _after_fork(self) -> None:
        self._beginning = threading.Lock()
        # The child shares the parent's open file: the kernel would tell the child of a change, and not the parent.
        if self._watch is not None:
            self._watch.close()
            os.close(self._file)
            self._watch = None
            self._state += 1


TABLE = MountTable()
os.register_at_fork(after_in_child=TABLE._after_fork)


class CachedFile(io.BytesIO):
    """The bytes of one version of a file, read-only; `io.BytesIO` does not copy what it is given to begin with."""

    mode = "rb"

    def __init__(self, content: bytes, name: Any) -> None:
        super().__init__(content)
        self.name = name
        self._content = content
        self._file: io.FileIO | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the position; a place before the beginning is an error, but io.BytesIO would go to the beginning."""
        start = {os.SEEK_CUR: self.tell(), os.SEEK_END: len(self._content)}.get(whence, 0)
        if start + offset < 0 and not self.closed:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().seek(offset, whence)

    def peek(self, size: int = 0, /) -> bytes:
        """The bytes from the present position on, without moving it."""
        return self._content[self.tell() :]

    def fileno(self) -> int:
        """A descriptor of the same bytes, opened through the mount; its position is its own.

        Raises io.UnsupportedOperation where the name means other bytes by now.
        """
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if self._file is None:
            file = io.FileIO(self.name)
            if os.fstat(file.fileno()).st_size != len(self._content) or file.readall() != self._content:
                file.close()
                raise io.UnsupportedOperation("fileno")
            self._file = file
        os.lseek(self._file.fileno(), self.tell(), os.SEEK_SET)
        return self._file.fileno()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    def writable(self) -> bool:
        return False

    def write(self, _: Any, /) -> NoReturn:
        raise io.UnsupportedOperation("write")

    def writelines(self, _: Iterable[Any], /) -> NoReturn:
        raise io.UnsupportedOperation("write")

    def truncate(self, _: int | None = None, /) -> NoReturn:
        raise io.UnsupportedOperation("truncate")

    def getbuffer(self) -> memoryview:
        return super().getbuffer().toreadonly()


_CLIENTS: weakref.WeakSet[Client] = weakref.WeakSet()


class Client:
    """The files below one mount point; paths are absolute, or relative to it."""

    def __init__(self, mountpoint: AnyPath) -> None:
        given = os.fsencode(os.path.abspath(os.fsdecode(mountpoint)))
        self._point = os.fsencode(canonical(os.fsdecode(mountpoint)))
        self._prefixes = tuple({given + b"/": None, self._point + b"/": None})
        self._cache: Cache | None = None
        self._below: tuple[bytes, ...] = ()
        self._state = -1
        self._retry_at = 0.0
        self._attaching = threading.Lock()
        _CLIENTS.add(self)

    @property
    def mountpoint(self) -> str:
        return os.fsdecode(self._point)

    # -- reading

    def read_bytes(self, path: AnyPath) -> bytes:
        """The whole file; the fastest way."""
        whole = self._absolute(path)
        content = self.cached(whole)
        if content is None:
            with builtins.open(os.fsdecode(whole), "rb") as file:
                content = file.read()
        return content

    def open(
        self,
        path: AnyPath,
        mode: str = "rb",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """A file object, as the built-in open gives one; where the cache has the file it holds all bytes in memory."""
        whole = self._absolute(path)
        return self.opened(whole, os.fsdecode(whole), mode, buffering, encoding, errors, newline)

    def opened(
        self,
        path: bytes,
        name: str | bytes,
        mode: str,
        buffering: int,
        encoding: str | None,
        errors: str | None,
        newline: str | None,
        state: int | None = None,
    ) -> IO[Any]:
        """`open` for an absolute path that the caller writes as `name`."""
        text = "b" not in mode
        plain = mode in _READ_MODES and buffering != 0 and (text or not (encoding or errors or newline))
        content = self.cached(path, state) if plain else None
        if content is None:
            return builtins.open(name, mode, buffering, encoding, errors, newline)
        file = CachedFile(content, name)
        if not text:
            return file
        wrapped = io.TextIOWrapper(file, io.text_encoding(encoding), errors, newline, line_buffering=buffering == 1)
        wrapped.mode = mode  # type: ignore[misc]
        return wrapped

    # -- names and attributes, which the kernel keeps: through the mount

    def stat(self, path: AnyPath) -> os.stat_result:
        """As os.stat; the mount answers."""
        return os.stat(self._absolute(path))

    def listdir(self, path: AnyPath = "") -> list[str]:
        """As os.listdir; the mount answers."""
        return os.listdir(os.fsdecode(self._absolute(path)))

    def exists(self, path: AnyPath) -> bool:
        """As os.path.exists; the mount answers."""
        return os.path.exists(self._absolute(path))

    # -- finding the cache

    def _absolute(self, path: AnyPath) -> bytes:
        given = os.fsencode(path)
        return given if given.startswith(b"/") else self._point + b"/" + given if given else self._point

    def cached(self, path: bytes, state: int | None = None) -> bytes | None:
        """The cached bytes of the file at an absolute path, counted as an open; None if the mount has to be asked.

        `state` is the mount table's, if the caller has just asked for it.
        """
        cache = self._current(TABLE.state() if state is None else state)
        if cache is None:
            return None
        for prefix in self._prefixes:
            if path.startswith(prefix):
                below = path[len(prefix) :]
                break
        else:
            return None
        if below.startswith(_CONTROL) or (self._below and (self._point + b"/" + below).startswith(self._below)):
            return None
        try:
            return cache.serve(below)
        except StoreDamaged:
            self._have_it_mended(path)
        except Gone as exc:
            self._lose(exc)
        return None

    def kept(self, inode: int) -> bytes | None:
        """The bytes that lie in the cache under an inode, whatever they are; None if it has none or cannot be read."""
        cache = self._current(TABLE.state())
        try:
            return None if cache is None else cache.kept(inode)
        except StoreDamaged:
            return None
        except Gone as exc:
            self._lose(exc)
            return None

    def _current(self, state: int) -> Cache | None:
        cache = self._cache
        if state != self._state or cache is None or not cache.usable():
            cache = self._attach(state)
        return cache

    def _lose(self, exc: Gone) -> None:
        log.debug("%s: reading through the mount", exc)
        self._cache = None
        self._retry_at = time.monotonic() + RETRY_S

    def _attach(self, state: int) -> Cache | None:
        """The mount's cache as of now, if it can be used."""
        if state == self._state and time.monotonic() < self._retry_at:
            return None
        with self._attaching:
            if state == self._state and (self._cache is not None and self._cache.usable()):
                return self._cache  # another thread was faster
            self._look(state)
            return self._cache

    def _look(self, state: int) -> None:
        try:
            held, self._cache = self._cache, None
            if held is not None and not held.usable():
                held.abandon()
                held = None
            self._below = TABLE.below(self._point)
            if self._point in TABLE.spiderfs_points():
                path = Path(os.fsdecode(os.getxattr(self._point, CLIENT_XATTR)))
                # Somebody else's mounts come and go.
                if held is not None and not held.is_at(path):
                    held = None  # which closes its store, before another mount's is opened
                self._cache = Cache(path) if held is None else held
        except (OSError, ValueError, KeyError, StoreError, StoreCorrupt, Gone, MemoryError) as exc:
            log.debug("%s cannot be read around FUSE: %s", self.mountpoint, exc)
            self._retry_at = time.monotonic() + RETRY_S
        self._state = state

    @staticmethod
    def _have_it_mended(path: bytes) -> None:
        """Make the next read of a damaged record reach the daemon, which fetches it again, and not the page cache."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            log.debug("a damaged record stays as it is (%s)", exc)
            return
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _let_go() -> None:
    for client in list(_CLIENTS):
        client._cache = None


def _in_parent() -> None:
    STORES.after_fork()
    for client in list(_CLIENTS):
        client._retry_at = 0.0


def _in_child() -> None:
    STORES.in_child()
    for client in list(_CLIENTS):
        # A thread that was attaching does not exist here.
        client._attaching = threading.Lock()
        client._retry_at = 0.0
    _let_go()


os.register_at_fork(before=lambda: STORES.before_fork(_let_go), after_in_parent=_in_parent, after_in_child=_in_child)
