"""Where the daemon of a directory is: the mount above it, and the socket that the mount names."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

# What a mount shows under its root; reading it gives the path of the socket.
_HOOK_FILE = ".spiderfs/hook"


def find_mount(directory: str | os.PathLike[str]) -> Path | None:
    """The real path of the spiderfs mount in which `directory` lies; None if it lies in none.

    A link may lead into the mount. Of a mount whose daemon has died, that is the outermost directory that is gone.
    """
    for path in (os.path.abspath(directory), os.path.realpath(directory)):
        dead = None
        for place in (Path(path), *Path(path).parents):
            try:
                os.stat(place / _HOOK_FILE)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as exc:
                if exc.errno == errno.ENOTCONN:
                    dead = place
                continue
            return Path(os.path.realpath(place))
        if dead is not None:
            return dead
    return None


def socket_finder(directory: str | os.PathLike[str], given: str | os.PathLike[str] | None) -> Callable[[], Path]:
    """A function that says where the socket is now; it raises FileNotFoundError while there is none.

    `given` overrides what the mount says, as in a container where the socket lies elsewhere.
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
    """A connected stream socket; the path may be longer than the 107 bytes of sockaddr_un (unix(7))."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.settimeout(timeout_s)
        stream.connect(f"/proc/self/fd/{directory}/{path.name}")
    except OSError:
        stream.close()
        raise
    finally:
        os.close(directory)
    return stream
