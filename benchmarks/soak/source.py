"""The source of a soak: the module makes the changes of the schedule and keeps the history of all contents."""

from __future__ import annotations

import io
import mmap
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.soak.contents import CELL_BYTES, Held, History, Key, Segment, State, cells
from benchmarks.soak.schedule import ARCHIVE, File

_PAGE = 4096
_PACKED_S = 1_700_000_000
# The first write to a mapped page sets the mtime, so each page is a change of its own.
_MOST_PAGES = 48


class Source:
    """The directory of a source; `lock` guards `history`, and only the thread that makes changes uses all else."""

    def __init__(self, root: Path, beside: Path, files: list[File]) -> None:
        self.root = root
        self.files = {file.number: file for file in files}
        self.history = History({file.number: file.label for file in files})
        self.lock = threading.Lock()
        self._beside = beside
        self._version = 0
        self._changing_since: float | None = None
        for file in files:
            if not file.is_archived:
                self._path(file.number).parent.mkdir(exist_ok=True, parents=True)
                self._replace(file.number, {"size": file.size})
        self._pack([file for file in files if file.is_archived])

    def _pack(self, members: list[File]) -> None:
        if not members:
            return
        with tarfile.open(self.root / ARCHIVE, "w") as tar:
            for file in members:
                member = tarfile.TarInfo(file.path.partition("/")[2])
                member.size, member.mtime = file.size, _PACKED_S
                with self._changing(self._fresh(file.number, file.size)) as held:
                    tar.addfile(member, io.BytesIO(held.state.read(0, file.size)))
                    held.key = Key(file.size, _PACKED_S * 10**9)
        os.utime(self.root / ARCHIVE, (_PACKED_S, _PACKED_S))

    def settled_until(self) -> float:
        """The time until which the history is complete; reads that ended before it can be judged."""
        with self.lock:
            return time.monotonic() if self._changing_since is None else self._changing_since

    def change(self, kind: str, arguments: dict[str, Any]) -> None:
        number = arguments["file"]
        if not self.history.now(number).state.is_there and kind != "delete":
            kind = "replace"
        _CHANGES[kind](self, number, arguments)

    # -- the changes

    def _replace(self, number: int, given: dict[str, Any]) -> None:
        self._put(number, self._fresh(number, given["size"]))

    def _delete(self, number: int, given: dict[str, Any]) -> None:
        if self.history.now(number).state.is_there:
            with self._changing(State(number, -1)):
                self._path(number).unlink()

    def _overwrite(self, number: int, given: dict[str, Any]) -> None:
        self._write_pieces(number, *self._part(number, given), given, _pwrite)

    def _map(self, number: int, given: dict[str, Any]) -> None:
        start, stop = self._part(number, given)
        start -= start % _PAGE
        stop = min(stop, start + _MOST_PAGES * _PAGE)
        self._write_pieces(number, start, stop, given | {"pause_s": 0}, _mapped)

    def _append(self, number: int, given: dict[str, Any]) -> None:
        size = self.history.now(number).state.size
        start = size - size % CELL_BYTES
        self._write_pieces(number, start, start + CELL_BYTES + given["size"] // 4, given, _pwrite)

    def _truncate(self, number: int, given: dict[str, Any]) -> None:
        before = self.history.now(number).state
        self._resize(number, before.cut(int(before.size * given["begin"])))

    def _lengthen(self, number: int, given: dict[str, Any]) -> None:
        before = self.history.now(number).state
        if odd := before.size % CELL_BYTES:
            before = before.cut(before.size - odd)
            self._resize(number, before)
        self._resize(number, before.cut(before.size + given["size"] // 4))

    def _old_mtime(self, number: int, given: dict[str, Any]) -> None:
        self._touch(number, time.time_ns() - int(given["age_s"] * 1e9))

    def _future_mtime(self, number: int, given: dict[str, Any]) -> None:
        self._touch(number, time.time_ns() + int(given["age_s"] * 1e9))

    def _kept_mtime(self, number: int, given: dict[str, Any]) -> None:
        now = self.history.now(number)
        assert now.key is not None
        self._put(number, self._fresh(number, now.state.size), now.key.mtime_ns)

    # -- how they are made

    def _fresh(self, number: int, size: int) -> State:
        self._version += 1
        return State(number, size, (Segment(size, self._version),) if size else ())

    def _put(self, number: int, state: State, mtime_ns: int | None = None) -> None:
        """Replace the file by a new one with the same name."""
        self._beside.write_bytes(state.read(0, state.size))
        if mtime_ns is not None:
            os.utime(self._beside, ns=(mtime_ns, mtime_ns))
        with self._changing(state) as held:
            os.rename(self._beside, self._path(number))
            held.key = _key(os.stat(self._path(number)))

    def _resize(self, number: int, after: State) -> None:
        with self._changing(after, in_place=True) as held:
            os.truncate(self._path(number), after.size)
            held.key = _key(os.stat(self._path(number)))

    def _touch(self, number: int, mtime_ns: int) -> None:
        with self._changing(self.history.now(number).state) as held:
            os.utime(self._path(number), ns=(mtime_ns, mtime_ns))
            held.key = _key(os.stat(self._path(number)))

    def _part(self, number: int, given: dict[str, Any]) -> tuple[int, int]:
        """The part of the file to write: from the start of a cell to the end of a cell or of the file."""
        size = self.history.now(number).state.size
        start = _rounded(int(size * given["begin"]))
        stop = start + _rounded(int((size - start) * given["length"])) + CELL_BYTES
        return start, min(stop, size)

    def _write_pieces(
        self,
        number: int,
        start: int,
        stop: int,
        given: dict[str, Any],
        write: Callable[[int, int, bytes], None],
    ) -> None:
        self._version += 1
        version = self._version
        share = -(-(stop - start) // given["pieces"])
        length = _PAGE if write is _mapped else max(CELL_BYTES, _rounded(share + CELL_BYTES - 1))
        with open(self._path(number), "r+b", buffering=0) as file:
            for at in range(start, stop, length):
                end = min(at + length, stop)
                after = self.history.now(number).state.written(at, end, version)
                with self._changing(after, in_place=True) as held:
                    write(file.fileno(), at, cells(number, version, at, end))
                    held.key = _key(os.fstat(file.fileno()))
                if given["pause_s"]:
                    time.sleep(given["pause_s"])

    @contextmanager
    def _changing(self, state: State, in_place: bool = False) -> Iterator[Held]:
        """The time of a change: from before any reader can see the new state until its size and mtime are known."""
        with self.lock:
            self._changing_since = time.monotonic()
            held = self.history.begin(state, self._changing_since, in_place)
        try:
            yield held
        finally:
            with self.lock:
                self.history.complete(held, time.monotonic())
                self._changing_since = None

    def _path(self, number: int) -> Path:
        return self.root / self.files[number].path


_CHANGES: dict[str, Callable[[Source, int, dict[str, Any]], None]] = {
    "replace": Source._replace,
    "overwrite": Source._overwrite,
    "map": Source._map,
    "append": Source._append,
    "truncate": Source._truncate,
    "lengthen": Source._lengthen,
    "delete": Source._delete,
    "old mtime": Source._old_mtime,
    "future mtime": Source._future_mtime,
    "kept mtime": Source._kept_mtime,
}


def _rounded(offset: int) -> int:
    return offset - offset % CELL_BYTES


def _key(found: os.stat_result) -> Key:
    return Key(found.st_size, found.st_mtime_ns)


def _pwrite(descriptor: int, at: int, data: bytes) -> None:
    # All bytes must go in one call, because each call sets the mtime again.
    assert os.pwrite(descriptor, data, at) == len(data)


def _mapped(descriptor: int, at: int, data: bytes) -> None:
    first = at - at % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(descriptor, at - first + len(data), offset=first) as mapped:
        mapped[at - first :] = data
