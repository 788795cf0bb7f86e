"""Traces: the files of recorded accesses that `-o trace=FILE` writes and `spiderfs simulate` reads.

A trace is a stream of msgpack maps. The first is the header: "format", "version", and "options", a number for the
mount's options. Each other map has a "kind" and a time "t", in seconds since any fixed moment:
- "accesses": up to ROWS of them, as packed columns (`ACCESS`); a column that has its usual values is left out;
- a kind of EVENTS: one hint, one message about a rank's plan (both `core/events.py`), or one batch that was scored. A
  replay decides by the same hints, or scores the batches again (`spiderfs/simulation.py`).
An event comes before the accesses that follow it. Readers skip kinds and names that they do not know. A crash may cut
the last map short: a reader ignores it, and a writer that continues the file overwrites it.

Users may also write a trace by hand, as text: one line `key size` for each access, where the key is any word and the
size is in bytes; `#` starts a comment.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, get_args

import msgpack
import numpy as np
from numpy.typing import NDArray

from spiderfs.core.events import Candidates, Epoch, Hint, Planned, RankNews
from spiderfs.core.policy import Key
from spiderfs.errors import SpiderfsError, UsageError
from spiderfs.linux import steady_clock

FORMAT, VERSION = "spiderfs trace", 3
# The first bytes of every trace, and of those of the versions that had records of fixed size.
MAGIC, _OLD_MAGIC = b"\x83" + msgpack.packb("format") + msgpack.packb(FORMAT), b"SPIDERTR"

# The columns of accesses. `given` is what the reader got: another sample, if a substitute was served. `unoffered`: the
# engine was not notified, because the bytes were not stored; `unseen`: by `read_unseen`, as the kernel had the bytes.
ACCESS = np.dtype(
    [("time_s", "<f8")]
    + [(name, "<u8") for name in ("key", "size", "block", "given", "given_size", "job_dataset")]
    + [(name, "u1") for name in ("served", "unoffered", "unseen")]
)
_ROW = struct.Struct("<d6Q3B")
_COLUMNS = [name for name in ACCESS.names or () if name != "time_s"]
# The usual values of a column are those of another one, or zeros.
_SAME_AS = {"given": "key", "given_size": "size"}
# Accesses in a map, at most: about 60 KiB, so a crash loses some seconds of training.
ROWS = 4096
# A batch of embeddings may be long; what waits is written once it is longer than this.
_BUFFER_BYTES = 1 << 17

# The largest size of one file, and of all accesses together, that a trace may have: larger ones mean a damaged trace.
MOST_BYTES, _MOST_BYTES_IN_ALL = 1 << 50, 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class TracedBatch:
    """A batch: the inodes of the samples whose bytes were served, with their embeddings and losses; one row each.

    A trace has the half precision in which the trainer sent it: with 64 dimensions and a loss a sample takes 138 bytes.
    `goes_on` means that it was scored together with the batch before it.
    """

    job_dataset_id: str
    inodes: NDArray[np.uint64]
    embeddings: NDArray[np.floating]
    losses: NDArray[np.floating] | None
    goes_on: bool = False


Event = Hint | RankNews | TracedBatch

# A kind has the name of its class; which sample of a batch becomes its hub is for a replay to decide.
EVENTS: Mapping[str, type[Event]] = {
    event.__name__: event for event in (*get_args(Hint), *get_args(RankNews), TracedBatch) if event is not Candidates
}
_FIELDS_OF = {kind: [field.name for field in fields(event)] for kind, event in EVENTS.items()}


class _Field(NamedTuple):
    """How a field is packed and unpacked; `unpack` raises ValueError or TypeError for what no writer writes."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def _array(dtype: str, fits: Callable[[NDArray[Any]], Any] = lambda values: True) -> _Field:
    def unpack(packed: bytes) -> list[Any]:
        values = np.frombuffer(packed, dtype)
        if not np.all(fits(values)):
            raise ValueError("no such number")
        found: list[Any] = values.tolist()
        return found

    return _Field(lambda values: np.asarray(values, dtype).tobytes(), unpack)


