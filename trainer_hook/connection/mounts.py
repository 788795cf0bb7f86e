"""Finding the daemon: the mount of a directory, or a served name, and the hook's socket."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spiderfs.protocol.requests import SCHEME, address_of, hook_socket_of

# A file of every mount, below its root; it holds the path of the socket.
_HOOK_FILE = ".spiderfs/hook"


@dataclass(frozen=True)
class ConnectPatience:
    """How long a client waits to connect, and between two attempts, in seconds."""

    connect_s: float = 5.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 30.0


DEFAULT_PATIENCE = ConnectPatience()


class Root(NamedTuple):
    """The directory below which a data set's files lie for the daemon, and the place there that the user has named."""

    path: str
    """The real path of a mount, or `spiderfs://NAME`; any other real path if there is no daemon."""
    directory: str
    has_daemon: bool


def root_of(directory: str | os.PathLike[str]) -> Root:
    """Raises ValueError for an impossible name. What is served need not be served now."""
    address = address_of(directory)
    if address is not None:
        return Root(f"{SCHEME}{address.name}", os.fspath(directory).rstrip("/"), has_daemon=True)
    here = os.path.abspath(directory)
    mount = find_mount(here)
    return Root(os.fspath(mount or os.path.realpath(here)), here, has_daemon=mount is not None)


def find_mount(directory: str | os.PathLike[str]) -> Path | None:
    """The real path of the spiderfs mount in which `directory` lies; None if it lies in none.

    A symbolic link may lead into the mount. If the mount's daemon has died, this is the outermost directory that gives
    the error ENOTCONN.
    """
    for path in (os.path.abspath(directory), os.path.realpath(directory)):
        dead = None
        for above in (Path(path), *Path(path).parents):
            try:
                os.stat(above / _HOOK_FILE)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as exc:
                if exc.errno == errno.ENOTCONN:
                    dead = above
                continue
            return Path(os.path.realpath(above))
        if dead is not None:
            return dead
    return None


def socket_finder(directory: str | os.PathLike[str], given: str | os.PathLike[str] | None) -> Callable[[], Path]:
    """A function that returns the path of the socket; it raises FileNotFoundError while there is no mount.

    `given` overrides the path that the mount names: in a container the socket may have another path.
    """

    def find() -> Path:
        if given is not None:
            return Path(given)
        if (address := address_of(directory)) is not None:
            return hook_socket_of(address.name, DEFAULT_PATIENCE.connect_s)
        mount = find_mount(directory)
        if mount is None:
            raise FileNotFoundError(f"{os.fspath(directory)} lies in no spiderfs mount")
        return Path(os.fsdecode((mount / _HOOK_FILE).read_bytes().rstrip(b"\n")))

    return find


def connect(path: Path, timeout_s: float) -> socket.socket:
    """A connected stream socket; its path may be longer than the 107 bytes that unix(7) allows. Raises OSError."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.settimeout(timeout_s)
        stream.connect(f"/proc/self/fd/{directory}/{path.name}")
    except OSError as exc:
        stream.close()
        if exc.errno is None:
            raise
        # The system's own error does not say which socket it is.
        raise OSError(exc.errno, exc.strerror, os.fspath(path)) from exc
    finally:
        os.close(directory)
    return stream
