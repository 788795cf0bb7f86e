"""Traces: the files of recorded accesses that `-o trace=FILE` writes and `spiderfs simulate` reads.

A trace is a header of 16 bytes (magic, version, bytes per record) and then records of 32 bytes, little-endian. Each
record names its kind, and a reader skips the kinds that it does not know. A trace has four sorts of records:
- the accesses;
- what the scorer found (scores, hubs) and what else guided the policy (the ratio, pins, labels, ends of epochs): a
  replay decides by the same;
- what ranks told of their plans, and which samples they exchanged (`core/hints.py`);
- the batches that trainers sent (`batch.py`): from them a replay can score anew (`simulation/hint_source.py`).
A crash may cut the last record short. A reader ignores that record, and a writer that goes on with the file overwrites
it.

Users may also write a trace by hand, as text: one line `key size` for each access, where the key is any word and the
size is in bytes; `#` starts a comment.

The module is long because the writer and the reader of the format belong side by side.
"""

from __future__ import annotations

import io
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spiderfs.core.accesses import Accesses
from spiderfs.core.hints import (
    AtHand,
    Budget,
    Candidates,
    Disconnected,
    Dispatched,
    Epoch,
    Hint,
    Hub,
    Labels,
    Lost,
    Pinning,
    Planned,
    Progressed,
    Published,
    RankNews,
    Ratio,
    Scored,
    WarmUp,
)
from spiderfs.core.policy import Key
from spiderfs.errors import SpiderfsError, UsageError
from spiderfs.trace.batch import TracedBatch, byte_count, from_records, packed, records_for, to_records

MAGIC = b"SPIDERTR"
VERSION = 2
HEADER = struct.Struct("<8sHHI")
RECORD = np.dtype(
    [
        ("time_s", "<f8"),
        ("key", "<u8"),
        ("size", "<u8"),
        ("block", "<u4"),
        ("kind", "u1"),
        ("served", "u1"),
        ("list", "<u2"),
    ]
)
RECORD_FIELDS = struct.Struct("<dQQIBBH")

# The largest size of one file, and of all accesses together, that a trace may have: larger ones mean a damaged trace.
MOST_BYTES, _MOST_BYTES_IN_ALL = 1 << 50, 1 << 62
# Records that the writer buffers, 128 KiB: it writes once in some seconds of training, and a crash loses little.
BUFFERED_RECORDS = 4096


class Kind(IntEnum):
    """The kinds of records. Some hold a number other than a size in the field `size`: a float64 in its eight bytes."""

    OPEN = 0
    """A sample was opened."""
    BLOCK = 1
    """A block of a large file was read."""
    REDIRECT = 2
    """A reader asked for a sample and got a stand-in; `key` and `size` are those of the sample."""
    STAND_IN = 3
    """The stand-in of the REDIRECT before it; `key` and `size` are those of the stand-in."""
    SCORE = 4
    """A sample got a new score, the number in `size`; `served` is set in the first of those that came together."""
    HUB = 5
    """The scorer found a hub; `size` NEIGHBOUR records follow, the nearest first."""
    NEIGHBOUR = 6
    """One neighbour of the HUB before it; its distance is the number in `size`."""
    RATIO = 7
    """The ratio was set to the number in `size`."""
    EPOCH = 8
    """A trainer ended an epoch; if `served` is set, the accuracy is the number in `size`."""
    LABEL = 9
    """A sample of a list that a trainer declared; its label is the number in `size`. All samples of a list follow."""
    BATCH = 10
    """A batch was scored: `size` samples with embeddings of `block` numbers, and with losses if `served` is set.

    Its `key` is 1 if it was scored together with the BATCH before it, else 0.
    """
    CARRIER = 11
    """Bytes of the BATCH before it."""
    PINS = 12
    """A trainer pinned samples, in place of those that it pinned before; `size` PINNED records follow."""
    PINNED = 13
    """One sample of the PINS before it."""
    AT_HAND = 14
    """The bytes of a sample, `size` of them, were at hand when the HUB or the PINS that come next were placed."""
    BUDGET = 15
    """The cache got a capacity of `size` bytes; `key` bytes of it are room for landing."""
    LOST = 16
    """A member, or its block, left the cache because the store lost it, or because the user evicted it."""
    PUBLISHED = 17
    """Workers learned of the redirects that had changed."""
    WARM_UP = 18
    """A trainer warms up, or, if `served` is not set, does so no more."""
    PLAN = 19
    """A rank published an epoch, which it begins if `served` is set, at position `block`; `size` DRAW records follow.

    In this record and the next ones of a rank, `key` is the number of its trainer, plus 2^32 times that of the epoch.
    """
    DRAW = 20
    """One sample of the PLAN or HANDED before it."""
    COME = 21
    """Of the rank's epoch, `size` positions were dispatched and `block` were taken."""
    HANDED = 22
    """The rank exchanges samples, and dispatched others than it had planned from position `block` on: `size` DRAWs."""
    LEFT = 23
    """The trainer has disconnected."""


