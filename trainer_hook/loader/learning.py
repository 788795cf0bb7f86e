"""Learned ranges: which bytes of which files each sample has, found out while a loader reads it.

The data set gets a class whose `__getitem__` asks the mount, before and after it has read, which READs this process
has made meanwhile (`spiderfs/protocol/reads.py`). So any library may read the sample, in threads of its own too, and
the loader may have workers and fetch ahead: the mark is set where the sample is read. A sample that is read while
another one is, as for a mosaic, keeps its bytes to itself.

What the kernel has in its page cache it reads without a READ, so one epoch may not see all of a sample. Later epochs
add what they see, until a sample has been read without anything new: then it is **settled**, and no longer marked.

`ReadMarks` notes, in each process that reads. `LearnedRanges` takes that over, in the process of the plan. Between them
are two files in memory, which processes open that were not forked.
"""

from __future__ import annotations

import errno
import logging
import mmap
import operator
import os
import struct
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from spiderfs.protocol.reads import READS_XATTR, decoded
from trainer_hook.isolation import ErrorBoundary, by_signal_handler
from trainer_hook.ranges.mappings import read_no_pages_around
from trainer_hook.ranges.sample_ranges import Numbers, SampleRanges, first_of

log = logging.getLogger("trainer_hook")

T = TypeVar("T")

# A sample, and how many bytes follow: where each range begins and ends, and its path.
_HEAD = struct.Struct("<QQ")
# The attribute of the class of a data set that is being observed: the class it had before.
_MARK = "_observed_by_spiderfs"


