"""Mounts and served sources as a file system of fsspec.

    spiderfs:///mnt/data/train/1.jpg  a path of this machine, below a mount point
    spiderfs://data/train/1.jpg       what `spiderfs serve --name data` serves
    train/1.jpg                       a path below the option `mountpoint`, which is a directory or `spiderfs://NAME`

Inside of fsspec a path of the first kind begins with a slash, and one of the second kind with the name. Everything is
read-only: a call that would change something raises OSError with EROFS, as on the mount. Only this module imports
fsspec, which the extra `fsspec` installs; the entry point in pyproject.toml registers the protocol.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import IO, Any, NoReturn, cast

from fsspec.spec import AbstractFileSystem

from spiderfs import client
from spiderfs.client.client import CachedFile

_TYPES = {stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFLNK: "link"}


class SpiderfsFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files of spiderfs mounts, and what `spiderfs serve` serves, as a file system of fsspec.

    Paths are relative to `mountpoint`. Without it they are absolute paths of this machine, or begin with the name of
    what is served.
    """

    protocol = "spiderfs"
    root_marker = ""

    def __init__(self, mountpoint: str | os.PathLike[str] | None = None, **storage_options: Any) -> None:
        super().__init__(mountpoint=mountpoint, **storage_options)
        self._root = ""
        if mountpoint is not None:
            is_served = client.served_at(mountpoint) is not None
            self._root = str(mountpoint).rstrip("/") if is_served else os.path.abspath(mountpoint)
            self._strip_protocol = self._below_root  # type: ignore[method-assign]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = os.fspath(path)
        for prefix in ("spiderfs://", "spiderfs:"):
            text = text.removeprefix(prefix)
        # Hugging Face datasets drop one of three slashes. So a path below a mount point is one, whatever is served.
        if text.startswith("/") or client.is_mounted(f"/{text}"):
            return "/" + text.strip("/")
        return text.rstrip("/")

    @classmethod
    def _below_root(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._below_root(each) for each in path]
        return "/" + SpiderfsFileSystem._strip_protocol(path).strip("/")

    def _place(self, path: str) -> str:
        path = self._strip_protocol(path)
        return f"{self._root}{path}" if self._root or path.startswith("/") else f"spiderfs://{path}"

    # -- contents

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> IO[Any]:
        file: Any = client.open(self._place(path), mode)
        # The file objects of fsspec's own file systems have this attribute too.
        if file.seekable():
            file.size = len(file.getbuffer()) if isinstance(file, CachedFile) else file.seek(0, os.SEEK_END)
            file.seek(0)
        return cast(IO[Any], file)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        if start is None and end is None:
            return client.read_bytes(self._place(path))
        with self._open(path) as file:
            first, last, _ = slice(start, end).indices(file.size)  # type: ignore[attr-defined]
            file.seek(first)
            content: bytes = file.read(max(0, last - first))
        return content

    # -- names and attributes

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        return self._described(path, self._place(path))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found = self.info(path)
        if found["type"] != "directory":
            return [found] if detail else [path]
        prefix, place = path.rstrip("/"), self._place(path)
        if not detail:
            return sorted(f"{prefix}/{name}" for name in client.listdir(place))
        served = client.served_at(place)
        if served is None:
            return [self._described(name, self._place(name)) for name in self.ls(path, detail=False)]
        listed = [(f"{prefix}/{name}", found) for name, found in served.scandir(place)]
        return [
            self._described(name, self._place(name)) if stat.S_ISLNK(found.st_mode) else _info(name, found)
            for name, found in sorted(listed)
        ]

    def walk(
        self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = None, **kwargs: Any
    ) -> Iterator[Any]:
        """As fsspec's own, but a directory that cannot be listed is an error, also in `find` and `glob`.

        fsspec would leave out all that is below it, unless `on_error` is "raise".
        """
        # Below the first directory fsspec forgets `on_error`, and keeps all else.
        on_error = kwargs.setdefault("given_on_error", on_error or _raise_unless_gone)
        yield from super().walk(path, maxdepth, topdown, on_error, **kwargs)

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(client.stat(self._place(path)).st_mtime, tz=UTC)

    def created(self, path: str) -> datetime:
        """The mount knows of no other time."""
        return self.modified(path)

    @staticmethod
    def _described(name: str, place: str) -> dict[str, Any]:
        try:
            found = client.stat(place)
        except OSError:
            # A link that leads nowhere exists all the same.
            served = client.served_at(place)
            found = os.lstat(place) if served is None else served.stat(place, follow_symlinks=False)
        return _info(name, found)

    # -- calls that would change something

    def _refuse(self, path: Any, *_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    mkdir = makedirs = rmdir = _rm = rm_file = cp_file = touch = pipe_file = put_file = _refuse


def _info(name: str, found: os.stat_result) -> dict[str, Any]:
    return {
        "name": name,
        "size": found.st_size,
        "type": _TYPES.get(stat.S_IFMT(found.st_mode), "other"),
        "mtime": found.st_mtime,
        "mode": found.st_mode,
        "uid": found.st_uid,
        "gid": found.st_gid,
        "ino": found.st_ino,
    }


def _raise_unless_gone(exc: OSError) -> None:
    if not isinstance(exc, FileNotFoundError | NotADirectoryError):
        raise exc
