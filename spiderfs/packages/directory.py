"""Packages as files at the source: the only thing that a mount ever writes there.

All packages lie in one directory in the source's root. No mount shows that directory (`views/tree.py`). A package is
written under a temporary name, synced and renamed, so a name that ends in `.package` belongs to a whole package, and
what a crash has left behind is removed later. Several mounts may share the directory: each of them may find that a
package is gone, and each leaves the packages of the others alone. The directory and its packages must belong to this
user, and nobody else may have the right to write to them.

All calls block: make them in threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from spiderfs.packages.format import KEY_BYTES
from spiderfs.sources.source import SourceStat

DIRECTORY = b".spiderfs-packages"
_TEMPORARY = b".new-"
# An older temporary file is written by no mount any more.
_ABANDONED_S = 3600.0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def package_key(path: Path) -> bytes:
    """The key in a file. If there is no key of the right length, a new one is drawn and written; raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) == KEY_BYTES:
            return key
    key, temporary = secrets.token_bytes(KEY_BYTES), path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(key)
    temporary.rename(path)
    return key


def is_ours(found: SourceStat | os.stat_result) -> bool:
    """Whether a directory or file belongs to this user, and nobody else may write to it."""
    mode, uid = (found.mode, found.uid) if isinstance(found, SourceStat) else (found.st_mode, found.st_uid)
    return uid == os.geteuid() and not mode & _OTHERS_WRITE and (stat.S_ISDIR(mode) or stat.S_ISREG(mode))


class PackageDirectory:
    """Writes and removes packages at one source; each call raises OSError.

    `root_fd` is a descriptor of the source's root. The key lies in `key_file` (`package_key`).
    """

    def __init__(self, root_fd: int, key_file: Path) -> None:
        self._root_fd = root_fd
        self._key_file = key_file

    @cached_property
    def key(self) -> bytes:
        return package_key(self._key_file)

    def write(self, name: bytes, package: bytes) -> None:
        """Write a package, as a whole or not at all."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(DIRECTORY, 0o700, dir_fd=self._root_fd)
        with self._opened() as directory:
            # A package may hold files that not everybody may read.
            os.fchmod(directory, 0o700)
            temporary = _TEMPORARY + b"%d-%d-" % (os.getpid(), time.monotonic_ns()) + name
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(package)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=directory)
                raise
            os.fsync(directory)

    def remove(self, name: bytes) -> None:
        """Remove a package if it exists."""
        with contextlib.suppress(FileNotFoundError), self._opened() as directory:
            os.unlink(name, dir_fd=directory)

    def clean(self) -> int:
        """Remove the temporary files that crashes have left; returns their number."""
        removed = 0
        with contextlib.suppress(FileNotFoundError), self._opened() as directory:
            for name in map(os.fsencode, os.listdir(directory)):
                if name.startswith(_TEMPORARY):
                    with contextlib.suppress(FileNotFoundError):
                        if time.time() - os.stat(name, dir_fd=directory).st_mtime > _ABANDONED_S:
                            os.unlink(name, dir_fd=directory)
                            removed += 1
        return removed

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(DIRECTORY, flags, dir_fd=self._root_fd)
        try:
            if not is_ours(os.fstat(fd)):
                raise PermissionError(errno.EPERM, f"{os.fsdecode(DIRECTORY)} there is another user's: delete it")
            yield fd
        finally:
            os.close(fd)
