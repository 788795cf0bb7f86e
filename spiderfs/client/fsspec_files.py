"""Mounts as a file system of fsspec: `spiderfs:///mnt/data/train/1.jpg`, or a path below the option `mountpoint`.

Names and attributes come through the mount, bytes through the client. Everything is read-only: a call that would change
something raises OSError with EROFS, as on the mount. Only this module imports fsspec, which the extra `fsspec`
installs; the entry point in pyproject.toml registers the protocol.
"""

from __future__ import annotations

import errno
import os
import stat
from datetime import UTC, datetime
from typing import IO, Any, NoReturn, cast

from fsspec.spec import AbstractFileSystem

from spiderfs import client
from spiderfs.client.client import CachedFile

_TYPES = {stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFLNK: "link"}


class SpiderfsFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files of spiderfs mounts as a file system of fsspec.

    Paths are relative to `mountpoint`; without it they are absolute paths on this machine.
    """

    protocol = "spiderfs"
    root_marker = "/"

    def __init__(self, mountpoint: str | os.PathLike[str] | None = None, **storage_options: Any) -> None:
        super().__init__(mountpoint=mountpoint, **storage_options)
        self._root = "" if mountpoint is None else os.path.abspath(mountpoint)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = os.fspath(path)
        for prefix in ("spiderfs://", "spiderfs:"):
            text = text.removeprefix(prefix)
        return "/" + text.strip("/")

    def _place(self, path: str) -> str:
        return f"{self._root}{self._strip_protocol(path)}"

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
        file.size = len(file.getbuffer()) if isinstance(file, CachedFile) else os.fstat(file.fileno()).st_size
        return cast(IO[Any], file)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        content = client.read_bytes(self._place(path))
        return content if start is None and end is None else content[start:end]

    # -- names and attributes

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        return self._described(path, self._place(path))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found = self.info(path)
        if found["type"] != "directory":
            return [found] if detail else [path]
        with os.scandir(self._place(path)) as entries:
            names = sorted(f"{path.rstrip('/')}/{entry.name}" for entry in entries)
        return [self._described(name, self._place(name)) for name in names] if detail else names

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(os.stat(self._place(path)).st_mtime, tz=UTC)

    def created(self, path: str) -> datetime:
        """The mount knows of no other time."""
        return self.modified(path)

    @staticmethod
    def _described(name: str, place: str) -> dict[str, Any]:
        try:
            found = os.stat(place)
        except FileNotFoundError:
            # A link that leads nowhere exists all the same.
            found = os.lstat(place)
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

    # -- calls that would change something

    def _refuse(self, path: Any, *_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    mkdir = makedirs = rmdir = _rm = rm_file = cp_file = touch = pipe_file = put_file = _refuse
