"""Finding the daemon: the mount in which a directory lies, and the socket that the mount names."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# A file of every mount, below its root; it holds the path of the socket.
_HOOK_FILE = ".spiderfs/hook"


@dataclass(frozen=True)
class Patience:
    """How long a client waits to connect, and between two attempts, in seconds."""

    connect_s: float = 5.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 30.0


DEFAULT_PATIENCE = Patience()


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
