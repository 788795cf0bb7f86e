"""The texts of open control files, one file for each handle, in a directory that all workers of a mount share.

A snapshot makes that one reader sees one state, whichever worker answers each of its reads. All snapshots together have
one limit in number and in bytes: any user of the mount may open control files, and a list can take gigabytes of the
cache's disk, which the capacity does not count. Of that, each user but the mount's own and root has a share, and all of
them together have one, so no one keeps others from reading. The manager writes few lists at a time
(`daemon/control/commands.py`), so the bytes exceed the limit by `_LOOK_AGAIN_BYTES` for each of these at most.

Where the disk has no room, a worker keeps a short text in memory. Another worker, which cannot see it, asks the manager
again.

A snapshot has another name until it is complete: no reader has the handle yet, and so none would ever close it if its
worker died. The next process of this worker removes it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import time
from typing import Self

from spiderfs.errors import NoRoom, SpiderfsError, TryAgain
from spiderfs.shared.layout import RunLayout

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
                raise self._refusal(TryAgain(f"{len(sizes)} of them are open: close some, and try again"))
            if sum(sizes) >= share * MAX_BYTES:
                taken = f"those that are open take {sum(sizes)} bytes of the cache's disk"
                raise self._refusal(NoRoom(f"{taken}: close some, and try again"))

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

    # -- what was written to a control file, and is not a whole line yet

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

    def _refusal(self, error: SpiderfsError) -> SpiderfsError:
        """Log a warning, at most one in `_WARNING_INTERVAL_S`, for a reader sees only an errno; returns the error."""
        now_s = time.monotonic()
        if now_s - self._warned_at_s >= _WARNING_INTERVAL_S:
            self._warned_at_s = now_s
            log.warning("a control file cannot be opened, for %s", error)
        return error


class Snapshot:
    """Writes a text to a file piece by piece: all of it, or no file.

    Where the disk has no room for it, a short text is left in memory; for a long one NoRoom is raised.
    """

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
            self._write(self._file, piece)
        if self._file is None:
            if self._in_memory is None or len(self._in_memory) + len(piece) > _UNWRITTEN_BYTES:
                raise NoRoom(f"no room for a list of more than {_UNWRITTEN_BYTES} bytes in {self._path.parent}")
            self._in_memory += piece

    def _write(self, file: io.FileIO, piece: bytes) -> None:
        before = file.tell()
        try:
            rest = memoryview(piece)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._in_memory = bytearray(self._path.read_bytes()[:before])
            self._give_file_up()
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