# What only a repetition needs (`testing/repetition.py`), and what was at hand when the engine placed a sample.
ENGINE_KINDS = (Kind.AT_HAND, Kind.BUDGET, Kind.LOST, Kind.PUBLISHED)
# A bit of the field `served` of an access: the engine did not hear of it. The lowest bit says whether it was served.
NOT_OFFERED = 2
# Another bit of it: the kernel had the bytes, so they were not at hand, and the engine heard that a member was read.
UNSEEN = 4

RANK_KINDS = (Kind.PLAN, Kind.COME, Kind.HANDED, Kind.LEFT)
_EPOCH = 1 << 32  # in keys of these kinds

ACCESSES = (Kind.OPEN, Kind.BLOCK, Kind.REDIRECT)
# The hints that no scoring finds.
_LESSON_KINDS = (Kind.LABEL, Kind.EPOCH, Kind.RATIO, Kind.PINS, Kind.WARM_UP)


class TraceWriter:
    """Appends to a trace file. If the file exists it must be a trace; the writer goes on after its last record.

    The methods may block on the disk. The constructor raises UsageError if it cannot begin; the other methods raise
    SpiderfsError if they cannot go on.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._buffer = bytearray()
        try:
            # Opening a file to append creates it, and does not empty it if it exists.
            with self._path.open("ab"):
                pass
            # Unbuffered: records that `flush` has written survive the process.
            self._file = self._path.open("r+b", buffering=0)
            try:
                self._begin()
            except (OSError, UsageError):
                self._file.close()
                raise
        except OSError as exc:
            raise UsageError(f"cannot record a trace to {self._path}: {exc.strerror}") from exc

    def append(
        self,
        time_s: float,
        key: int,
        size: int,
        kind: Kind = Kind.OPEN,
        block: int = 0,
        served: bool = False,
        list_number: int = 0,
        offered: bool = True,
        unseen: bool = False,
    ) -> None:
        """Record one access. `served` means that the reader did not wait for the source.

        `offered` is False if the engine did not hear of the access, because its bytes were not stored. `unseen` means
        that the kernel had the bytes.

        Times are in seconds since any fixed moment. `list_number` is the number of the list that the reader has
        declared, or 0 if the reader may not get a stand-in.
        """
        flags = served | (0 if offered else NOT_OFFERED) | (UNSEEN if unseen else 0)
        self._put(RECORD_FIELDS.pack(time_s, key, size, block, kind, flags, list_number))

    def redirect(self, time_s: float, wanted: int, size: int, given: int, given_size: int, list_number: int) -> None:
        """Record one access to the sample `wanted`, for which the reader got the bytes of the stand-in `given`."""
        self.append(time_s, wanted, size, Kind.REDIRECT, served=True, list_number=list_number)
        self.append(time_s, given, given_size, Kind.STAND_IN, served=True, list_number=list_number)

    def hint(self, time_s: float, hint: Hint, number_of: Callable[[str], int]) -> None:
        """Record what the cache was taught; its keys must be inodes. `number_of` a course is its number."""
        assert not isinstance(hint, Candidates)
        match hint:
            case Scored(course_id, keys, scores):
                number = number_of(course_id)
                for place, (key, score) in enumerate(zip(keys, scores, strict=True)):
                    first = place == 0
                    self.append(time_s, _inode(key), _bits(score), Kind.SCORE, served=first, list_number=number)
            case Hub(key, course_id, neighbours, distances):
                number = number_of(course_id)
                self.append(time_s, _inode(key), len(neighbours), Kind.HUB, list_number=number)
                for neighbour, distance in zip(neighbours, distances, strict=True):
                    self.append(time_s, _inode(neighbour), _bits(distance), Kind.NEIGHBOUR, list_number=number)
            case Ratio(ratio):
                self.append(time_s, 0, _bits(ratio), Kind.RATIO)
            case Epoch(course_id, accuracy):
                known, number = accuracy is not None, number_of(course_id)
                self.append(time_s, 0, _bits(accuracy or 0.0), Kind.EPOCH, served=known, list_number=number)
            case Labels(course_id, labels):
                number = number_of(course_id)
                for key, label in labels.items():
                    self.append(time_s, _inode(key), _bits(label), Kind.LABEL, list_number=number)
            case Pinning(course_id, keys):
                number = number_of(course_id)
                self.append(time_s, 0, len(keys), Kind.PINS, list_number=number)
                for key in keys:
                    self.append(time_s, _inode(key), 0, Kind.PINNED, list_number=number)
            case WarmUp(course_id, active):
                self.append(time_s, 0, 0, Kind.WARM_UP, served=active, list_number=number_of(course_id))
            case AtHand(key, size):
                self.append(time_s, _inode(key), size, Kind.AT_HAND)
            case Budget(capacity_bytes, landing_bytes):
                self.append(time_s, landing_bytes, capacity_bytes, Kind.BUDGET)
            case Lost(key):
                inode, block = key if isinstance(key, tuple) else (key, 0)
                self.append(time_s, inode, 0, Kind.LOST, block)
            case Published():
                self.append(time_s, 0, 0, Kind.PUBLISHED)

    def rank_news(self, time_s: float, news: RankNews, number_of: Callable[[str], int]) -> None:
        """Record what a rank told of its plan; its keys must be inodes. `number_of` a course is its number."""
        if isinstance(news, Disconnected):
            self.append(time_s, news.rank, 0, Kind.LEFT)
            return
        key, number = news.rank + _EPOCH * news.epoch, number_of(news.course_id)
        match news:
            case Progressed(dispatched=dispatched, taken=taken):
                self.append(time_s, key, dispatched, Kind.COME, taken, list_number=number)
            case Planned(start=start, begun=begun, keys=keys):
                self.append(time_s, key, len(keys), Kind.PLAN, start, begun, number)
                self._draws(time_s, keys, number)
            case Dispatched(position=position, keys=keys):
                self.append(time_s, key, len(keys), Kind.HANDED, position, list_number=number)
                self._draws(time_s, keys, number)

    def _draws(self, time_s: float, keys: Sequence[Key] | NDArray[np.uint64], list_number: int) -> None:
        # All at once: a plan may have millions of draws.
        records = np.zeros(len(keys), RECORD)
        records["time_s"], records["kind"], records["list"] = time_s, Kind.DRAW, list_number
        records["key"] = keys
        self._put(records.tobytes())

    def batch(
        self,
        time_s: float,
        list_number: int,
        inodes: NDArray[np.uint64],
        embeddings: NDArray[np.floating],
        losses: NDArray[np.floating] | None,
        goes_on: bool = False,
    ) -> None:
        """Record a batch of at least one row, in half precision; `inodes` are those whose bytes were served.

        `goes_on` means that it was scored together with the batch that was recorded before it.
        """
        rows, dimension = embeddings.shape
        head = RECORD_FIELDS.pack(time_s, goes_on, rows, dimension, Kind.BATCH, losses is not None, list_number)
        self._put(head + to_records(packed(inodes, embeddings, losses), Kind.CARRIER))

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

    def _put(self, records: bytes) -> None:
        self._buffer += records
        if len(self._buffer) >= BUFFERED_RECORDS * RECORD.itemsize:
            self.flush()

    def _begin(self) -> None:
        size = self._file.seek(0, io.SEEK_END)
        if size == 0:
            self._file.write(HEADER.pack(MAGIC, VERSION, RECORD.itemsize, 0))
            return
        self._file.seek(0)
        _check_header(self._file.read(HEADER.size), self._path)
        self._file.truncate(size - (size - HEADER.size) % RECORD.itemsize)
        self._file.seek(0, io.SEEK_END)


class Given(NamedTuple):
    """What a reader got, its bytes, and whether the engine heard of it; `unseen`: by `read_unseen`."""

    key: Key
    size: int
    offered: bool
    unseen: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """All records of a trace, of all kinds; `records` has the fields of RECORD."""

    records: NDArray[np.void]
    recorded: bool
    """Whether spiderfs recorded the trace: a text trace has no times, and does not say which accesses waited."""

    def served_ratio(self) -> float:
        """The share of the accesses that did not wait for the source while the trace was recorded."""
        accesses = self._accesses()
        return float(np.mean(accesses["served"] & 1)) if len(accesses) else 0.0

    def accesses(self) -> Accesses:
        accesses = self._accesses()
        keys: list[Key] = accesses["key"].tolist()
        for index in np.flatnonzero(accesses["kind"] == Kind.BLOCK).tolist():
            keys[index] = (keys[index], int(accesses["block"][index]))
        course_ids = [str(number) if number else "" for number in accesses["list"].tolist()]
        return Accesses.of(keys, accesses["size"].tolist(), course_ids)

    def given(self) -> list[Given]:
        """For each access, what the reader got when the trace was recorded."""
        found = []
        for index in np.flatnonzero(np.isin(self.records["kind"], ACCESSES)).tolist():
            flags = int(self.records["served"][index])
            if self.records["kind"][index] == Kind.REDIRECT and index + 1 < len(self.records):
                index += 1
            key, size, block = (int(self.records[field][index]) for field in ("key", "size", "block"))
            found.append(Given((key, block) if block else key, size, not flags & NOT_OFFERED, bool(flags & UNSEEN)))
        return found

    def hints(self) -> list[tuple[int, Hint]]:
        """All hints in the trace, in order, each with the number of the access before which it came."""
        numbers, starts = self._numbers(), self._starts()
        found = self._found(*_LESSON_KINDS, Kind.SCORE, Kind.HUB, *ENGINE_KINDS)
        return [(before, self._hint_at(index, kind, numbers, starts)) for index, kind, before in found]

    def rank_news(self) -> list[tuple[int, RankNews]]:
        """What ranks told of their plans, in order, each with the number of the access before which it came.

        A plan that a crash cut short is left out.
        """
        found: list[tuple[int, RankNews]] = []
        for index, kind, before in self._found(*RANK_KINDS):
            epoch, rank = divmod(int(self.records["key"][index]), _EPOCH)
            course_id = str(self.records["list"][index])
            size, block = int(self.records["size"][index]), int(self.records["block"][index])
            if kind == Kind.LEFT:
                found.append((before, Disconnected(rank)))
            elif kind == Kind.COME:
                found.append((before, Progressed(rank, course_id, epoch, size, block)))
            elif len(keys := self.records["key"][self._following(index, Kind.DRAW)].tolist()) == size:
                begun = bool(self.records["served"][index])
                planned = Planned(rank, course_id, epoch, block, begun, keys)
                found.append(
                    (before, planned if kind == Kind.PLAN else Dispatched(rank, course_id, epoch, block, keys))
                )
        return found

    @property
    def has_plans(self) -> bool:
        """Whether ranks told of plans while the trace was recorded."""
        return bool((self.records["kind"] == Kind.PLAN).any())

    def lessons(self) -> Iterator[tuple[int, TracedBatch | Hint]]:
        """All batches, and the hints that no scoring finds, each with the number of the access before which it came.

        Raises UsageError if the trace is damaged. A batch that a crash cut short is left out.
        """
        numbers, starts = self._numbers(), self._starts()
        for index, kind, before in self._found(*_LESSON_KINDS, Kind.BATCH):
            if kind != Kind.BATCH:
                yield before, self._hint_at(index, kind, numbers, starts)
            elif (batch := self._batch_at(index)) is not None:
                yield before, batch

    @property
    def has_batches(self) -> bool:
        """Whether the trace has batches, so that a replay can score anew."""
        return bool((self.records["kind"] == Kind.BATCH).any())

    def accuracies(self) -> dict[str, list[float]]:
        """For each list, by its number, the accuracies at the ends of its epochs, where they were known."""
        known = (self.records["kind"] == Kind.EPOCH) & (self.records["served"] != 0)
        found: dict[str, list[float]] = {}
        for course_id, accuracy in zip(self.records["list"][known].tolist(), self._numbers()[known], strict=True):
            found.setdefault(str(course_id), []).append(float(accuracy))
        return found

    def _found(self, *wanted: Kind) -> Iterator[tuple[int, int, int]]:
        """The records of some kinds: index, kind, and number of accesses before.

        Of LABELs and SCOREs that came together only the first is among them.
        """
        kinds, starts = self.records["kind"], self._starts()
        indices = starts[np.isin(kinds[starts], wanted)]
        before = np.cumsum(np.isin(kinds, ACCESSES))[indices]
        return zip(indices.tolist(), kinds[indices].tolist(), before.tolist(), strict=True)

    def _starts(self) -> NDArray[np.int64]:
        """The records that do not go on with the LABEL or SCORE before them."""
        kinds, lists = self.records["kind"], self.records["list"]
        same = (kinds[1:] == kinds[:-1]) & (lists[1:] == lists[:-1])
        more = (kinds[1:] == Kind.LABEL) | ((kinds[1:] == Kind.SCORE) & (self.records["served"][1:] == 0))
        return np.flatnonzero(np.concatenate([np.ones(min(1, len(kinds)), bool), ~(same & more)]))

    def _together(self, first: int, starts: NDArray[np.int64]) -> slice:
        """The record `first`, one of `starts`, and those that go on with it."""
        after = int(np.searchsorted(starts, first, side="right"))
        return slice(first, int(starts[after]) if after < len(starts) else len(self.records))

    def _hint_at(self, index: int, kind: int, numbers: NDArray[np.float64], starts: NDArray[np.int64]) -> Hint:
        """The hint that begins with this record."""
        key, size, block = (int(self.records[field][index]) for field in ("key", "size", "block"))
        course_id, flag, number = str(self.records["list"][index]), bool(self.records["served"][index]), numbers[index]
        match kind:
            case Kind.HUB:
                following = self._following(index, Kind.NEIGHBOUR)
                return Hub(key, course_id, self.records["key"][following].tolist(), numbers[following].tolist())
            case Kind.SCORE:
                together = self._together(index, starts)
                return Scored(course_id, self.records["key"][together].tolist(), numbers[together].tolist())
            case Kind.LABEL:
                together = self._together(index, starts)
                keys, labels = self.records["key"][together].tolist(), numbers[together].astype(np.int64).tolist()
                return Labels(course_id, dict(zip(keys, labels, strict=True)))
            case Kind.PINS:
                return Pinning(course_id, tuple(self.records["key"][self._following(index, Kind.PINNED)].tolist()))
            case Kind.WARM_UP:
                return WarmUp(course_id, flag)
            case Kind.RATIO:
                return Ratio(float(number))
            case Kind.EPOCH:
                return Epoch(course_id, float(number) if flag else None)
            case Kind.AT_HAND:
                return AtHand(key, size)
            case Kind.BUDGET:
                return Budget(size, key)
            case Kind.PUBLISHED:
                return Published()
        return Lost((key, block) if block else key)

    def _numbers(self) -> NDArray[np.float64]:
        """The field `size` of every record read as a float64, which is what it holds in records of some kinds."""
        return self.records["size"].copy().view("<f8")

    def _batch_at(self, head: int) -> TracedBatch | None:
        """The batch that begins with this record; None if a crash cut it short."""
        rows, dimension = int(self.records["size"][head]), int(self.records["block"][head])
        with_losses = bool(self.records["served"][head])
        if rows == 0 or dimension == 0:
            raise UsageError(
                f"the trace is damaged at record {head}, a batch of {rows} samples of {dimension} dimensions:"
                " record another, or replay it without scoring anew"
            )
        count = records_for(byte_count(rows, dimension, with_losses))
        carriers = self.records[head + 1 : head + 1 + count]
        if len(carriers) < count or (carriers["kind"] != Kind.CARRIER).any():
            return None
        course_id = str(self.records["list"][head])
        goes_on = bool(self.records["key"][head])
        return TracedBatch.from_bytes(course_id, rows, dimension, with_losses, goes_on, from_records(carriers))

    def _following(self, head: int, kind: Kind) -> slice:
        """The records of one kind that belong to the record `head`: a crash may have cut them short."""
        promised = int(self.records["size"][head])
        others = np.flatnonzero(self.records["kind"][head + 1 : head + 1 + promised] != kind)
        return slice(head + 1, head + 1 + (int(others[0]) if len(others) else promised))

    def _accesses(self) -> NDArray[np.void]:
        return self.records[np.isin(self.records["kind"], ACCESSES)]


def _bits(number: float) -> int:
    """A float64 as the integer of the same eight bytes."""
    return int.from_bytes(struct.pack("<d", number), "little")


def _inode(key: Key) -> int:
    assert isinstance(key, int)
    return key


def read_trace(path: str | Path) -> Trace:
    """A trace that spiderfs recorded, or one in text; raises UsageError for any other file."""
    try:
        with open(path, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"the trace {path} is not a regular file: name a file that -o trace=FILE has written")
            content = file.read()
    except OSError as exc:
        raise UsageError(f"cannot read the trace {path}: {exc.strerror}") from exc
    if not content.startswith(MAGIC):
        return Trace(_from_text(content, path), recorded=False)
    _check_header(content[: HEADER.size], path)
    count = (len(content) - HEADER.size) // RECORD.itemsize
    return Trace(_checked(np.frombuffer(content, RECORD, count, HEADER.size), path), recorded=True)


def _checked(records: NDArray[np.void], path: str | Path) -> NDArray[np.void]:
    """The same records; raises UsageError if a record has a number that no writer writes."""
    kinds, numbers = records["kind"], records["size"].copy().view("<f8")
    of_access = np.isin(kinds, (*ACCESSES, Kind.STAND_IN, Kind.AT_HAND, Kind.BUDGET))
    is_share = (numbers >= 0) & (numbers <= 1)
    good = np.select(
        [
            of_access,
            kinds == Kind.SCORE,
            kinds == Kind.NEIGHBOUR,
            (kinds == Kind.RATIO) | ((kinds == Kind.EPOCH) & (records["served"] != 0)),
            kinds == Kind.LABEL,
        ],
        [
            records["size"] <= MOST_BYTES,
            np.isfinite(numbers) & (numbers > 0),
            np.isfinite(numbers) & (numbers >= 0),
            is_share,
            np.abs(numbers) < 2**53,
        ],
        True,
    )
    if not good.all():
        number = int(np.argmin(good))
        raise UsageError(f"the trace {path} is damaged at record {number}: record another")
    _check_total(records["size"][of_access], path)
    return records


def _check_total(sizes: NDArray[np.uint64], path: str | Path) -> None:
    if sizes.astype(np.float64).sum() > _MOST_BYTES_IN_ALL:
        raise UsageError(f"the trace {path} is damaged, its sizes add up to too much: record another")


def _check_header(header: bytes, path: str | Path) -> None:
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise UsageError(f"{path} is not a trace: name a new file, or one that spiderfs recorded")
    _, version, record_bytes, _ = HEADER.unpack(header)
    if (version, record_bytes) != (VERSION, RECORD.itemsize):
        raise UsageError(
            f"{path} is a trace of version {version}, and this spiderfs knows version {VERSION}: record another"
        )


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
    _check_total(records["size"], path)
    return records