def _one(kind: type, fits: Callable[[Any], bool] = lambda value: True, optional: bool = False) -> _Field:
    def unpack(value: Any) -> Any:
        if value is None and optional:
            return None
        if type(value) is not kind or not fits(value):
            raise ValueError("no such value")
        return value

    return _Field(lambda value: value if value is None else kind(value), unpack)


_INODES, _FLAG = _array("<u8"), _one(bool)
_COUNT = _one(int, lambda value: 0 <= value <= MOST_BYTES)
_INODE = _one(int, lambda value: 0 <= value < 1 << 64)
_LABELS = _array("<i8")
_KEY = _Field(
    lambda key: [*key] if isinstance(key, tuple) else key,
    lambda key: tuple(map(_INODE.unpack, key)) if isinstance(key, list) else _INODE.unpack(key),
)
_FIELDS: Mapping[str, _Field] = {
    "job_dataset_id": _Field(int, lambda number: str(_COUNT.unpack(number))),
    "key": _KEY,
    **dict.fromkeys(("keys", "neighbours"), _INODES),
    "scores": _array("<f8", lambda values: np.isfinite(values) & (values > 0)),
    "distances": _array("<f8", lambda values: np.isfinite(values) & (values >= 0)),
    "labels": _Field(
        lambda labels: [_INODES.pack(list(labels)), _LABELS.pack(list(labels.values()))],
        lambda packed: dict(zip(_INODES.unpack(packed[0]), _LABELS.unpack(packed[1]), strict=True)),
    ),
    "ratio": _one(float, lambda value: 0 <= value <= 1),
    "accuracy": _one(float, lambda value: 0 <= value <= 1, optional=True),
    **dict.fromkeys(("active", "begun", "goes_on"), _FLAG),
    **dict.fromkeys(("size", "capacity_bytes", "landing_bytes"), _COUNT),
    **dict.fromkeys(("rank", "epoch", "start", "dispatched", "taken", "position"), _COUNT),
    "inodes": _Field(_INODES.pack, lambda packed: np.frombuffer(packed, "<u8")),
    "embeddings": _Field(
        lambda rows: [rows.shape[1], np.asarray(rows, "<f2").tobytes()],
        lambda packed: np.frombuffer(packed[1], "<f2").reshape(-1, _COUNT.unpack(packed[0])),
    ),
    "losses": _Field(
        lambda losses: None if losses is None else np.asarray(losses, "<f2").tobytes(),
        lambda packed: None if packed is None else np.frombuffer(packed, "<f2"),
    ),
}


