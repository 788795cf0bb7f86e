"""File contents that name their origin, and the history of all contents of a source. The module has no side effects.

A content consists of cells of 16 bytes. Each cell holds the file's number, the version that wrote the cell, and the
cell's own offset. So the bytes of a read show where they come from, and a mix of two versions can be recognised.
Changes begin at multiples of 16 bytes, and a hole has version 0: nothing but zeros.

docs/reference/semantics.md promises about the bytes of a read:

- They are the bytes of one state that the file has had, and they agree with the size and the mtime of the open file.
- Two states with the same size and the same mtime are one version to spiderfs, so a read may mix their bytes.
- A change in place sets the mtime first and writes afterwards. A reader that opens the file during the change may get
  some older bytes with the new mtime. A reader that opens it after the change may not, because the mount reads a
  version that is so young again at each open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

CELL_BYTES = 16
_CELL = np.dtype([("version", "<u4"), ("file", "<u4"), ("offset", "<u8")])


class Key(NamedTuple):
    """The size and the mtime, by which spiderfs tells versions of a file apart."""

    size: int
    mtime_ns: int


class Run(NamedTuple):
    """Whole cells [start, stop) of one version of one file; file 0 and version 0 are zeros."""

    start: int
    stop: int
    file: int
    version: int


class Range(NamedTuple):
    """The result of a read of `wanted` bytes from `offset` on: `length` bytes, as whole cells and pieces of cells."""

    offset: int
    wanted: int
    length: int
    runs: list[Run]
    odd: list[tuple[int, str]]  # offset and bytes in hexadecimal
    wrong: str  # why the bytes cannot be those of any version; empty if they can


class Segment(NamedTuple):
    """The bytes of a state up to `stop`, from the end of the segment before."""

    stop: int
    version: int


def cells(file: int, version: int, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a version of a file."""
    if version == 0:
        return bytes(stop - start)
    first = start // CELL_BYTES
    found = np.empty(-(-stop // CELL_BYTES) - first, _CELL)
    found["version"], found["file"] = version, file
    found["offset"] = np.arange(first, first + len(found), dtype=np.uint64) * CELL_BYTES
    return found.tobytes()[start - first * CELL_BYTES : stop - first * CELL_BYTES]


def parsed(offset: int, wanted: int, data: bytes | bytearray) -> Range:
    """The bytes of a read as cells, each with the origin that it names."""
    view = memoryview(data)
    head = min(-offset % CELL_BYTES, len(view))
    whole = (len(view) - head) // CELL_BYTES
    tail = head + whole * CELL_BYTES
    odd = [(offset + at, bytes(piece).hex()) for at, piece in ((0, view[:head]), (tail, view[tail:])) if piece]
    found = np.frombuffer(view[head:tail], _CELL)
    first = offset + head
    zero = (found["version"] == 0) & (found["file"] == 0) & (found["offset"] == 0)
    offsets = np.arange(whole, dtype=np.uint64) * np.uint64(CELL_BYTES) + np.uint64(first)
    bad = np.flatnonzero(~zero & ((found["offset"] != offsets) | (found["version"] == 0)))
    wrong = ""
    if len(bad):
        at = int(bad[0])
        raw = bytes(view[head + at * CELL_BYTES :][:CELL_BYTES]).hex()
        wrong = f"{len(bad)} of {whole} cells make no sense, the first at {first + at * CELL_BYTES}: {raw}"
    pairs = found["file"].astype(np.uint64) << np.uint64(32) | found["version"]
    starts = np.flatnonzero(np.diff(pairs)) + 1
    bounds = [0, *starts.tolist(), whole] if whole else []
    runs = [
        Run(first + a * CELL_BYTES, first + b * CELL_BYTES, int(found["file"][a]), int(found["version"][a]))
        for a, b in pairwise(bounds)
    ]
    return Range(offset, wanted, len(view), runs, odd, wrong)


@dataclass(frozen=True)
class State:
    """The content of a file from some time on; a size of -1 means that the file does not exist."""

    file: int
    size: int
    segments: tuple[Segment, ...] = ()

    @property
    def is_there(self) -> bool:
        return self.size >= 0

    def read(self, start: int, stop: int) -> bytes:
        pieces, at = [], 0
        for end, version in self.segments:
            if (a := max(at, start)) < (b := min(end, stop)):
                pieces.append(cells(self.file, version, a, b))
            at = end
        return b"".join(pieces)

    def runs(self, start: int, stop: int) -> list[Run]:
        """The cells [start, stop) that a read of this state returns."""
        found, at = [], 0
        for end, version in self.segments:
            if (a := max(at, start)) < (b := min(end, stop)):
                found.append(Run(a, b, self.file if version else 0, version))
            at = end
        return found

    def explains(self, found: Range) -> bool:
        """Whether a read of this state could have returned these bytes."""
        if found.length != max(0, min(found.wanted, self.size - found.offset)):
            return False
        if any(self.read(at, at + len(text) // 2).hex() != text for at, text in found.odd):
            return False
        return not found.runs or self.runs(found.runs[0].start, found.runs[-1].stop) == found.runs

    # -- what becomes of it; the results' versions are the caller's to number

    def written(self, start: int, stop: int, version: int) -> State:
        """The state after a write of bytes [start, stop); a hole before `start` holds zeros."""
        before = list(_clipped(self.segments, 0, min(start, self.size)))
        if start > self.size:
            before.append(Segment(start, 0))
        after = _clipped(self.segments, stop, self.size)
        return State(self.file, max(self.size, stop), _merged([*before, Segment(stop, version), *after]))

    def cut(self, size: int) -> State:
        """The state after truncate(2), which cuts the file or adds a hole."""
        kept = list(_clipped(self.segments, 0, min(size, self.size)))
        if size > self.size:
            kept.append(Segment(size, 0))
        return State(self.file, size, _merged(kept))


def _clipped(segments: Iterable[Segment], start: int, stop: int) -> Iterator[Segment]:
    """The segments of [start, stop)."""
    at = 0
    for end, version in segments:
        if max(at, start) < min(end, stop):
            yield Segment(min(end, stop), version)
        at = end


def _merged(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    merged: list[Segment] = []
    for segment in segments:
        if merged and merged[-1].version == segment.version:
            merged.pop()
        merged.append(segment)
    return tuple(merged)


@dataclass
class Held:
    """A state, the time in which the source held it, and the size and mtime that it had."""

    state: State
    began_s: float
    in_place: bool = False
    """Whether a change in place made this state; otherwise a new file replaced the old one."""
    changed_s: float | None = None
    """When the change that made this state ended."""
    ended_s: float | None = None
    key: Key | None = None


@dataclass(frozen=True)
class Seen:
    """The observation that a reader made of one open file, or of a name."""

    file: int
    way: str
    began_s: float
    ended_s: float
    waited_s: float  # the longest of its system calls
    key: Key | None = None
    ranges: Sequence[Range] = ()
    error: int = 0
    by_trainer: bool = False

    @classmethod
    def of(cls, row: dict[str, Any]) -> Seen:
        """The observation that `as_row` has written into this row. Takes `ranges` and `key` out of the row."""
        ranges = [
            Range(offset, wanted, length, [Run(*run) for run in runs], [(at, text) for at, text in odd], wrong)
            for offset, wanted, length, runs, odd, wrong in row.pop("ranges")
        ]
        key = row.pop("key")
        return cls(ranges=ranges, key=None if key is None else Key(*key), **row)

    def as_row(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Verdict(NamedTuple):
    how: str  # one of VERDICTS
    why: str = ""
    late_s: float = 0.0
    """For how many seconds the source had already held something else."""


SAME, MIXED, RACING, SUBSTITUTE, WRONG = "same", "of one size and mtime", "while it was written", "substitute", "WRONG"


@dataclass
class History:
    """All states of all files; `classes` says which files have the same label."""

    classes: dict[int, int] = field(default_factory=dict)
    states: dict[int, list[Held]] = field(default_factory=dict)

    def now(self, file: int) -> Held:
        return self.states[file][-1]

    def begin(self, state: State, now_s: float, in_place: bool = False) -> Held:
        """Note a state that the source is about to hold; called before any reader can see it."""
        held = self.states.setdefault(state.file, [])
        held.append(Held(state, now_s, in_place))
        return held[-1]

    def complete(self, held: Held, now_s: float) -> None:
        """Note that the change that made this state has ended, and with it the state before."""
        held.changed_s = now_s
        for before in self.states[held.state.file][-2:-1]:
            before.ended_s = now_s

    def was_there(self, file: int, began_s: float, ended_s: float) -> tuple[bool, bool]:
        """Whether the file existed at any time in the span, and whether it was missing at any time in it."""
        found = {
            held.state.is_there
            for held in self.states.get(file, ())
            if held.began_s <= ended_s and (held.ended_s is None or held.ended_s >= began_s)
        }
        return True in found, False in found

    def changed(self, file: int, began_s: float, ended_s: float) -> bool:
        """Whether the file was changed in the span."""
        return any(
            held.began_s <= ended_s and (held.changed_s is None or held.changed_s >= began_s)
            for held in self.states.get(file, ())
        )

    def judge(self, seen: Seen) -> Verdict:
        """Compare a read that had no error with everything that the file has ever held."""
        wrong = next((found.wrong for found in seen.ranges if found.wrong), "")
        if wrong:
            return Verdict(WRONG, wrong)
        files = {run.file for found in seen.ranges for run in found.runs if run.file}
        if files <= {seen.file}:
            verdict = self._judge_as(seen, seen.file)
            if verdict.how != WRONG or files or not seen.by_trainer:
                return verdict
        if not seen.by_trainer:
            return Verdict(WRONG, f"bytes of the files {sorted(files)}")
        if len(files) > 1:
            return Verdict(WRONG, f"a mix of the files {sorted(files)}")
        # Bytes without a whole cell do not show from which file they come.
        others = files or {file for file, label in self.classes.items() if label == self.classes[seen.file]}
        for other in others:
            if self.classes[other] != self.classes[seen.file]:
                return Verdict(WRONG, f"the substitute {other} is of another class")
            verdict = self._judge_as(seen, other)
            if verdict.how != WRONG:
                return verdict._replace(how=SUBSTITUTE)
        return Verdict(WRONG, f"no state of the substitute {sorted(files)}")

    def _judge_as(self, seen: Seen, file: int) -> Verdict:
        states = [held for held in self.states[file] if held.began_s <= seen.ended_s and held.state.is_there]
        known = [held for held in states if seen.key is None or held.key == seen.key]
        if any(all(held.state.explains(found) for found in seen.ranges) for held in reversed(known)):
            # States with the same size and mtime are one version, so any of their bytes are right.
            keys = {held.key for held in known if _explained([held.state], seen.ranges)}
            same = [held for held in known if held.key in keys]
            late_s = min(0.0 if held.ended_s is None else max(0.0, seen.began_s - held.ended_s) for held in same)
            return Verdict(SAME, late_s=late_s)
        for key in {held.key for held in known}:
            if _explained([held.state for held in known if held.key == key], seen.ranges):
                return Verdict(MIXED)
        if (racing := _racing(states, seen)) and _explained(racing, seen.ranges):
            return Verdict(RACING)
        if not known and seen.key is not None:
            return Verdict(WRONG, f"it never had the size {seen.key.size} and the mtime {seen.key.mtime_ns}")
        its_states = "; ".join(
            f"{found.length} of {found.wanted} from {found.offset}: "
            + ", ".join(f"[{run.start}, {run.stop}) {run.file}v{run.version}" for run in found.runs[:8])
            for found in seen.ranges
        )
        held_then = ", ".join(f"{[*map(tuple, held.state.segments)]} from {held.began_s:.3f}" for held in known[-3:])
        return Verdict(WRONG, f"no state that it ever had: {its_states}; with this size and mtime it was {held_then}")


def _racing(states: Sequence[Held], seen: Seen) -> list[State]:
    """The states whose bytes a read may mix, because the file was changed in place during the read."""
    found: list[State] = []
    for before, held in pairwise(states):
        beside = held.changed_s is None or seen.began_s <= held.changed_s
        if not held.in_place or not beside or held.key is None:
            continue
        if seen.key is None or seen.key == held.key:
            found += [before.state, held.state]
        elif seen.key.mtime_ns == held.key.mtime_ns:
            # A write changes the mtime first; the size then grows page after page.
            least, most = sorted((before.state.size, held.state.size))
            if least <= seen.key.size <= most:
                found += [before.state.cut(seen.key.size), held.state.cut(seen.key.size)]
    return found


def _explained(states: Sequence[State], ranges: Sequence[Range]) -> bool:
    """Whether each byte is the byte that one of these states has at its offset."""
    return all(_explains_range(states, found) for found in ranges)


def _explains_range(states: Sequence[State], found: Range) -> bool:
    sizes = {max(0, min(found.wanted, state.size - found.offset)) for state in states}
    if found.length not in sizes:
        return False
    for at, text in found.odd:
        if not any(state.read(at, at + len(text) // 2).hex() == text for state in states):
            return False
    return all(_covered(run, states) for run in found.runs)


def _covered(run: Run, states: Sequence[State]) -> bool:
    pieces = sorted(
        (piece.start, piece.stop)
        for state in states
        for piece in state.runs(run.start, run.stop)
        if piece.version == run.version
    )
    at = run.start
    for start, stop in pieces:
        if start > at:
            return False
        at = max(at, stop)
    return at >= run.stop
