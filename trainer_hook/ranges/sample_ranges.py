"""The ranges of a data set's samples, and the extents of files that they are cut into.

An extent is some whole pages of a file, and each page lies in one extent at most (`spiderfs/sources/ranges.py`). The
mount knows extents alone: the list that is declared has one entry for each, and plans and progress are translated. A
grid has a cut wherever a range begins or ends, so what is fetched is what is wanted but for parts of pages. Where
ranges overlap so densely that most of them would have many extents, the cuts are equally far apart instead.
"""

from __future__ import annotations

import operator
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spiderfs.protocol.extents import PAGE_BYTES, Extent

_GIVE = "give ranges=[(path, offset, length), ...], one or a list of them for each index of the data set"
# The longest extent: one request that a far source answers in about the time of a short one.
_LONGEST = 1 << 20
# With more extents than this for each range, cuts are equally far apart, at a quarter of the usual range.
_DENSE, _QUARTER = 8, 4

Path = str | bytes | os.PathLike[str]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SampleRanges:
    """Sample i has the ranges `first[i]` up to `first[i + 1]`: `lengths` bytes at `offsets` of `paths[files]`."""

    paths: Sequence[Path]
    files: Numbers
    offsets: Numbers
    lengths: Numbers
    first: Numbers

    def __len__(self) -> int:
        return len(self.first) - 1

    @classmethod
    def of(cls, given: SampleRanges | Iterable[Any]) -> SampleRanges:
        """Raises ValueError for anything but a range, or a list of ranges, for each sample."""
        if isinstance(given, SampleRanges):
            return given
        numbers: dict[str | bytes, int] = {}
        rows: list[tuple[int, int, int]] = []
        counts = []
        try:
            for sample in given:
                several = [sample] if isinstance(sample, tuple) and not isinstance(sample[0], tuple) else sample
                for path, offset, length in several:
                    number = numbers.setdefault(os.fspath(path), len(numbers))
                    rows.append((number, operator.index(offset), operator.index(length)))
                counts.append(len(several))
            columns = np.array(rows, np.int64).reshape(-1, 3)
        except (TypeError, ValueError, OverflowError, IndexError) as exc:
            raise ValueError(f"ranges are not (path, offset, length), a path and whole numbers: {_GIVE}") from exc
        files, offsets, lengths = columns.T
        return cls(list(numbers), files, offsets, lengths, first_of(counts))

    @classmethod
    def in_file(cls, path: Path, offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> SampleRanges:
        """One range of one file for each sample."""
        begins = np.asarray(offsets, np.int64)
        every = np.broadcast_to(np.asarray(lengths, np.int64), begins.shape)
        return cls([path], np.zeros(len(begins), np.int64), begins, every, np.arange(len(begins) + 1))

    @classmethod
    def none(cls, samples: int) -> SampleRanges:
        """So many samples without ranges."""
        empty = np.empty(0, np.int64)
        return cls([], empty, empty, empty, np.zeros(samples + 1, np.int64))

    def take(self, indices: npt.ArrayLike) -> SampleRanges:
        """The samples of a data set that has these of this one's, as a `Subset` has."""
        chosen = np.asarray(indices, np.int64)
        chosen = np.where(chosen < 0, chosen + len(self), chosen)
        rows, counts = spans(self.first[chosen], self.first[chosen + 1])
        return SampleRanges(self.paths, self.files[rows], self.offsets[rows], self.lengths[rows], first_of(counts))

    def keep(self, rows: npt.NDArray[np.bool_]) -> SampleRanges:
        """The same samples with these rows alone, and the paths of these."""
        used, files = np.unique(self.files[rows], return_inverse=True)
        paths, first = [self.paths[number] for number in used], first_of(rows)[self.first]
        return SampleRanges(paths, files.astype(np.int64), self.offsets[rows], self.lengths[rows], first)

    def rows_of_files(self) -> list[Numbers]:
        """The rows of each path, in their order."""
        order = np.argsort(self.files, kind="stable")
        ends = np.searchsorted(self.files[order], np.arange(len(self.paths)), "right")
        return np.split(order, ends)[:-1]

    def check(self, samples: int | None) -> None:
        """Raise ValueError unless there are ranges for so many samples and each lies in its file."""
        if samples is not None and len(self) != samples:
            raise ValueError(f"the data set has {samples} samples, and ranges {len(self)}: {_GIVE}")
        if not len(self):
            raise ValueError("the data set has no samples")
        if not self.lengths.any():
            raise ValueError(f"all ranges are empty: {_GIVE}")
        for path, rows in zip(self.paths, self.rows_of_files(), strict=True):
            size = size_of(path)
            offsets, lengths = self.offsets[rows], self.lengths[rows]
            # No sum, which might be beyond 64 bits.
            wrong = (offsets < 0) | (lengths < 0) | (lengths > size - offsets)
            if wrong.any():
                row = int(rows[wrong.argmax()])
                raise ValueError(
                    f"a range of {self.lengths[row]} bytes at {self.offsets[row]} of {os.fsdecode(path)}, which has "
                    f"{size}: give ranges within the file"
                )


def size_of(path: Path) -> int:
    """Raises ValueError for what is no file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise ValueError(f"ranges of {os.fsdecode(path)!r}: {reason}; give paths of files below the mount") from None
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"ranges of {os.fsdecode(path)!r}: no file; give paths of files below the mount")
    return found.st_size


def joined(parts: Sequence[SampleRanges]) -> SampleRanges:
    """The samples of all parts, one after the other."""
    if not parts:
        raise ValueError("joined([]): give the ranges of one file or more")
    files, rows = first_of([len(part.paths) for part in parts]), first_of([len(part.files) for part in parts])
    return SampleRanges(
        [path for part in parts for path in part.paths],
        np.concatenate([part.files + number for part, number in zip(parts, files, strict=False)]),
        np.concatenate([part.offsets for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([[0], *(part.first[1:] + row for part, row in zip(parts, rows, strict=False))]),
    )


def first_of(counts: npt.ArrayLike) -> Numbers:
    """Where each sample's rows begin, and where the last one's end."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def spans(begins: Numbers, ends: Numbers) -> tuple[Numbers, Numbers]:
    """The numbers from each begin up to its end, all in a row, and how many there are of each."""
    counts = ends - begins
    return np.arange(counts.sum()) + np.repeat(begins - first_of(counts)[:-1], counts), counts


class SampleGrid:
    """The extents of a data set's ranges; sample i needs `extents[first[i]:first[i + 1]]`, numbers of `paths`."""

    def __init__(self, ranges: SampleRanges, names: Sequence[bytes]) -> None:
        """`names` are the files' paths below the mount; one file may have several of `ranges.paths`."""
        path_of = dict(zip(names, ranges.paths, strict=True))
        number_of = {name: number for number, name in enumerate(path_of)}
        files = np.array([number_of[name] for name in names], np.int64)[ranges.files]
        ranges, names = replace(ranges, paths=list(path_of.values()), files=files), list(path_of)
        self.paths: list[bytes] = []
        begins, ends = np.zeros(len(ranges.files), np.int64), np.zeros(len(ranges.files), np.int64)
        for path, name, rows in zip(ranges.paths, names, ranges.rows_of_files(), strict=True):
            rows = rows[ranges.lengths[rows] > 0]
            if not len(rows):
                continue
            size = os.stat(path).st_size
            low = ranges.offsets[rows] // PAGE_BYTES * PAGE_BYTES
            high = -(-(ranges.offsets[rows] + ranges.lengths[rows]) // PAGE_BYTES) * PAGE_BYTES
            cut = _cut(low, high)
            begins[rows] = np.searchsorted(cut[:, 0], low, "right") - 1 + len(self.paths)
            ends[rows] = np.searchsorted(cut[:, 0], high, "left") + len(self.paths)
            self.paths += [Extent(name, begin, min(end, size)).path for begin, end in cut.tolist()]
        found, counts = spans(begins, ends)
        sample = np.repeat(np.repeat(np.arange(len(ranges)), np.diff(ranges.first)), counts)
        # Two ranges of a sample may share a page.
        new = np.ones(len(found), bool)
        new[1:] = (found[1:] != found[:-1]) | (sample[1:] != sample[:-1])
        self._extents = found[new].astype(np.uint32)
        self.first = first_of(np.bincount(sample[new], minlength=len(ranges)))

    @property
    def samples(self) -> int:
        return len(self.first) - 1

    def draws(self, order: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """The extents that are read when the samples are read in this order."""
        rows, _ = spans(self.first[order], self.first[order.astype(np.int64) + 1])
        return self._extents[rows]

    def positions(self, order: npt.NDArray[np.uint32]) -> Numbers:
        """How many extents have been read before each sample of an order, and after the last."""
        return first_of(np.diff(self.first)[order])


def _cut(low: Numbers, high: Numbers) -> Numbers:
    """The extents, begin and end, that these ranges of whole pages are cut into, in the order of the file."""
    cuts = np.unique(np.concatenate([low, high]))
    inside = np.searchsorted(cuts, high) - np.searchsorted(cuts, low)
    if inside.mean() > _DENSE:
        wide = int(np.median(high - low)) // _QUARTER // PAGE_BYTES * PAGE_BYTES
        wide = min(max(wide, PAGE_BYTES), _LONGEST)
        cuts = np.arange(low.min() // wide * wide, high.max() + wide, wide)
    first, last = np.searchsorted(cuts, low, "right") - 1, np.searchsorted(cuts, high, "left")
    covered = np.cumsum(np.bincount(first, minlength=len(cuts)) - np.bincount(last, minlength=len(cuts))) > 0
    begins, ends = cuts[:-1][covered[:-1]], cuts[1:][covered[:-1]]
    numbers, counts = spans(np.zeros(len(begins), np.int64), -(-(ends - begins) // _LONGEST))
    begins = np.repeat(begins, counts) + numbers * _LONGEST
    return np.stack([begins, np.minimum(begins + _LONGEST, np.repeat(ends, counts))], axis=1)