class TraceWriter:
    """Appends to a trace file. If the file exists it must be a trace; the writer continues after its last map.

    The methods may block on the disk. The constructor raises UsageError if it cannot begin; the other methods raise
    SpiderfsError if they cannot go on.
    """

    def __init__(self, path: str | Path, options: int = 0) -> None:
        """`options` is a number for the options of the mount, which is not 0; a file with another one is refused."""
        self._path = Path(path)
        self._rows = bytearray()
        self._buffer = bytearray()
        try:
            # Opening a file to append creates it, and does not empty it if it exists.
            with self._path.open("ab"):
                pass
            # Unbuffered: what `flush` has written survives the process.
            self._file = self._path.open("r+b", buffering=0)
            try:
                self._begin(options)
            except (OSError, UsageError):
                self._file.close()
                raise
        except OSError as exc:
            raise UsageError(f"cannot record a trace to {self._path}: {exc.strerror}") from exc

    def _begin(self, options: int) -> None:
        if self._file.seek(0, io.SEEK_END) == 0:
            self._file.write(msgpack.packb({"format": FORMAT, "version": VERSION, "options": options}))
            return
        self._file.seek(0)
        records = _records(self._file, self._path)
        header, end = next(records)
        if options and header.get("options") not in (0, options):
            raise UsageError(
                f"{self._path} is the trace of a mount with another source, capacity or policy, or with other options"
                " of what is cached: name another file with -o trace=FILE, or delete it"
            )
        end = max((end for _, end in records), default=end)
        self._file.truncate(end)
        self._file.seek(end)

    def append(
        self,
        time_s: float,
        key: int,
        size: int,
        block: int = 0,
        served: bool = False,
        list_number: int = 0,
        offered: bool = True,
        unseen: bool = False,
    ) -> None:
        """Record one access; a block of a large file has a number above 0.

        `served` means that the reader did not wait for the source. `offered` is False if the engine was not notified of
        the access, because its bytes were not stored. `unseen` means that the kernel had the bytes. `list_number` is
        the number of the list that the reader has declared, or 0 if the reader may not get a substitute.
        """
        self._put_row(_ROW.pack(time_s, key, size, block, key, size, list_number, served, not offered, unseen))

    def redirect(self, time_s: float, wanted: int, size: int, given: int, given_size: int, list_number: int) -> None:
        """Record one access to the sample `wanted`, for which the reader got the bytes of the substitute `given`."""
        self._put_row(_ROW.pack(time_s, wanted, size, 0, given, given_size, list_number, True, False, False))

    def event(self, time_s: float, event: Event, number_of: Callable[[str], int] = int) -> None:
        """Record a hint, a rank's message or a batch; its keys must be inodes. `number_of` a job dataset is its
        number."""
        kind = type(event).__name__
        record: dict[str, Any] = {"t": time_s, "kind": kind}
        for name in _FIELDS_OF[kind]:
            value = getattr(event, name)
            record[name] = _FIELDS[name].pack(number_of(value) if name == "job_dataset_id" else value)
        self._pack_accesses()
        self._put(msgpack.packb(record))

    def flush(self) -> None:
        self._pack_accesses()
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

    def _put_row(self, row: bytes) -> None:
        self._rows += row
        if len(self._rows) == ROWS * _ROW.size:
            self.flush()

    def _pack_accesses(self) -> None:
        if not self._rows:
            return
        rows = np.frombuffer(bytes(self._rows), ACCESS)
        self._rows.clear()
        first = float(rows["time_s"][0])
        record: dict[str, Any] = {"t": first, "kind": "accesses", "rows": len(rows)}
        record["time_s"] = (rows["time_s"] - first).astype("<f4").tobytes()
        for name in _COLUMNS:
            column = rows[name]
            if (column != (rows[_SAME_AS[name]] if name in _SAME_AS else 0)).any():
                record[name] = column.astype(f"<u{np.min_scalar_type(column.max()).itemsize}").tobytes()
        self._put(msgpack.packb(record))

    def _put(self, packed: bytes) -> None:
        self._buffer += packed
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()


@dataclass(frozen=True, slots=True)
class Accesses:
    """All accesses of a trace, as columns: one row for each, in the order in which they came; the four columns have the
    same length."""

    keys: Sequence[Key]
    sizes: Sequence[int]
    """In bytes."""
    ids: NDArray[np.int64]
    """The number of each key: keys are numbered from 0, in the order of their first access."""
    job_dataset_ids: Sequence[str]
    """The job dataset by which the reader may get a substitute; "" for a reader of no job dataset."""

    @classmethod
    def of(cls, keys: Sequence[Key], sizes: Sequence[int], job_dataset_ids: Sequence[str] | None = None) -> Accesses:
        numbers: dict[Key, int] = {}
        ids = (numbers.setdefault(key, len(numbers)) for key in keys)
        return cls(keys, sizes, np.fromiter(ids, np.int64, len(keys)), job_dataset_ids or [""] * len(keys))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def distinct(self) -> int:
        """Number of different samples and blocks."""
        return int(self.ids.max()) + 1 if len(self) else 0

    @property
    def distinct_bytes(self) -> int:
        """Bytes of all different samples and blocks, each counted once, with the size of its last access."""
        sizes = np.zeros(self.distinct, np.int64)
        sizes[self.ids] = self.sizes
        return int(sizes.sum())


