"""The control files under MOUNTPOINT/.spiderfs, as a worker shows them.

What they say and do is the manager's affair (`daemon/control/table.py`); a worker asks it through a `ControlChannel`.
What an open answered is kept as a snapshot file until the handle is released, so that one reader sees one state and any
worker can serve any part of it. It is written as the manager says it, so a list of millions of lines needs room on the
disk and none in memory. `log` alone is live: its handle reads the manager's log file.

A handle says everything: the top bit marks a control file, the next one that it was opened to be written, then
comes its index in FILES, then 48 random bits that name the snapshot.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from spiderfs.errors import AccessDenied, InvalidArgument, IsADirectory, NoRoom, NotFound, ReadOnly
from spiderfs.shared.layout import RunLayout

CONTROL_DIRECTORY = b".spiderfs"
CONTROL_INODE = 2
# A write of fewer bytes without a line's end is a whole command (echo -n); a longer one is a piece of a list that goes
# on in the next write. Programs that write through stdio(3) do so in pieces of exactly this size.
_COMMAND_BYTES = 4096
# What a worker keeps in memory of texts that the disk has no room for: each at most so long, and so many of them.
_UNWRITTEN_BYTES, _UNWRITTEN_MOST = 1 << 20, 16


class ControlFile(NamedTuple):
    name: bytes
    mode: int
    help: str


FILES = (
    ControlFile(b"stats", 0o444, "what a person wants to know at a glance"),
    ControlFile(b"stats.json", 0o444, "the same for programs"),
    ControlFile(b"metrics", 0o444, "every metric in Prometheus' text format"),
    ControlFile(b"config", 0o600, "every option; write `name=value` to change one that can be changed live"),
    ControlFile(b"cache", 0o444, "what is cached: section, bytes, score, path"),
    ControlFile(b"warm", 0o600, "write paths or globs and they are fetched now; read the progress"),
    ControlFile(b"evict", 0o600, "write paths or globs and they leave the cache; read the last result"),
    ControlFile(b"redirects", 0o444, "who is given which cached neighbour for which sample, now"),
    ControlFile(b"scores", 0o444, "importance of every scored sample"),
    ControlFile(b"graph", 0o444, "the scorer: radius, neighbours, recall, time per batch"),
    ControlFile(b"plan", 0o444, "what trainers will read: how far they are, how far ahead of them the cache is"),
    ControlFile(b"ratio", 0o600, "share of the importance section and why; write a share to pin it, `auto` to let go"),
    ControlFile(b"log", 0o444, "recent accesses; `tail -f` follows them"),
    ControlFile(b"hook", 0o444, "path of the socket for a trainer's hook"),
    ControlFile(b"version", 0o444, "version of spiderfs"),
)
_FIRST_INODE = CONTROL_INODE + 1
_LOG = next(index for index, file in enumerate(FILES) if file.name == b"log")
_MARK = 1 << 63
_WRITING = 1 << 62
_INDEX_SHIFT = 48
# No file of any file system is as long; what lseek(2) says of further places differs between them.
_LONGEST_BYTES = 1 << 40


class ControlAttributes(NamedTuple):
    inode: int
    mode: int
    size: int


class ControlChannel(Protocol):
    async def render(self, name: str, take: Callable[[bytes], None]) -> None:
        """Hand `take` what reading the control file gives, piece by piece; raises TryAgain while there is no manager.

        What `take` raises ends it; it must be no OSError.
        """

    async def apply(self, name: str, text: bytes) -> None:
        """Act on what was written; raises ConfigError with the reason of a refusal, or TryAgain."""


def is_control_handle(handle: int) -> bool:
    return handle >= _MARK


class Control:
    """Serves the directory; all workers share the snapshots and the log in `run`."""

    def __init__(self, channel: ControlChannel, run: RunLayout, owner_uid: int) -> None:
        self._channel = channel
        self._run = run
        self._owner_uid = owner_uid
        # Texts that this worker has opened without room for a snapshot, by handle; another worker asks again.
        self._unwritten: dict[int, bytes] = {}

    @property
    def client_terms(self) -> Path:
        """Where readers around FUSE learn how to."""
        return self._run.client_terms

    def owns(self, inode: int) -> bool:
        return CONTROL_INODE <= inode < _FIRST_INODE + len(FILES)

    def lookup(self, name: bytes) -> ControlAttributes:
        if name == CONTROL_DIRECTORY:
            return self.getattr(CONTROL_INODE)
        for index, file in enumerate(FILES):
            if file.name == name:
                return self.getattr(_FIRST_INODE + index)
        raise NotFound(os.fsdecode(name))

    def getattr(self, inode: int) -> ControlAttributes:
        if inode == CONTROL_INODE:
            return ControlAttributes(inode, stat.S_IFDIR | 0o555, 0)
        index = inode - _FIRST_INODE
        size = 0
        if index == _LOG:
            # A growing size is what `tail -f` looks at; asking keeps the manager writing.
            size = self._log_bytes()
            self._want_log()
        return ControlAttributes(inode, stat.S_IFREG | FILES[index].mode, size)

    def readdir(self) -> list[tuple[bytes, ControlAttributes, int]]:
        """Name, attributes and position of every control file."""
        return [(file.name, self.getattr(_FIRST_INODE + index), index + 1) for index, file in enumerate(FILES)]

    async def open(self, inode: int, flags: int, uid: int) -> int:
        if inode == CONTROL_INODE:
            raise IsADirectory(os.fsdecode(CONTROL_DIRECTORY))
        index = inode - _FIRST_INODE
        file = FILES[index]
        writing = flags & (os.O_WRONLY | os.O_RDWR)
        if writing and not file.mode & 0o200:
            raise ReadOnly(f"{os.fsdecode(file.name)} can only be read")
        if file.mode & 0o200 and uid not in (0, self._owner_uid):
            raise AccessDenied(f"{os.fsdecode(file.name)} belongs to user {self._owner_uid}")
        handle = _MARK | index << _INDEX_SHIFT | secrets.randbits(_INDEX_SHIFT)
        if writing:
            handle |= _WRITING
        # For the log this makes the manager write down what it remembers; the snapshot then stays unused.
        if index == _LOG and not writing:
            await self._channel.render(os.fsdecode(file.name), lambda piece: None)
            self._want_log()
        elif writing:
            self._keep(handle, b"")
        else:
            with _Snapshot(self._snapshot(handle)) as snapshot:
                await self._channel.render(os.fsdecode(file.name), snapshot.write)
            if snapshot.unwritten is not None:
                # Its release may have gone to another worker.
                while len(self._unwritten) >= _UNWRITTEN_MOST:
                    del self._unwritten[next(iter(self._unwritten))]
                self._unwritten[handle] = bytes(snapshot.unwritten)
        return handle

    async def read(self, handle: int, offset: int, size: int) -> bytes:
        if offset > _LONGEST_BYTES:
            return b""
        path = self._snapshot(handle)
        if _index(handle) == _LOG:
            self._want_log()
            path = self._run.access_log
        elif handle in self._unwritten:
            return self._unwritten[handle][offset : offset + size]
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                return file.read(size)
        except FileNotFoundError:
            if _index(handle) == _LOG or handle & _WRITING:
                return b""
        # There was no room for a snapshot: what the manager says now must do.
        text = bytearray()

        def take(piece: bytes) -> None:
            text.extend(piece)
            if len(text) >= offset + size:
                raise _Enough

        with contextlib.suppress(_Enough):
            await self._channel.render(os.fsdecode(FILES[_index(handle)].name), take)
        return bytes(text[offset : offset + size])

    async def write(self, handle: int, data: bytes) -> int:
        """Act on the complete lines so far; the piece of a line at the end waits for the next write."""
        carried = self._snapshot(handle)
        text = (carried.read_bytes() if carried.exists() else b"") + data
        complete, newline, rest = text.rpartition(b"\n")
        if len(data) < _COMMAND_BYTES:
            complete, rest = text, b""
        self._keep(handle, rest)
        if complete or newline:
            await self._channel.apply(os.fsdecode(FILES[_index(handle)].name), complete)
        return len(data)

    async def release(self, handle: int) -> None:
        if _index(handle) == _LOG:
            return
        self._unwritten.pop(handle, None)
        path = self._snapshot(handle)
        rest = path.read_bytes() if handle & _WRITING and path.exists() else b""
        path.unlink(missing_ok=True)
        if rest:
            await self._channel.apply(os.fsdecode(FILES[_index(handle)].name), rest)

    def _keep(self, handle: int, text: bytes) -> None:
        """Write the snapshot, or none at all: control files must work on a full disk more than ever."""
        try:
            self._snapshot(handle).write_bytes(text)
        except OSError:
            self._snapshot(handle).unlink(missing_ok=True)

    def _snapshot(self, handle: int) -> Path:
        return self._run.snapshot(handle)

    def _want_log(self) -> None:
        with contextlib.suppress(OSError):
            self._run.access_log_wanted.touch()

    def _log_bytes(self) -> int:
        try:
            return self._run.access_log.stat().st_size
        except FileNotFoundError:
            return 0


class _Enough(Exception):
    """Nothing more of a text is wanted."""


class _Snapshot:
    """Writes a text to a file piece by piece: all of it, or no file.

    Where the disk has no room for it, a short text is left in memory; for a long one NoRoom is raised.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO | None = None
        self.unwritten: bytearray | None = None

    def __enter__(self) -> Self:
        try:
            self._file = open(self._path, "xb", buffering=0)
        except OSError:
            self.unwritten = bytearray()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure:
            self._give_up()
        elif self._file is not None:
            self._file.close()

    def write(self, piece: bytes) -> None:
        if self._file is not None:
            before = self._file.tell()
            try:
                rest = memoryview(piece)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    self.unwritten = bytearray(self._path.read_bytes()[:before])
                self._give_up()
        if self._file is None:
            if self.unwritten is None or len(self.unwritten) + len(piece) > _UNWRITTEN_BYTES:
                raise NoRoom(f"no room for a list of more than {_UNWRITTEN_BYTES} bytes in {self._path.parent}")
            self.unwritten += piece

    def _give_up(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._path.unlink(missing_ok=True)


def _index(handle: int) -> int:
    """Raises InvalidArgument for a handle that no open has given."""
    index = (handle & ~(_MARK | _WRITING)) >> _INDEX_SHIFT
    if index >= len(FILES):
        raise InvalidArgument(f"no control file has the handle {handle:x}")
    return index
