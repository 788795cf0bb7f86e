"""Reading a served source (`spiderfs serve`): from the cache if possible, else through the daemon's socket.

An open file that is not in memory is a connection of its own, as it is a descriptor in a mount. If the worker at the
other end dies, or the process forks, the file is opened once more, and must still be the version that it was.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from spiderfs.client.client import AnyPath, CachedFile, CacheHolder, Gone, in_mode, is_plain
from spiderfs.errors import StoreDamaged
from spiderfs.protocol.requests import PIECE_BYTES, SCHEME, Connection, ConnectionLost, address_of, socket_of
from spiderfs.shared.published import CLIENT_XATTR

log = logging.getLogger(__name__)

# Connections that are kept for further requests; each thread has one request under way at most.
_IDLE = 16
# One request brings so much of a large file, as the kernel's read-ahead does in a mount.
_BUFFER_BYTES = 256 << 10
_PATH_BYTES = 4096
_MODES = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND}
_MODES["x"] = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_CONTROL = b".spiderfs"


class Served(CacheHolder):
    """The files that are served as one name; paths are relative, or begin with `spiderfs://NAME/`.

    Errors are those of a mount, and ENOTCONN if nothing is served as this name.
    """

    def __init__(self, name: str, timeout_s: float | None = None) -> None:
        """`timeout_s`: how long an answer may take before TimeoutError is raised; by default any time."""
        super().__init__()
        self.name = name
        self._socket = socket_of(name)
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []

    # -- reading

    def read_bytes(self, path: AnyPath) -> bytes:
        """The whole file; the fastest way."""
        if (cached := self._cached(self._below(path))) is not None:
            return cached
        with self.open(path) as file:
            content: bytes = file.getvalue() if isinstance(file, CachedFile) else file.read()
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
        """A file object, as of the built-in open; files of up to 16 MiB are in memory as a whole."""
        below = self._below(path)
        kinds = mode.replace("b", "", 1).replace("t", "", 1).replace("+", "", 1)
        if kinds not in _MODES:
            raise ValueError(f"invalid mode: {mode!r}")
        content = self._cached(below) if is_plain(mode, buffering, encoding, errors, newline) else None
        if content is not None:
            return in_mode(ServedBytes(content, self.url(below)), mode, buffering, encoding, errors, newline)
        flags = _MODES[kinds] if "+" not in mode else _MODES[kinds] & ~os.O_WRONLY | os.O_RDWR
        raw = ServedFile(self, below, flags)
        if raw.content is not None and buffering != 0:
            return in_mode(ServedBytes(raw.content, raw.name), mode, buffering, encoding, errors, newline)
        if buffering == 0:
            if "b" not in mode:
                raise ValueError("can't have unbuffered text I/O")
            return raw  # type: ignore[return-value]
        size = buffering if buffering > 1 else _BUFFER_BYTES
        file = io.BufferedReader(raw, size) if flags == os.O_RDONLY else io.BufferedWriter(raw, size)
        return in_mode(file, mode, buffering, encoding, errors, newline)

    # -- names and attributes

    def stat(self, path: AnyPath = "", *, follow_symlinks: bool = True) -> os.stat_result:
        """As os.stat."""
        return _stat_result(self._of_path("stat", path, int(follow_symlinks)))

    def listdir(self, path: AnyPath = "") -> list[str]:
        """As os.listdir."""
        return [os.fsdecode(name) for name, _ in self._listed(path)]

    def scandir(self, path: AnyPath = "") -> Iterator[tuple[str, os.stat_result]]:
        """Each name in a directory, with the attributes that os.lstat would give."""
        for name, attributes in self._listed(path):
            if attributes is None:
                below = os.path.join(self._below(path), name)
                yield os.fsdecode(name), self.stat(below, follow_symlinks=False)
            else:
                yield os.fsdecode(name), _stat_result(attributes)

    def _listed(self, path: AnyPath) -> Iterator[tuple[bytes, Any]]:
        after = 0
        while True:
            listed, after = self._of_path("list", path, after)
            yield from listed
            if not after:
                return

    def readlink(self, path: AnyPath) -> str:
        """As os.readlink."""
        return os.fsdecode(self._of_path("readlink", path, 0))

    def exists(self, path: AnyPath) -> bool:
        """As os.path.exists."""
        try:
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    # -- requests

    def ask(self, operation: str, *arguments: Any) -> Any:
        """The value of the answer, of whichever worker gives it; raises OSError."""
        while True:
            connection = self.taken()
            try:
                return connection.ask(operation, *arguments)
            except ConnectionLost as exc:
                log.debug("asking again: %s", exc)
            finally:
                self.give_back(connection)

    def taken(self) -> Connection:
        """A connection for the caller alone; raises OSError (ENOTCONN) if no daemon is there."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                break  # another thread has taken the last one
            if connection.pid == os.getpid():
                return connection
            connection.close()  # the parent has it too
        try:
            return Connection(self._socket, self._timeout_s)
        except (FileNotFoundError, ConnectionRefusedError) as exc:
            text = f"nothing is served as {SCHEME}{self.name}: run 'spiderfs serve SOURCE --name {self.name}'"
            raise OSError(errno.ENOTCONN, text) from exc

    def give_back(self, connection: Connection) -> None:
        if connection.usable and connection.pid == os.getpid() and len(self._idle) < _IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def _of_path(self, operation: str, path: AnyPath, argument: int) -> Any:
        below = self._below(path)
        try:
            return self.ask(operation, threading.get_native_id(), below, argument)
        except OSError as exc:
            raise OSError(exc.errno, exc.strerror, self.url(below)) from None

    def url(self, below: bytes) -> str:
        return f"{SCHEME}{self.name}/{os.fsdecode(below)}"

    def _below(self, path: AnyPath) -> bytes:
        address = address_of(path)
        if address is not None and address.name != self.name:
            raise ValueError(f"{path!r} is not served as {self.name}")
        below = os.fsencode(path) if address is None else address.path
        if len(below) > _PATH_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), os.fsdecode(path))
        return below.lstrip(b"/")

    # -- the cache

    def _cached(self, below: bytes) -> bytes | None:
        """The cached bytes of a file, counted as an open; None if the daemon has to be asked."""
        cache = self._current(0)
        if cache is None or below.startswith(_CONTROL):
            return None
        try:
            return cache.serve(below)
        except StoreDamaged:
            return None  # the daemon finds it damaged too, and fetches it again
        except Gone as exc:
            self._lose(exc)
            return None

    def _terms(self) -> Path:
        found = self.ask("getxattr", threading.get_native_id(), b"", CLIENT_XATTR)
        return Path(os.fsdecode(found))