@dataclass(frozen=True, slots=True)
class Trace:
    """All that a trace holds."""

    columns: Mapping[str, NDArray[Any]]
    """The accesses, by the names of ACCESS."""
    events: Sequence[tuple[int, Event]]
    """Each with the number of the access before which it came."""
    recorded: bool
    """Whether spiderfs recorded the trace: a text trace has no times, and not which accesses waited."""

    def served_ratio(self) -> float:
        """The share of the accesses that did not wait for the source while the trace was recorded."""
        served = self.columns["served"]
        return float(np.mean(served)) if len(served) else 0.0

    def accesses(self) -> Accesses:
        keys: list[Key] = self.columns["key"].tolist()
        blocks, job_datasets = self.columns["block"], self.columns["job_dataset"]
        for index in np.flatnonzero(blocks).tolist():
            keys[index] = (keys[index], int(blocks[index]))
        name_of = {number: str(number) for number in np.unique(job_datasets).tolist()} | {0: ""}
        return Accesses.of(keys, self.columns["size"].tolist(), [name_of[number] for number in job_datasets.tolist()])

    def hints(self) -> list[tuple[int, Hint]]:
        """All hints in the trace, in order, each with the number of the access before which it came."""
        return [(before, event) for before, event in self.events if isinstance(event, Hint)]

    def rank_news(self) -> list[tuple[int, RankNews]]:
        """What ranks published of their plans, in order, each with the number of the access before which it came."""
        return [(before, event) for before, event in self.events if isinstance(event, RankNews)]

    @property
    def has_plans(self) -> bool:
        """Whether ranks published plans while the trace was recorded."""
        return any(isinstance(event, Planned) for _, event in self.events)

    @property
    def has_batches(self) -> bool:
        """Whether the trace has batches, which a replay can score again."""
        return any(isinstance(event, TracedBatch) for _, event in self.events)

    def accuracies(self) -> dict[str, list[float]]:
        """For each list, by its number, the accuracies at the ends of its epochs, where they were known."""
        found: dict[str, list[float]] = {}
        for _, event in self.events:
            if isinstance(event, Epoch) and event.accuracy is not None:
                found.setdefault(event.job_dataset_id, []).append(event.accuracy)
        return found


def read_trace(path: str | Path) -> Trace:
    """A trace that spiderfs recorded, or one in text; raises UsageError for any other file."""
    try:
        with open(path, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"the trace {path} is not a regular file: name a file that -o trace=FILE has written")
            recorded = file.peek(len(MAGIC)).startswith((MAGIC, _OLD_MAGIC))
            trace = _recorded(file, path) if recorded else _from_text(file.read(), path)
    except OSError as exc:
        raise UsageError(f"cannot read the trace {path}: {exc.strerror}") from exc
    if any(trace.columns[name].sum(dtype=np.float64) > _MOST_BYTES_IN_ALL for name in ("size", "given_size")):
        raise UsageError(f"the trace {path} is damaged, its sizes add up to too much: record another")
    return trace


def _recorded(file: BinaryIO, path: str | Path) -> Trace:
    parts: dict[str, list[NDArray[Any]]] = {name: [np.empty(0, "u1")] for name in ("time_s", *_COLUMNS)}
    events: list[tuple[int, Event]] = []
    count = 0
    for number, (record, _) in enumerate(_records(file, path)):
        kind: Any = record.get("kind")
        try:
            if kind == "accesses":
                for name, column in _unpacked(record).items():
                    parts[name].append(column)
                count += record["rows"]
            elif kind in EVENTS:
                events.append((count, _event(kind, record)))
            elif number and not isinstance(kind, str):
                raise ValueError("no kind")
        except (ValueError, TypeError, LookupError) as exc:
            raise _damaged(path, number) from exc
    return Trace({name: np.concatenate(parts.pop(name)) for name in ("time_s", *_COLUMNS)}, events, recorded=True)


