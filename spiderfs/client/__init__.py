"""Reading a spiderfs mount's files in the reader's own process, past FUSE: same answers, fewer of the kernel's calls.

    from spiderfs import client
    content = client.read_bytes("/mnt/data/train/1.jpg")
    content = client.read_bytes("spiderfs://data/train/1.jpg")

All functions take any path. Below a spiderfs mount, `open` and `read_bytes` read the cache where they can and the mount
where they cannot; below `spiderfs://NAME` they read what `spiderfs serve` serves as NAME, without a mount; and anywhere
else they are the built-in `open`. A `Client` does the same for one mount, and a `Served` for one name. `fsspec_files`
has the file system for fsspec. docs/reference/client.md says what a program can rely on.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from typing import IO, Any

from spiderfs.client.client import TABLE, AnyPath, Client
from spiderfs.client.served import Served
from spiderfs.protocol.requests import ENVIRONMENT, address_of

__all__ = ["Client", "Served", "listdir", "open", "read_bytes", "stat"]

# By name, and by the directory of sockets.
_served: dict[tuple[str, str | None], Served] = {}
_clients: dict[bytes, Client] = {}
# The state of the mount table, and clients by prefix as of then.
_known: tuple[int, list[tuple[bytes, Client]]] = (-1, [])


def _client_of(path: bytes) -> tuple[Client | None, int]:
    """The client of the mount that an absolute path lies in, and the state of the mount table."""
    global _known
    state = TABLE.state()
    if state != _known[0]:
        points = TABLE.spiderfs_points()
        _known = (state, [(point + b"/", _clients.setdefault(point, Client(point))) for point in points])
        # A client holds its cache's files open and 8 TiB of the 128 TiB of addresses, so only 15 of them find a place.
        for gone in _clients.keys() - points:
            _clients.pop(gone, None)
    for prefix, client in _known[1]:
        if path.startswith(prefix):
            return client, state
    return None, state


def is_mounted(path: str) -> bool:
    """Whether an absolute path lies below the mount point of a spiderfs mount."""
    return _client_of(os.fsencode(path))[0] is not None


def _whole(path: AnyPath) -> bytes:
    given = os.fsencode(path)
    return given if given.startswith(b"/") else os.getcwdb() + b"/" + given


def served_at(path: object) -> Served | None:
    """What the address `spiderfs://NAME/...` is served by; None for any other path."""
    address = address_of(path)
    if address is None:
        return None
    key = address.name, os.environ.get(ENVIRONMENT)
    return _served.get(key) or _served.setdefault(key, Served(address.name))


def listdir(path: AnyPath) -> list[str]:
    """As os.listdir."""
    served = served_at(path)
    return os.listdir(os.fsdecode(path)) if served is None else served.listdir(path)


def stat(path: AnyPath) -> os.stat_result:
    """As os.stat."""
    served = served_at(path)
    return os.stat(path) if served is None else served.stat(path)


def read_bytes(path: AnyPath) -> bytes:
    """The whole file."""
    if (served := served_at(path)) is not None:
        return served.read_bytes(path)
    whole = _whole(path)
    client, state = _client_of(whole)
    content = None if client is None else client.cached(whole, state)
    if content is None:
        with builtins.open(path, "rb") as file:
            content = file.read()
    return content


def open(
    file: AnyPath | int,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Callable[[str, int], int] | None = None,
) -> IO[Any]:
    """The built-in open, also for `spiderfs://NAME/...`; cached files come from the cache."""
    if (served := served_at(file)) is not None:
        return served.open(os.fsencode(file), mode, buffering, encoding, errors, newline)  # type: ignore[arg-type]
    if not isinstance(file, int) and closefd and opener is None:
        whole = _whole(file)
        client, state = _client_of(whole)
        if client is not None:
            return client.opened(whole, os.fspath(file), mode, buffering, encoding, errors, newline, state)
    return builtins.open(file, mode, buffering, encoding, errors, newline, closefd, opener)
