"""The control files under MOUNTPOINT/.spiderfs, as a worker shows them.

**A read.** At the open, the worker asks the manager for the text, through the control channel
(`daemon/control/channel.py`). The manager's table (`daemon/control/commands.py`) renders it, from the status of the
components or for a list of any length from the store (`daemon/control/texts.py`), and sends it in pieces. The worker
writes these to the snapshot of the handle (`Snapshots`), which answers each read until the kernel releases the handle.
So a list of millions of lines takes room on the disk and none in memory. `log` alone is live: its handle reads the file
that the manager writes.

**A write.** The worker sends complete lines to the manager, whose table acts on them; a refusal is the writer's error.

**A handle**: the top bit marks a control file, the next one that it was opened to be written; then come the file's
index in FILES, and 48 random bits that name the snapshot.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import trio

from spiderfs import errors
from spiderfs.shared.layout import RunLayout
from spiderfs.sources.source import FIRST_INODE

log = logging.getLogger(__name__)

# More than anybody needs at a time; the list of what is cached may have 25 million lines of some 80 bytes.
MAX_SNAPSHOTS, MAX_BYTES = 256, 2 << 30
# How much of both one other user may take, and all of them together.
_SHARE, _SHARES = 0.25, 0.75
# A snapshot that grows by these bytes compares all of them with the limit again: 20 us if few are open.
_LOOK_AGAIN_BYTES = 1 << 20
# A worker keeps this many texts in memory at most, each of them at most this long.
_UNWRITTEN_MOST, _UNWRITTEN_BYTES = 16, 1 << 20
# A program that opens control files in a loop must not fill the log.
_WARNING_INTERVAL_S = 60.0


class Snapshots:
    """The texts of open control files, one file for each handle, which all workers share: one reader sees one state.

    Their number and bytes have limits for all, for all users but the mount's own and root, and for each of these. While
    texts are written the bytes exceed it, by `_LOOK_AGAIN_BYTES` for each of the few lists that the manager writes at a
    time. If the disk has no room, a worker keeps a short text in memory; other workers ask the manager again. A
    snapshot has another name until it is complete, by which the worker's next process removes what a death has left.
    """

    def __init__(self, run: RunLayout, owner_uid: int, worker: int) -> None:
        self._run = run
        self._trusted = {0, owner_uid}
        self._worker = worker
        self._unwritten: dict[int, bytes] = {}
        self._warned_at_s = -math.inf
        # Where the disk has broken down, the snapshots stay until the next mount.
        with contextlib.suppress(OSError):
            for path in run.unfinished_snapshots(worker):
                path.unlink()

    def begin(self, handle: int, uid: int) -> Snapshot:
        """A snapshot to be written piece by piece, as `with begin(...) as snapshot`; raises TryAgain, NoRoom."""
        self.check(uid, 1)
        return Snapshot(self, self._run, self._worker, handle, uid)

    def check(self, uid: int, more: int = 0) -> None:
        """Raise TryAgain if `more` snapshots of this user would be too many, NoRoom if all of them are too long."""
        # User and bytes of each snapshot, of all workers; it may be released by now.
        there = []
        for user, path in self._run.snapshots():
            with contextlib.suppress(FileNotFoundError):
                there.append((user, path.stat().st_size))
        limits = [(1.0, [size for _, size in there])]
        if uid not in self._trusted:
            limits.append((_SHARES, [size for user, size in there if user not in self._trusted]))
            limits.append((_SHARE, [size for user, size in there if user == uid]))
        for share, sizes in limits:
            if len(sizes) + more > share * MAX_SNAPSHOTS:
                raise self._refusal(errors.TryAgain(f"{len(sizes)} of them are open: close some, and try again"))
            if sum(sizes) >= share * MAX_BYTES:
                taken = f"those that are open take {sum(sizes)} bytes of the cache's disk"
                raise self._refusal(errors.NoRoom(f"{taken}: close some, and try again"))

    def remember(self, handle: int, text: bytes) -> None:
        """Remember a text that the disk had no room for, in place of the oldest one."""
        # Another worker may have got the release of the oldest one.
        while len(self._unwritten) >= _UNWRITTEN_MOST:
            del self._unwritten[next(iter(self._unwritten))]
        self._unwritten[handle] = text

    def read(self, handle: int, offset: int, size: int) -> bytes | None:
        """A part of the text; None if this worker does not find it."""
        if handle in self._unwritten:
            return self._unwritten[handle][offset : offset + size]
        with contextlib.suppress(FileNotFoundError):
            if (path := self._run.found_snapshot(handle)) is not None:
                with open(path, "rb") as file:
                    file.seek(offset)
                    return file.read(size)
        return None

    def size(self, handle: int) -> int | None:
        """The length of the text; None if this worker does not find it."""
        if handle in self._unwritten:
            return len(self._unwritten[handle])
        # It may be released by now.
        with contextlib.suppress(FileNotFoundError):
            if (path := self._run.found_snapshot(handle)) is not None:
                return path.stat().st_size
        return None

    def remove(self, handle: int) -> None:
        self._unwritten.pop(handle, None)
        # Where the disk has turned read-only, the snapshot stays until the next mount.
        with contextlib.suppress(OSError):
            if (path := self._run.found_snapshot(handle)) is not None:
                path.unlink()

    def carried(self, handle: int) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self._run.snapshot(handle, 0).read_bytes()
        return b""

    def carry(self, handle: int, text: bytes) -> None:
        """Keep a text for the next write, or none at all: control files must work on a full disk more than ever."""
        path = self._run.snapshot(handle, 0)
        try:
            if text:
                path.write_bytes(text)
            else:
                path.unlink(missing_ok=True)
        except OSError:
            path.unlink(missing_ok=True)

    def _refusal(self, error: errors.SpiderfsError) -> errors.SpiderfsError:
        """Log a warning, at most one in `_WARNING_INTERVAL_S`, for a reader sees only an errno; returns the error."""
        now_s = time.monotonic()
        if now_s - self._warned_at_s >= _WARNING_INTERVAL_S:
            self._warned_at_s = now_s
            log.warning("a control file cannot be opened, for %s", error)
        return error


class Snapshot:
    """Writes a text to a file, whole or not at all; without room a short one stays in memory, else NoRoom."""

    def __init__(self, snapshots: Snapshots, run: RunLayout, worker: int, handle: int, uid: int) -> None:
        self._snapshots = snapshots
        self._path = run.unfinished_snapshot(handle, uid, worker)
        self._complete_path = run.snapshot(handle, uid)
        self._handle, self._uid = handle, uid
        self._file: io.FileIO | None = None
        self._in_memory: bytearray | None = None
        self._unchecked_bytes = 0

    def __enter__(self) -> Self:
        try:
            self._file = open(self._path, "xb", buffering=0)
        except OSError:
            self._in_memory = bytearray()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure:
            self._give_file_up()
        elif self._file is not None:
            self._file.close()
            # Where the file has gone with the cache directory, the manager is asked again.
            with contextlib.suppress(OSError):
                self._path.rename(self._complete_path)
        elif self._in_memory is not None:
            self._snapshots.remember(self._handle, bytes(self._in_memory))

    def write(self, piece: bytes) -> None:
        """Add a piece; raises NoRoom."""
        if self._file is not None:
            before, rest = self._file.tell(), memoryview(piece)
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    self._in_memory = bytearray(self._path.read_bytes()[:before])
                self._give_file_up()
        if self._file is None:
            if self._in_memory is None or len(self._in_memory) + len(piece) > _UNWRITTEN_BYTES:
                raise errors.NoRoom(f"no room for a list of more than {_UNWRITTEN_BYTES} bytes in {self._path.parent}")
            self._in_memory += piece
            return
        self._unchecked_bytes += len(piece)
        if self._unchecked_bytes >= _LOOK_AGAIN_BYTES:
            self._unchecked_bytes = 0
            self._snapshots.check(self._uid)

    def _give_file_up(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._path.unlink(missing_ok=True)


CONTROL_DIRECTORY = b".spiderfs"
CONTROL_INODE = 2
# A write of fewer bytes without a line's end is a whole command (echo -n); a longer one is a piece of a list that goes
# on in the next write. Programs that write through stdio(3) do so in pieces of exactly this size.
_COMMAND_BYTES = 4096
# Longer than any path or option.
MAX_LINE_BYTES = 1 << 20


class ControlFile(NamedTuple):
    name: bytes
    mode: int
    help: str


FILES = (
    ControlFile(b"stats.json", 0o444, "all figures of the mount and its training runs; `spiderfs status` shows them"),
    ControlFile(b"metrics", 0o444, "every metric in Prometheus' text format"),
    ControlFile(b"config", 0o600, "every option; write `name=value` to change a live one"),
    ControlFile(b"warm", 0o600, "write paths or globs to fetch them, an empty line to stop; read the progress"),
    ControlFile(b"pin", 0o600, "write paths or globs to pin them; read the number of pinned files"),
    ControlFile(b"unpin", 0o600, "write paths or globs to unpin them; read the last result"),
    ControlFile(b"evict", 0o600, "write paths or globs to evict them; read the last result"),
    ControlFile(
        b"ratio", 0o600, "write the share of the importance section, or `auto`; read the reason for the present one"
    ),
    ControlFile(b"cache", 0o444, "cached records: section, bytes, score, path"),
    ControlFile(b"redirects", 0o444, "current substitutes: job dataset, sample, substitute"),
    ControlFile(b"scores", 0o444, "importance of every scored sample"),
    ControlFile(b"graph", 0o444, "the scorer: radius, neighbours, recall, time per batch"),
    ControlFile(b"epochs", 0o444, "a line of JSON for each epoch of a training run: its time, reads, waits and bytes"),
    ControlFile(b"log", 0o444, "recent accesses; `tail -f` follows them"),
    ControlFile(b"hook", 0o444, "path of the socket for a trainer's hook"),
)
_FIRST_INODE = CONTROL_INODE + 1
# Inodes that each file can have beside its first one; no more than `snapshots.MAX_SNAPSHOTS` are read from.
_FURTHER_INODES = (FIRST_INODE - _FIRST_INODE) // len(FILES) - 1
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
        """Give `take` the text in pieces; raises TryAgain without a manager. `take` may raise no OSError."""

    async def apply(self, name: str, text: bytes) -> None:
        """Act on what was written; raises ConfigError with the reason of a refusal, or TryAgain."""


def is_control_handle(handle: int) -> bool:
    return handle >= _MARK


class Control:
    """Serves the directory; all workers share the snapshots and the log in `run`."""

    def __init__(self, channel: ControlChannel, run: RunLayout, owner_uid: int, worker: int) -> None:
        self._channel, self._run, self._owner_uid = channel, run, owner_uid
        self._snapshots = Snapshots(run, owner_uid, worker)

    @property
    def client_terms(self) -> Path:
        """The file by which clients can read around FUSE (`shared/published.py`)."""
        return self._run.client_terms

    def owns(self, inode: int) -> bool:
        return CONTROL_INODE <= inode < _FIRST_INODE + len(FILES)

    def lookup(self, name: bytes) -> ControlAttributes:
        """The file of this name in the directory; raises NotFound."""
        for index, file in enumerate(FILES):
            if file.name == name:
                return self.getattr(_FIRST_INODE + index)
        raise errors.NotFound(os.fsdecode(name))

    def getattr(self, inode: int) -> ControlAttributes:
        if inode == CONTROL_INODE:
            return ControlAttributes(inode, stat.S_IFDIR | 0o555, 0)
        index = inode - _FIRST_INODE
        size = 0
        if index == _LOG:
            # A growing size is what `tail -f` looks at; asking keeps the manager writing.
            with contextlib.suppress(FileNotFoundError):
                size = self._run.access_log.stat().st_size
            self._want_log()
        return ControlAttributes(inode, stat.S_IFREG | FILES[index].mode, size)

    def readdir(self) -> list[tuple[bytes, ControlAttributes]]:
        return [(file.name, self.getattr(_FIRST_INODE + index)) for index, file in enumerate(FILES)]

    async def open(self, inode: int, flags: int, uid: int) -> int:
        if inode == CONTROL_INODE:
            raise errors.IsADirectory(os.fsdecode(CONTROL_DIRECTORY))
        index = inode - _FIRST_INODE
        file = FILES[index]
        writing = flags & (os.O_WRONLY | os.O_RDWR)
        if writing and not file.mode & 0o200:
            raise errors.ReadOnly(f"{os.fsdecode(file.name)} can only be read")
        if file.mode & 0o200 and uid not in (0, self._owner_uid):
            raise errors.AccessDenied(f"{os.fsdecode(file.name)} belongs to user {self._owner_uid}")
        handle = _MARK | index << _INDEX_SHIFT | secrets.randbits(_INDEX_SHIFT)
        if writing:
            handle |= _WRITING
        if index == _LOG and not writing:
            # The manager writes down what it remembers, and answers nothing.
            await self._channel.render(os.fsdecode(file.name), lambda piece: None)
            self._want_log()
        elif not writing:
            with self._snapshots.begin(handle, uid) as snapshot:
                await self._channel.render(os.fsdecode(file.name), snapshot.write)
        return handle

    async def read(self, handle: int, offset: int, size: int) -> bytes:
        if offset > _LONGEST_BYTES:
            return b""
        if _index(handle) == _LOG:
            return self._read_log(offset, size)
        if (text := self._snapshots.read(handle, offset, size)) is None and not handle & _WRITING:
            return await self._ask_again(handle, offset, size)
        return text or b""

    async def _ask_again(self, handle: int, offset: int, size: int) -> bytes:
        """Read from what the manager says now: there was no room for a snapshot."""
        text = bytearray()

        def take(piece: bytes) -> None:
            text.extend(piece)
            if len(text) >= offset + size:
                raise _Enough

        with contextlib.suppress(_Enough):
            await self._channel.render(_name(handle), take)
        return bytes(text[offset : offset + size])

    async def write(self, handle: int, data: bytes) -> int:
        """Act on the complete lines so far; the piece of a line at the end waits for the next write."""
        name = _name(handle)
        text = self._snapshots.carried(handle) + data
        complete, newline, rest = text.rpartition(b"\n")
        if len(data) < _COMMAND_BYTES:
            complete, rest = text, b""
        if len(rest) > MAX_LINE_BYTES:
            self._snapshots.remove(handle)
            raise errors.InvalidArgument(
                f"a line is longer than {MAX_LINE_BYTES} bytes: write one path, glob or option a line"
            )
        self._snapshots.carry(handle, rest)
        if complete or newline:
            await self._channel.apply(name, complete)
        return len(data)

    async def release(self, handle: int) -> None:
        name = _name(handle)
        rest = self._snapshots.carried(handle) if handle & _WRITING else b""
        self._snapshots.remove(handle)
        if rest:
            await self._channel.apply(name, rest)

    def _read_log(self, offset: int, size: int) -> bytes:
        self._want_log()
        try:
            with open(self._run.access_log, "rb") as file:
                file.seek(offset)
                return file.read(size)
        except FileNotFoundError:
            return b""

    def _want_log(self) -> None:
        with contextlib.suppress(OSError):
            self._run.access_log_wanted.touch()


class ImmutableControl(Control):
    """The directory of an immutable mount, where the kernel opens files without asking (`immutable_filesystem.py`).

    Each look-up of a name gives an inode of its own, which stands for one opening as a handle does in the other mode.
    So no one finds the pages or the text of another opening. Such an inode has no text until someone reads from it.
    The kernel then asks for the size first, because the size that it knows is 0, and that question makes the snapshot.
    When the inode is closed, the kernel forgets it, which stands for RELEASE.
    """

    def __init__(
        self,
        channel: ControlChannel,
        run: RunLayout,
        owner_uid: int,
        worker: int,
        forget_name: Callable[[int, bytes], None],
    ) -> None:
        """`forget_name`: see `Kernel.forget_name`."""
        super().__init__(channel, run, owner_uid, worker)
        self._forget_name = forget_name

    def owns(self, inode: int) -> bool:
        return CONTROL_INODE <= inode < FIRST_INODE

    def lookup(self, name: bytes) -> ControlAttributes:
        found = super().lookup(name)
        return found._replace(inode=self._unused(found.inode))

    def first_inode(self, inode: int) -> int:
        """The inode that a file has in the other mode, for all of its inodes."""
        return inode if inode == CONTROL_INODE else _FIRST_INODE + _index(_handle(inode))

    def getattr(self, inode: int) -> ControlAttributes:
        found = super().getattr(self.first_inode(inode))
        if inode == CONTROL_INODE or _index(_handle(inode)) == _LOG:
            return found._replace(inode=inode)
        return ControlAttributes(inode, found.mode, self._snapshots.size(_handle(inode)) or 0)

    async def begin_reading(self, inode: int, uid: int) -> ControlAttributes:
        """The attributes with the size of the text; the first read makes the snapshot. Raises Busy."""
        handle = _handle(inode)
        if _index(handle) == _LOG:
            # What was logged before can be read without a manager.
            with contextlib.suppress(errors.TryAgain):
                await self._channel.render(_name(handle), lambda piece: None)
        elif self._snapshots.size(handle) is None:
            try:
                with self._snapshots.begin(handle, uid) as snapshot:
                    await self._channel.render(_name(handle), snapshot.write)
            except errors.TryAgain as exc:
                # Python's read() returns None for EAGAIN.
                raise errors.Busy(str(exc)) from exc
            await self._let_go_when_closed(handle)
        return self.getattr(inode)

    async def read_inode(self, inode: int, offset: int, size: int) -> bytes:
        return await self.read(_handle(inode), offset, size)

    async def write_inode(self, inode: int, data: bytes) -> int:
        self.check_writable(inode)
        handle = _handle(inode) | _WRITING
        written = await self.write(handle, data)
        if self._snapshots.size(handle) is not None:
            await self._let_go_when_closed(handle)
        return written

    def check_writable(self, inode: int) -> None:
        """Raises ReadOnly."""
        file = FILES[_index(_handle(inode))]
        if not file.mode & 0o200:
            raise errors.ReadOnly(f"{os.fsdecode(file.name)} can only be read")

    async def forget(self, inode: int) -> None:
        """No one has the inode open, and the kernel does not know it any more."""
        if inode >= _FIRST_INODE + len(FILES):
            await self.release(_handle(inode))
            await self.release(_handle(inode) | _WRITING)

    async def _let_go_when_closed(self, handle: int) -> None:
        """Have the kernel forget the inode as soon as it is closed, and not only when the name is looked up again."""
        name = FILES[_index(handle)].name
        await trio.to_thread.run_sync(self._forget_name, CONTROL_INODE, name, abandon_on_cancel=True)

    def _unused(self, inode: int) -> int:
        """Another inode of the same file. It has no snapshot, so no one reads from it."""
        while True:
            unused = inode + len(FILES) * (1 + secrets.randbelow(_FURTHER_INODES))
            if self._snapshots.size(_handle(unused)) is None:
                return unused


class _Enough(Exception):
    """Nothing more of a text is wanted."""


def _index(handle: int) -> int:
    """Raises InvalidArgument for a handle that no open has given."""
    index = (handle & ~(_MARK | _WRITING)) >> _INDEX_SHIFT
    if index >= len(FILES):
        raise errors.InvalidArgument(f"no control file has the handle {handle:x}")
    return index


def _handle(inode: int) -> int:
    """The handle that names the snapshot of an inode."""
    return _MARK | (inode - _FIRST_INODE) % len(FILES) << _INDEX_SHIFT | inode


def _name(handle: int) -> str:
    return os.fsdecode(FILES[_index(handle)].name)