def _records(file: BinaryIO, path: str | Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The header of a trace and its other maps, each with the offset of its end; raises UsageError."""
    magic = file.read(len(MAGIC))
    file.seek(0)
    # The limits are those of what a writer writes: a damaged length reserves no memory.
    unpacker = msgpack.Unpacker(file, max_buffer_size=0, max_map_len=64, max_array_len=2, max_ext_len=0)
    for number in itertools.count():
        try:
            record = unpacker.unpack() if magic == MAGIC else None
        except msgpack.OutOfData:
            if number:
                return
            record = None
        except (ValueError, msgpack.UnpackException) as exc:
            raise _damaged(path, number) from exc
        if not number:
            header = record or {}
            if not header and not magic.startswith(_OLD_MAGIC):
                raise UsageError(f"{path} is not a trace: name a new file, or one that spiderfs recorded")
            version = header.get("version", "2 or older")
            if version != VERSION:
                raise UsageError(
                    f"{path} is a trace of version {version}, and this spiderfs reads version {VERSION}: record another"
                )
        if not isinstance(record, dict):
            raise _damaged(path, number)
        yield record, unpacker.tell()


def _unpacked(record: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The columns of a map of accesses."""
    rows = record["rows"]
    if type(rows) is not int or not 0 < rows <= ROWS:
        raise ValueError("no number of rows")
    found = {"time_s": float(record["t"]) + np.frombuffer(record["time_s"], "<f4").astype("<f8")}
    for name in _COLUMNS:
        if name in record:
            found[name] = np.frombuffer(record[name], f"<u{len(record[name]) // rows}")
        else:
            found[name] = found[_SAME_AS[name]] if name in _SAME_AS else np.zeros(rows, "u1")
    if any(len(column) != rows for column in found.values()):
        raise ValueError("columns of other lengths")
    if max(found["size"].max(), found["given_size"].max()) > MOST_BYTES:
        raise ValueError("a size beyond all files")
    return found


def _event(kind: str, record: Mapping[str, Any]) -> Event:
    values = {name: _FIELDS[name].unpack(record[name]) for name in _FIELDS_OF[kind]}
    if len({len(value) for value in values.values() if isinstance(value, list | np.ndarray)}) > 1:
        raise ValueError("columns of other lengths")
    return EVENTS[kind](**values)


def _damaged(path: str | Path, number: int) -> UsageError:
    return UsageError(f"the trace {path} is damaged at record {number}: record another")


def _from_text(content: bytes, path: str | Path) -> Trace:
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
    columns = {name: np.zeros(len(keys), "u1") for name in _COLUMNS}
    return Trace(columns | {"key": np.array(keys, "<u8"), "size": np.array(sizes, "<u8")}, [], recorded=False)


log = logging.getLogger(__name__)


class Recording(TraceWriter):
    """Nothing else depends on a trace, so no method raises once the recording has begun."""

    _ended = False

    def flush(self) -> None:
        """Write what was recorded so far; the process may then die without a loss."""
        try:
            if not self._ended:
                super().flush()
        except SpiderfsError as exc:
            log.warning("%s: the trace ends here", exc)
            self._ended = True
        if self._ended:
            self._rows.clear()
            self._buffer.clear()


def noted_in(recording: Recording | None, number_of: Callable[[str], int] = int) -> Callable[[Event], None]:
    """A function that records events as of now, if there is a recording; `number_of` a job dataset is its number."""
    if recording is None:
        return lambda event: None
    return lambda event: recording.event(steady_clock.now(), event, number_of)


def recording_to(path: Path | None) -> Recording | None:
    """A recording that goes on with the file; None without a file, or where the file cannot be written any more."""
    if path is None:
        return None
    try:
        return Recording(path)
    except SpiderfsError as exc:
        # The file was writable when the mount began, and what has happened since must not stop a new manager.
        log.warning("%s: no more accesses are recorded", exc)
        return None
