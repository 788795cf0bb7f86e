"""A source that lives in memory."""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter, deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace

import xxhash

from spiderfs.errors import SourceChanged, SourceError, SourceNotADirectory, SourceNotFound, SourceUnavailable
from spiderfs.sources.source import UNKNOWN, SourceStat, Version

_FIRST_MTIME_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True)
class _Entry:
    mode: int
    content: bytes  # a file's bytes, a link's text, nothing for a directory
    mtime_ns: int
    xattrs: dict[str, bytes] = field(default_factory=dict)
    tag: int = 0

    def stat(self) -> SourceStat:
        return SourceStat(self.mode, 0, 0, len(self.content), self.mtime_ns, tag=self.tag)


class MemorySource:
    """A tree that is built with `add*`, and altered with `change` and `remove`, while it is being read.

    Parent directories come into being with their first entry. `calls` counts the calls by method name, and `fail_next`
    queues errors for the calls to come. With `tagged` it is like an object store: files have tags that follow from
    their bytes, and directories are undated.
    """

    def __init__(self, tagged: bool = False) -> None:
        self.undated_directories = self._tagged = tagged
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._clock_ns = _FIRST_MTIME_NS
        self._failures: deque[SourceError] = deque()
        self._entries: dict[bytes, _Entry] = {b"": _Entry(stat.S_IFDIR | 0o755, b"", _FIRST_MTIME_NS)}
        self._children: dict[bytes, set[bytes]] = {b"": set()}
        self._broken: set[bytes] = set()

    def add(self, path: bytes, content: bytes = b"", *, mtime_ns: int | None = None) -> SourceStat:
        """Put a regular file there, in place of whatever was."""
        return self._put(path, stat.S_IFREG | 0o644, content, mtime_ns)

    def add_directory(self, path: bytes) -> SourceStat:
        return self._put(path, stat.S_IFDIR | 0o755, b"", None)

    def add_symlink(self, path: bytes, target: bytes) -> SourceStat:
        return self._put(path, stat.S_IFLNK | 0o777, target, None)

    def change(self, path: bytes, content: bytes) -> SourceStat:
        """Give an existing file new bytes and with them a new version."""
        if path not in self._entries:
            raise KeyError(path)
        return self.add(path, content)

    def remove(self, path: bytes) -> None:
        """Remove an entry and all that lies below it."""
        with self._lock:
            parent, _, name = path.rpartition(b"/")
            self._children[parent].remove(name)
            self._forget(path)
            self._touch(parent)

    def set_xattr(self, path: bytes, name: str, value: bytes) -> None:
        with self._lock:
            entry = self._entries[path]
            self._entries[path] = replace(entry, xattrs={**entry.xattrs, name: value})

    def set_mtime(self, path: bytes, mtime_ns: int) -> None:
        with self._lock:
            self._entries[path] = replace(self._entries[path], mtime_ns=mtime_ns)

    def break_entry(self, path: bytes) -> None:
        """Have the source list an entry of which it says nothing else, as of a mount that is dead."""
        self._broken.add(path)

    def mend_entry(self, path: bytes) -> None:
        self._broken.discard(path)

    def fail_next(self, *errors: SourceError) -> None:
        """Have the next calls raise these, one each."""
        self._failures.extend(errors)

    def stat(self, path: bytes) -> SourceStat:
        return self._called("stat", path).stat()

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        directory = self._called("scan", path)
        if not stat.S_ISDIR(directory.mode):
            raise SourceNotADirectory(f"{os.fsdecode(path)}: Not a directory")
        with self._lock:
            found = [(b".", directory.stat())]
            below = [(name, _join(path, name)) for name in self._children[path]]
            found += [(name, UNKNOWN if at in self._broken else self._entries[at].stat()) for name, at in below]
        yield from found

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        entry = self._called("read", path)
        if not stat.S_ISREG(entry.mode) or entry.stat().version != version:
            raise SourceChanged(f"{os.fsdecode(path)}: no longer the version that was asked for")
        return entry.content[offset : offset + length]

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        entry = self._called("read_present", path)
        if not stat.S_ISREG(entry.mode) or len(entry.content) > most_bytes:
            raise SourceChanged(f"{os.fsdecode(path)}: no file of up to {most_bytes} bytes")
        return entry.stat(), entry.content

    def readlink(self, path: bytes) -> bytes:
        entry = self._called("readlink", path)
        if not stat.S_ISLNK(entry.mode):
            raise SourceChanged(f"{os.fsdecode(path)}: no longer a symbolic link")
        return entry.content

    def listxattr(self, path: bytes) -> list[str]:
        return list(self._called("listxattr", path).xattrs)

    def getxattr(self, path: bytes, name: str) -> bytes | None:
        return self._called("getxattr", path).xattrs.get(name)

    def statvfs(self) -> os.statvfs_result:
        self._called("statvfs", b"")
        # In the order of statvfs(3): 1 GiB in blocks of 4 KiB, all of it free.
        return os.statvfs_result((4096, 4096, 1 << 18, 1 << 18, 1 << 18, 1 << 20, 1 << 20, 1 << 20, os.ST_RDONLY, 255))

    def close(self) -> None:
        """Nothing is held open."""

    def _called(self, method: str, path: bytes) -> _Entry:
        with self._lock:
            self.calls[method] += 1
            if self._failures:
                raise self._failures.popleft()
            if path in self._broken:
                raise SourceUnavailable(f"{os.fsdecode(path)}: Transport endpoint is not connected")
            entry = self._entries.get(path)
            if entry is not None:
                return entry
            above = path.rpartition(b"/")[0]
            while above not in self._entries:
                above = above.rpartition(b"/")[0]
            if stat.S_ISDIR(self._entries[above].mode):
                raise SourceNotFound(f"{os.fsdecode(path)}: No such file or directory")
            raise SourceNotADirectory(f"{os.fsdecode(path)}: Not a directory")

    def _put(self, path: bytes, mode: int, content: bytes, mtime_ns: int | None) -> SourceStat:
        with self._lock:
            parent = self._make_directory(path.rpartition(b"/")[0])
            self._forget(path)
            self._children[parent].add(path.rpartition(b"/")[2])
            self._touch(parent)
            if stat.S_ISDIR(mode):
                self._children[path] = set()
            tag = xxhash.xxh3_64_intdigest(content) if self._tagged and stat.S_ISREG(mode) else 0
            entry = _Entry(mode, content, self._now() if mtime_ns is None else mtime_ns, tag=tag)
            self._entries[path] = entry
            return entry.stat()

    def _make_directory(self, path: bytes) -> bytes:
        if path not in self._entries:
            parent = self._make_directory(path.rpartition(b"/")[0])
            self._children[parent].add(path.rpartition(b"/")[2])
            self._children[path] = set()
            self._entries[path] = _Entry(stat.S_IFDIR | 0o755, b"", 0 if self.undated_directories else self._now())
        assert path in self._children, f"{path!r} is not a directory"
        return path

    def _forget(self, path: bytes) -> None:
        for name in self._children.pop(path, set()):
            self._forget(_join(path, name))
        self._entries.pop(path, None)

    def _touch(self, directory: bytes) -> None:
        if self.undated_directories:
            return
        self._entries[directory] = replace(self._entries[directory], mtime_ns=self._now())

    def _now(self) -> int:
        """A time that moves on with every change, so that no two versions share one."""
        self._clock_ns += 1_000_000
        return self._clock_ns


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name
