"""Requests to a daemon that serves without a mount (`spiderfs serve`): addresses, frames, and a blocking connection.

What is served as NAME has the address `spiderfs://NAME`; a path in it is `spiderfs://NAME/a/b`. The daemon listens on a
Unix socket called NAME in the directory that `served_directory` gives, which belongs to one user alone.

A frame is its length (u32, little-endian) and one msgpack value. A connection has one request under way at a time: a
list of the operation's name and its arguments. Its answer is a list of an errno, 0 for success, and a value.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

SCHEME = "spiderfs://"
ENVIRONMENT = "SPIDERFS_SERVED"
# Bytes of a file in one answer, at most, and of a text that is written by one request.
PIECE_BYTES = 1 << 20
# A file that is opened comes with its content if it has no more bytes than this.
INLINE_BYTES = 16 << 20
# A request is a path, 4,096 bytes at most, and a text that is written.
REQUEST_BYTES = PIECE_BYTES + (1 << 16)
ANSWER_BYTES = INLINE_BYTES + (1 << 16)
LENGTH = struct.Struct("<I")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PEER = struct.Struct("3i")


class ConnectionLost(Exception):
    """The daemon, or the worker that had the request, has gone; the request may be made again."""


class Address(NamedTuple):
    """Where a file is served: under which name, and its path below that."""

    name: str
    path: bytes


class Peer(NamedTuple):
    """The process at the other end of a Unix socket, as it was when it connected (SO_PEERCRED, unix(7))."""

    pid: int
    uid: int
    gid: int


def address_of(path: Any) -> Address | None:
    """The address that a path is written as; None for any other path. Raises ValueError for a name that none can have.

    `spiderfs:///a/b` is a path of this machine for fsspec, and no address.
    """
    if not isinstance(path, str | bytes):
        return None
    text = os.fsdecode(path)
    if not text.startswith(SCHEME) or text.startswith(f"{SCHEME}/"):
        return None
    name, _, below = text.removeprefix(SCHEME).partition("/")
    check_name(name)
    return Address(name, os.fsencode(below))


def check_name(name: str) -> None:
    """Raises ValueError unless a source can be served under this name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name: take up to 64 letters, digits, dots, dashes and underscores")


def served_directory() -> Path:
    """The directory of this user's sockets; the variable SPIDERFS_SERVED names another one."""
    return Path(os.environ.get(ENVIRONMENT) or f"/tmp/spiderfs-{os.geteuid()}")


def socket_of(name: str) -> Path:
    return served_directory() / name


def peer_of(connected: Any) -> Peer:
    """Who is at the other end of a connected Unix socket."""
    return Peer(*_PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)))


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address for a Unix socket, to be bound or connected to inside the `with` block.

    The path may be longer than the 107 bytes that an address holds (unix(7)).
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def connected(path: Path, timeout_s: float | None) -> socket.socket:
    """A stream socket that is connected to this path; raises OSError, which names it."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.settimeout(timeout_s)
        with socket_address(path) as address:
            stream.connect(address)
    except OSError as exc:
        stream.close()
        if exc.errno is None:
            raise
        # The system's own error does not say which socket it is.
        raise OSError(exc.errno, exc.strerror, os.fspath(path)) from exc
    return stream


def frame(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return LENGTH.pack(len(packed)) + packed


def hook_socket_of(name: str, timeout_s: float) -> Path:
    """The path of the hook's socket of what is served as `name`; raises OSError."""
    connection = Connection(socket_of(name), timeout_s)
    try:
        *_, text = connection.ask("open", threading.get_native_id(), b".spiderfs/hook", os.O_RDONLY)
    except ConnectionLost as exc:
        raise ConnectionResetError(str(exc)) from exc
    finally:
        connection.close()
    return Path(os.fsdecode(text.rstrip(b"\n")))


class Connection:
    """A connection to a daemon's socket; raises OSError, FileNotFoundError or ConnectionRefusedError if none listens.

    It belongs to the process that has made it, and to one thread at a time. `usable`: no request is under way. `peer`
    is the process that listens.
    """

    def __init__(self, path: Path, timeout_s: float | None = None) -> None:
        """`timeout_s`: how long to wait for an answer, at most."""
        self.pid = os.getpid()
        self.usable = True
        self._socket = connected(path, timeout_s)
        # Anybody may have made the directory in /tmp before this user did.
        self.peer = peer_of(self._socket)
        owner = self.peer.uid
        if owner != 0 and os.geteuid() not in (0, owner):
            self._socket.close()
            raise PermissionError(f"{path} belongs to user {owner}: name another directory, {ENVIRONMENT}=DIR")

    def ask(self, operation: str, *arguments: Any) -> Any:
        """The value of the answer; raises the OSError that the daemon answered with, ConnectionLost, TimeoutError."""
        self.usable = False
        try:
            self._socket.sendall(frame([operation, *arguments]))
            (length,) = LENGTH.unpack(self._received(LENGTH.size))
            packed = self._received(min(length, ANSWER_BYTES))
        except TimeoutError:
            raise
        except OSError as exc:
            raise ConnectionLost(str(exc)) from exc
        number, value = msgpack.unpackb(packed, use_list=False)
        self.usable = True
        if number:
            raise OSError(number, os.strerror(number))
        return value

    def close(self) -> None:
        self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.close()

    def _received(self, size: int) -> bytearray:
        buffer = bytearray(size)
        view, have = memoryview(buffer), 0
        while have < size:
            count = self._socket.recv_into(view[have:])
            if not count:
                raise ConnectionLost("the connection has ended")
            have += count
        return buffer