class ServedBytes(CachedFile):
    """The bytes of one version of a file that is served."""

    def fileno(self) -> NoReturn:
        raise io.UnsupportedOperation("fileno")


class ServedFile(io.RawIOBase):
    """An open file that is served: its content, or a connection by which it is read piece by piece."""

    def __init__(self, served: Served, below: bytes, flags: int) -> None:
        super().__init__()
        self.name = served.url(below)
        self._served, self._path, self._flags = served, below, flags
        self._lock = threading.Lock()
        self._position = 0
        self._connection: Connection | None = None
        self.content: bytes | None = None
        self._version = 0
        with self._lock:
            self._open()

    @property
    def mode(self) -> str:
        return "rb" if self.readable() else "wb"

    def readable(self) -> bool:
        return not self._flags & os.O_WRONLY

    def writable(self) -> bool:
        return bool(self._flags & (os.O_WRONLY | os.O_RDWR))

    def seekable(self) -> bool:
        return not self.writable()

    def fileno(self) -> NoReturn:
        raise io.UnsupportedOperation("fileno")

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        with memoryview(buffer).cast("B") as view:
            piece = self._ask("read", self._position, min(len(view), PIECE_BYTES))
            view[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def write(self, data: Any, /) -> int:
        written = bytes(data)[:PIECE_BYTES]
        self._ask("write", written)
        return len(written)

    def close(self) -> None:
        if self.closed:
            return
        connection, self._connection = self._connection, None
        super().close()
        if connection is not None:
            try:
                # What was written to a control file may be refused now.
                if connection.pid == os.getpid():
                    connection.ask("close", self._handle, self._inode)
            except ConnectionLost:
                log.debug("%s was closed with its connection", self.name)
            finally:
                self._served.give_back(connection)

    def _open(self) -> None:
        """Open the file, once more if a worker has died meanwhile; raises OSError, ESTALE for another version."""
        opened = None
        while opened is None:
            connection = self._served.taken()
            try:
                opened = connection.ask("open", threading.get_native_id(), self._path, self._flags)
            except ConnectionLost as exc:
                log.debug("opening %s again: %s", self.name, exc)
            except OSError as exc:
                raise OSError(exc.errno, exc.strerror, self.name) from None
            finally:
                if opened is None or opened[-1] is not None:
                    self._served.give_back(connection)
        attributes, self._handle, self._inode, self.content = opened
        self._connection = connection if self.content is None else None
        found = _stat_result(attributes)
        if self._version not in (0, found.st_ino):
            self.content = None
            self.close()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), self.name)
        self._version, self._size = found.st_ino, found.st_size

    def _ask(self, operation: str, *arguments: Any) -> Any:
        with self._lock:
            while self.content is None:
                connection = self._connection
                try:
                    if connection is None:
                        raise ConnectionLost("it could not be opened again")
                    if connection.pid != os.getpid():
                        raise ConnectionLost("the parent has it")
                    inode = (self._inode,) if operation == "read" else ()
                    return connection.ask(operation, self._handle, *inode, *arguments)
                except ConnectionLost:
                    self._connection = None
                    if connection is not None:
                        connection.close()
                    self._open()
            offset, size = arguments
            return self.content[offset : offset + size]


def _stat_result(attributes: tuple[int, ...]) -> os.stat_result:
    mode, inode, uid, gid, size, mtime_ns = attributes
    links = 2 if stat.S_ISDIR(mode) else 1
    seconds, nanoseconds = divmod(mtime_ns, 10**9)
    # As `os.stat` does: a quotient would be rounded otherwise, and the times of one file would differ.
    shown = seconds + 1e-9 * nanoseconds
    times = {f"st_{kind}time_ns": mtime_ns for kind in "amc"} | {f"st_{kind}time": shown for kind in "amc"}
    return os.stat_result((mode, inode, 0, links, uid, gid, size, seconds, seconds, seconds), times)
