"""Recorded accesses on disk: what `-o trace=FILE` writes and `spiderfs simulate` reads.

A trace is a header of 16 bytes (magic, version, bytes per record) and records of 32 bytes, little-endian. Each record
names its kind, so that later kinds can stand beside the accesses; readers skip the kinds they do not know. A last
record cut short by a crash is ignored by the reader and overwritten by a writer that goes on with the file.

People may bring their own as text: one `key size` per line, the key any word, the size in bytes; `#` starts a comment.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spiderfs.core.policy import Key
from spiderfs.core.replay import Accesses
from spiderfs.errors import SpiderfsError, UsageError

MAGIC = b"SPIDERTR"
VERSION = 1
HEADER = struct.Struct("<8sHHI")
RECORD = np.dtype(
    [
        ("time_s", "<f8"),
        ("key", "<u8"),
        ("size", "<u8"),
        ("block", "<u4"),
        ("kind", "u1"),
        ("served", "u1"),
        ("spare", "<u2"),
    ]
)
RECORD_FIELDS = struct.Struct("<dQQIBBH")

# 128 KiB of records: one write per some seconds of training, and little to lose in a crash.
BUFFERED_RECORDS = 4096


class Kind(IntEnum):
    OPEN = 0
    """A sample (a small file) was opened."""
    BLOCK = 1
    """A block of a large file was read."""


class TraceWriter:
    """Appends to a trace file; one that exists is gone on with if it is a trace, and refused if it is not.

    May block on the disk. Raises UsageError when it cannot begin, SpiderfsError when it cannot go on.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._buffer = bytearray()
        try:
            # Opening to append creates the file without emptying one that exists.
            with self._path.open("ab"):
                pass
            # Unbuffered: what has been flushed here survives the process.
            self._file = self._path.open("r+b", buffering=0)
            try:
                self._begin()
            except (OSError, UsageError):
                self._file.close()
                raise
        except OSError as exc:
            raise UsageError(f"cannot record a trace to {self._path}: {exc.strerror}") from exc

    def append(
        self, time_s: float, key: int, size: int, kind: Kind = Kind.OPEN, block: int = 0, served: bool = False
    ) -> None:
        """Record one access; `served` means without waiting for the source, times count from any fixed moment."""
        self._buffer += RECORD_FIELDS.pack(time_s, key, size, block, kind, served, 0)
        if len(self._buffer) >= BUFFERED_RECORDS * RECORD.itemsize:
            self.flush()

    def flush(self) -> None:
        try:
            while self._buffer:
                del self._buffer[: self._file.write(self._buffer)]
        except OSError as exc:
            raise SpiderfsError(f"cannot go on recording to {self._path}: {exc.strerror}") from exc

    def close(self) -> None:
        """Flush and let go of the file; idempotent."""
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            self._file.close()

    def _begin(self) -> None:
        size = self._file.seek(0, io.SEEK_END)
        if size == 0:
            self._file.write(HEADER.pack(MAGIC, VERSION, RECORD.itemsize, 0))
            return
        self._file.seek(0)
        _check_header(self._file.read(HEADER.size), self._path)
        self._file.truncate(size - (size - HEADER.size) % RECORD.itemsize)
        self._file.seek(0, io.SEEK_END)


@dataclass(frozen=True, slots=True)
class Trace:
    """All records of a trace, of whatever kinds; `records` has the fields of RECORD."""

    records: NDArray[np.void]
    recorded: bool
    """Whether spiderfs recorded it: a text trace knows neither times nor what was served."""

    def served_ratio(self) -> float:
        """Share of accesses that did not wait for the source while the trace was recorded."""
        accesses = self._accesses()
        return float(np.mean(accesses["served"])) if len(accesses) else 0.0

    def accesses(self) -> Accesses:
        accesses = self._accesses()
        keys: list[Key] = accesses["key"].tolist()
        for index in np.flatnonzero(accesses["kind"] == Kind.BLOCK).tolist():
            keys[index] = (keys[index], int(accesses["block"][index]))
        return Accesses.of(keys, accesses["size"].tolist())

    def _accesses(self) -> NDArray[np.void]:
        return self.records[np.isin(self.records["kind"], (Kind.OPEN, Kind.BLOCK))]


def read_trace(path: str | Path) -> Trace:
    """A trace recorded by spiderfs, or one in text; raises UsageError for any other file."""
    try:
        content = Path(path).read_bytes()
    except OSError as exc:
        raise UsageError(f"cannot read the trace {path}: {exc.strerror}") from exc
    if not content.startswith(MAGIC):
        return Trace(_from_text(content, path), recorded=False)
    _check_header(content[: HEADER.size], path)
    count = (len(content) - HEADER.size) // RECORD.itemsize
    return Trace(np.frombuffer(content, RECORD, count, HEADER.size), recorded=True)


def _check_header(header: bytes, path: str | Path) -> None:
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise UsageError(f"{path} is not a trace: name a new file, or one that spiderfs recorded")
    _, version, record_bytes, _ = HEADER.unpack(header)
    if (version, record_bytes) != (VERSION, RECORD.itemsize):
        raise UsageError(f"{path} is a trace of version {version}, and this spiderfs knows version {VERSION}")


def _from_text(content: bytes, path: str | Path) -> NDArray[np.void]:
    numbers: dict[bytes, int] = {}
    keys: list[int] = []
    sizes: list[int] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        words = line.split(b"#", 1)[0].split()
        if not words:
            continue
        if len(words) != 2 or not words[1].isdigit() or len(words[1]) > 18:
            raise UsageError(f"{path} is not a trace: line {number} is not `key size`, a word and a number of bytes")
        keys.append(numbers.setdefault(words[0], len(numbers)))
        sizes.append(int(words[1]))
    records = np.zeros(len(keys), RECORD)
    records["key"] = keys
    records["size"] = sizes
    return records