class ReadMarks:
    """Notes which bytes the samples have that this process reads; `records` and `settled` are of `LearnedRanges`."""

    def __init__(self, root: bytes, samples: int, records: str, settled: str) -> None:
        self._arguments = root, samples, records, settled
        self._root, self._samples = root, samples
        self._boundary = ErrorBoundary()
        self._records = os.open(records, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        with open(settled, "rb") as file:
            self._settled = mmap.mmap(file.fileno(), samples, access=mmap.ACCESS_READ)
        # Of each thread: which sample it reads, and the time of its last mark.
        self._thread = threading.local()
        # The threads that read samples, by process, and whether each was alone with that all the time.
        self._alone: dict[tuple[int, int], bool] = {}
        self._mapped: set[bytes] = set()
        self.is_on = True
        """Whether the mount answers."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, self._arguments

    def __del__(self) -> None:
        os.close(self._records)

    def is_settled(self, index: Any) -> bool:
        """Whether reads of the sample with this index need no mark; so it is for what is no index."""
        try:
            sample = operator.index(index)
        except TypeError:
            return True
        return not self.is_on or not 0 <= sample < self._samples or bool(self._settled[sample])

    def read(self, index: Any, read: Callable[[], T]) -> T:
        """What `read` gives, which reads the sample with this index; notes what that took from files of the mount."""
        if self.is_settled(index):
            return read()
        now, thread = self._thread.__dict__, _thread()
        outer, is_outermost = now.get("sample"), thread not in self._alone
        if is_outermost:
            # A forked process has what other threads of its parent have left.
            others = [other for other in list(self._alone) if other[0] == thread[0]]
            self._alone.update({thread: not others} | dict.fromkeys(others, False))
        self.mark(outer)
        sample = now["sample"] = operator.index(index)
        # A sample that cannot be read, or is interrupted, is not known.
        done = None
        try:
            found = read()
            done = sample
            return found
        finally:
            now["sample"] = outer
            self.mark(done)
            if is_outermost:
                del self._alone[thread]

    def mark(self, sample: int | None = None) -> None:
        """Note what was read since the last mark as bytes of a sample; without one, begin here."""
        if self.is_on:
            self._boundary.call(self._mark, sample)
            self.is_on &= not self._boundary.broken

    def _mark(self, sample: int | None) -> None:
        now = self._thread.__dict__
        try:
            try:
                value = os.getxattr(self._root, READS_XATTR if sample is None else f"{READS_XATTR}.{now['since']}")
            except OSError as exc:
                if exc.errno not in (errno.ENODATA, errno.ERANGE) or sample is None:
                    raise
                # More than the mount remembers, or an attribute can have.
                sample, value = None, os.getxattr(self._root, READS_XATTR)
            now["since"], reads = decoded(value)
            if sample is not None:
                # While other threads read samples too, only the READs of this one are known to be of its sample.
                mine = [read for read in reads if read.own or self._alone[_thread()]]
                rows = b"".join(b"%d %d %s\0" % read[1:] for read in mine)
                os.write(self._records, _HEAD.pack(sample, len(rows)) + rows)
                if new := {os.path.join(self._root, read.path) for read in mine} - self._mapped:
                    self._mapped |= new
                    read_no_pages_around(new)
        except OSError as exc:
            if by_signal_handler(exc):
                raise
            self.is_on = False
            text = "no ranges are learned: %s does not say what is read (%s): give ranges, or mount with binding=kernel"
            log.warning(text, os.fsdecode(self._root), exc.strerror)


def _thread() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def _opened(root: bytes, samples: int, records: str, settled: str) -> ReadMarks | None:
    """The marks in another process; None where the plan's process is not there, or has closed the plan."""
    try:
        is_ours = os.readlink(records).startswith("/memfd:spiderfs-")
        return ReadMarks(root, samples, records, settled) if is_ours else None
    except OSError:
        return None


class LearnedRanges:
    """What is known of the samples of a data set, in a mount with this root, which is a real path."""

    def __init__(self, root: str, samples: int) -> None:
        self._root, self.samples = os.fsencode(root), samples
        self._files = [os.memfd_create(f"spiderfs-{what}") for what in ("reads", "settled")]
        os.ftruncate(self._files[1], samples)
        self._settled = np.frombuffer(mmap.mmap(self._files[1], samples), np.uint8)
        self.marks = ReadMarks(self._root, samples, *(f"/proc/{os.getpid()}/fd/{fd}" for fd in self._files))
        self._paths: dict[bytes, int] = {}
        # Sample, file, begin and end of each range.
        self._rows = np.empty((0, 4), np.int64)
        # How many bytes of each sample were known when `take` last returned True, and how many are.
        self._planned = self._known = np.zeros(samples, np.int64)

    def __del__(self) -> None:
        for fd in self._files:
            os.close(fd)

    def __str__(self) -> str:
        return f"learned {np.count_nonzero(self._known):,} of {self.samples:,} samples"

    def take(self) -> bool:
        """Take over what was read since the last time; returns whether that is worth another plan."""
        text = os.pread(self._files[0], os.fstat(self._files[0]).st_size, 0)
        # What is noted in this moment is lost, and seen again in the next epoch.
        os.ftruncate(self._files[0], 0)
        rows, read, at = [], [], 0
        while at < len(text):
            sample, size = _HEAD.unpack_from(text, at)
            at += _HEAD.size + size
            read.append(sample)
            for begin, end, path in (row.split(b" ", 2) for row in text[at - size : at].split(b"\0")[:-1]):
                rows.append((sample, self._paths.setdefault(path, len(self._paths)), int(begin), int(end)))
        self._rows = merged_rows(np.concatenate([self._rows, np.array(rows, np.int64).reshape(-1, 4)]))
        lengths = (self._rows[:, 3] - self._rows[:, 2]).astype(np.float64)
        known = np.bincount(self._rows[:, 0], lengths, self.samples).astype(np.int64)
        self._settled[read] = (self._known[read] > 0) & (known[read] == self._known[read])
        self._known = known
        # A plan begins with a list, which costs the mount some 5 us a range.
        if np.count_nonzero(known > self._planned) <= np.count_nonzero(self._planned) // 100:
            return False
        self._planned = known
        return True

    def ranges(self) -> SampleRanges:
        sample, files, begins, ends = self._rows.T
        paths = [os.path.join(self._root, path) for path in self._paths]
        return SampleRanges(paths, files, begins, ends - begins, first_of(np.bincount(sample, minlength=self.samples)))


def merged_rows(rows: Numbers) -> Numbers:
    """The same bytes in as few rows as can be (sample, file, begin, end), in order."""
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    new = np.ones(len(rows), bool)
    new[1:] = (rows[1:, :2] != rows[:-1, :2]).any(axis=1)
    # How far the rows of one file of one sample have come, with the places of the ends in place of the ends.
    ends, place = np.unique(rows[:, 3], return_inverse=True)
    file = np.cumsum(new) * len(ends)
    until = ends[np.maximum.accumulate(file + place) - file]
    new[1:] |= rows[1:, 2] > until[:-1]
    first = np.flatnonzero(new)
    return np.column_stack([rows[first, :3], until[np.append(first[1:], len(rows))[: len(first)] - 1]])


def observe(dataset: Any, marks: ReadMarks) -> None:
    """Have the data set mark what its samples take, also in workers and copies; raises ValueError if it cannot."""
    release(dataset)
    kind = type(dataset)

    def getitem(self: Any, index: Any) -> Any:
        return marks.read(index, partial(kind.__getitem__, self, index))

    def getitems(self: Any, indices: list[Any]) -> list[Any]:
        if all(map(marks.is_settled, indices)):
            return list(kind.__getitems__(self, indices))
        return [item for index in indices for item in marks.read(index, partial(kind.__getitems__, self, [index]))]

    def reduce(self: Any, protocol: Any) -> Any:
        own, self.__class__ = type(self), kind
        try:
            make, arguments, *rest = self.__reduce_ex__(protocol)
        finally:
            self.__class__ = own
        return _observed, (marks, make, arguments), *rest

    observed = {"__getitem__": getitem, "__reduce_ex__": reduce, _MARK: kind, "__module__": kind.__module__}
    if hasattr(kind, "__getitems__"):
        observed["__getitems__"] = getitems
    try:
        dataset.__class__ = type(kind.__name__, (kind,), observed)
    except TypeError:
        raise ValueError(
            f"ranges='learn': reads of a {kind.__name__} cannot be observed: give a data set of a class of your own"
        ) from None


def _observed(marks: ReadMarks | None, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    dataset = make(*arguments)
    if marks is not None:
        observe(dataset, marks)
    return dataset


def release(dataset: Any) -> None:
    """Undo `observe`."""
    if (kind := getattr(type(dataset), _MARK, None)) is not None:
        dataset.__class__ = kind
