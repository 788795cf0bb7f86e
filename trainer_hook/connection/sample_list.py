"""The list of a data set: the files that it reads, in the order of its indices, and their labels."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spiderfs.protocol import DEFAULT_LIMITS, Samples
from spiderfs.protocol.requests import address_of
from trainer_hook.ranges.files import rows_of_dataset
from trainer_hook.ranges.mappings import read_no_pages_around
from trainer_hook.ranges.sample_ranges import Path, SampleGrid, SampleRanges

log = logging.getLogger("trainer_hook")

Sample = tuple[str | bytes | os.PathLike[str], Any]
UNLABELLED = -1
_LABEL_MAX = 2**31 - 1
# One message declares at most this many samples: some 4 MB of paths.
_CHUNK = 65_536


@dataclass(frozen=True, eq=False)
class Declaration:
    """A list as a trainer declares it: the samples' paths below the mount, and one label for each."""

    name: str
    split: str
    paths: list[bytes]
    labels: npt.NDArray[np.int32]
    numbered: bool = True
    """Whether a label is also the index of its class in the model's output."""
    sends_batches: bool = False
    """Whether batches of the list will be sent."""
    grid: SampleGrid | None = None
    """The extents of files that are the list's entries, where samples are ranges."""
    learns: bool = False
    """Whether the ranges are learned: the list has none at first, and others take its place (`learned_declaration`)."""

    @property
    def targets(self) -> npt.NDArray[np.int32] | None:
        """The labels, for the cross-entropy; None if they are not indices of the model's output."""
        return self.labels if self.numbered else None

    def chunks(self) -> Iterator[Samples]:
        """The messages that declare the list; a sample outside of the mount has an empty path there."""
        for first in range(0, len(self.paths), _CHUNK):
            some = self.paths[first : first + _CHUNK]
            paths = b"".join((b"" if _is_outside(path) else path) + b"\0" for path in some)
            labels = self.labels[first : first + _CHUNK]
            encoded = np.frombuffer(paths, np.uint8)
            yield Samples(self.name, self.split, len(self.paths), first, labels, encoded, self.sends_batches)


def declaration(
    dataset: Any,
    root: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    name: str,
    split: str,
    given: Iterable[Sample] | None = None,
    *,
    is_mount: bool = True,
) -> Declaration:
    """The list of a data set whose files lie in the mount `root`, which is a real path, if it `is_mount`.

    `root` may also be `spiderfs://NAME`. Relative paths start at the working directory if that leads into the mount,
    and otherwise at `directory`. Raises ValueError if the data set does not say which files it reads and they are not
    `given` either, or for a `split` that no message can carry.
    """
    try:
        split_bytes = len(split.encode())
    except UnicodeEncodeError:
        raise ValueError(f"split={split[:40]!r}: give a text that UTF-8 has letters for") from None
    if split_bytes > DEFAULT_LIMITS.text_bytes:
        raise ValueError(f"split of {split_bytes} bytes: give at most {DEFAULT_LIMITS.text_bytes}")
    if given is not None and not isinstance(given, Iterable):
        raise ValueError(f"samples is a {type(given).__name__}: {_GIVE_SAMPLES}")
    samples = _with_labels(list(given), None) if given is not None else samples_of(dataset)
    _check_length(dataset, samples, exactly=given is not None)
    if not samples:
        raise ValueError("the data set has no samples")
    relative = (_Relative if address_of(root) is None else _ServedRelative)(root, directory)
    paths = [relative.path(os.fsencode(path)) for path, _ in samples]
    outside = [number for number, path in enumerate(paths) if _is_outside(path)]
    if outside and is_mount:
        log.warning(
            "%d of %d samples of the list %r lie outside of %s, such as %s: have the data set read the files below %s",
            *(len(outside), len(paths), name, root, os.fspath(samples[outside[0]][0]), directory),
        )
    classes = classes_of([label for _, label in samples])
    if classes.remark:
        log.warning("%s", classes.remark)
    return Declaration(name, split, paths, classes.labels, classes.numbered)


def range_declaration(
    ranges: SampleRanges, samples: int | None, root: str | os.PathLike[str], name: str
) -> Declaration:
    """The list of a data set whose samples are ranges of files in the mount `root`, which is a real path.

    Raises ValueError for files outside of it, ranges outside of their file, or another number of samples.
    """
    if address_of(root) is not None:
        raise ValueError(f"ranges of {root}: give paths in a mount, for what is served by name has no pages")
    # Ranges without bytes may have any place.
    ranges = ranges.keep(ranges.lengths != 0)
    ranges.check(samples)
    real, names = _names_below(root, ranges.paths)
    for path, below in zip(ranges.paths, names, strict=True):
        if _is_outside(below):
            raise ValueError(f"{os.fsdecode(path)} does not lie below {root}: give ranges of files in the mount")
    return _of_grid(name, real, SampleGrid(ranges, names))


def found_declaration(dataset: Any, root: str | os.PathLike[str], name: str, *, is_mount: bool) -> Declaration | None:
    """The list of a data set that itself shows its samples' ranges, None if it does not; without any, it is empty."""
    reason = "its rows lie in no file below the mount"
    try:
        ranges = rows_of_dataset(dataset)
    except ValueError as exc:
        ranges, reason = SampleRanges.none(len(dataset)), str(exc)
    if ranges is None:
        return None
    ranges = SampleRanges.none(len(ranges)) if address_of(root) is not None else _inside(root, ranges)
    if not len(ranges.files) and is_mount:
        log.warning("the reads of the list %r are not planned: %s; give ranges= if you know them", name, reason)
    real, names = _names_below(root, ranges.paths)
    return _of_grid(name, real, SampleGrid(ranges, names))


def learned_declaration(ranges: SampleRanges, root: str | os.PathLike[str], name: str) -> Declaration:
    """The list of a data set whose samples' ranges are learned, with those that are known."""
    ranges = _inside(root, ranges)
    real, names = _names_below(root, ranges.paths)
    return replace(_of_grid(name, real, SampleGrid(ranges, names)), learns=True)


def _inside(root: str | os.PathLike[str], ranges: SampleRanges) -> SampleRanges:
    """The ranges inside the mount that their files still have."""
    _, names = _names_below(root, ranges.paths)
    places = zip(ranges.paths, names, strict=True)
    sizes = [0 if _is_outside(name) or not os.path.isfile(path) else os.path.getsize(path) for path, name in places]
    return ranges.keep(ranges.offsets + ranges.lengths <= np.array(sizes, np.int64)[ranges.files])


def _names_below(root: str | os.PathLike[str], paths: Sequence[Path]) -> tuple[list[bytes], list[bytes]]:
    """The real paths of files, and their paths below the mount."""
    # A file of the Hub is a link to where its bytes are.
    real = [os.path.realpath(os.fsencode(path)) for path in paths]
    relative = _Relative(root, root)
    return real, [relative.path(path) for path in real]


def _of_grid(name: str, real: Sequence[bytes], grid: SampleGrid) -> Declaration:
    read_no_pages_around(frozenset(real))
    return Declaration(name, name, grid.paths, np.full(len(grid.paths), UNLABELLED, np.int32), False, grid=grid)


def samples_of(dataset: Any) -> list[Sample]:
    """A pair (path, label) for each index, from `.samples` or `.imgs`; labels come from `.targets` if those lack them.

    Raises ValueError if there is no such attribute, or if it is longer than the data set.
    """
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        base = samples_of(dataset.dataset)
        return [base[int(index)] for index in dataset.indices]
    if hasattr(dataset, "datasets"):
        return [sample for part in dataset.datasets for sample in samples_of(part)]
    found = " has no .samples or .imgs"
    for attribute in ("samples", "imgs"):
        entries = getattr(dataset, attribute, None)
        if isinstance(entries, Sequence | np.ndarray) and len(entries):
            samples = _with_labels(entries, getattr(dataset, "targets", None))
            _check_length(dataset, samples)
            return samples
        if entries is not None:
            what = "empty" if isinstance(entries, Sequence | np.ndarray) else f"a {type(entries).__name__}"
            found = f".{attribute} is {what}"
    raise ValueError(f"{type(dataset).__name__}{found}: {_GIVE_SAMPLES}")


_GIVE_SAMPLES = "give samples=[(path, label), ...] in the order of its indices"


def _check_length(dataset: Any, samples: list[Sample], exactly: bool = False) -> None:
    """Raise ValueError if the list is longer than the data set: its indices mean some of the list, but not which.

    With `exactly`, it must not be shorter either.
    """
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        return
    if length < len(samples) or (exactly and length != len(samples)):
        kind = type(dataset).__name__
        raise ValueError(f"the {kind} has {length} samples, and its list {len(samples)}: {_GIVE_SAMPLES}")


def _with_labels(entries: Sequence[Any] | npt.NDArray[Any], targets: Sequence[Any] | None) -> list[Sample]:
    try:
        if not len(entries) or not isinstance(entries[0], str | bytes | os.PathLike):
            return [(entry[0], entry[1] if len(entry) > 1 else None) for entry in entries]
        if targets is None:
            return [(path, None) for path in entries]
        return list(zip(entries, targets, strict=True))
    except (TypeError, KeyError, IndexError, ValueError) as exc:
        raise ValueError(f"the samples are not (path, label), or paths with as many targets: {_GIVE_SAMPLES}") from exc


# -- labels


class Classes(NamedTuple):
    """The labels of all samples, as numbers of classes; -1 means none.

    `numbered`: see `Declaration`.
    """

    labels: npt.NDArray[np.int32]
    numbered: bool
    remark: str = ""


def classes_of(labels: Sequence[Any]) -> Classes:
    """The classes that labels name: whole numbers from 0 on, or texts.

    A sample without a class is never a substitute, and has none. If one label is neither (a fraction, a vector), then
    all labels are targets of a regression, and no sample has a class.
    """
    plain = [_plain(label) for label in labels]
    kinds = {type(label) for label in plain} - {type(None)}
    if kinds <= {int}:
        known = np.array([UNLABELLED if label is None else max(label, UNLABELLED) for label in plain], object)
        if known.max() <= _LABEL_MAX:
            return Classes(known.astype(np.int32), True)
    if kinds <= {int, str}:
        texts = [None if label is None else str(label) for label in plain]
        if kinds == {str} and all(text is None or (text.isdecimal() and len(text) < 10) for text in texts):
            return Classes(np.array([UNLABELLED if text is None else int(text) for text in texts], np.int32), True)
        number_of = {text: number for number, text in enumerate(sorted({text for text in texts if text is not None}))}
        numbers = [UNLABELLED if text is None else number_of[text] for text in texts]
        return Classes(
            np.array(numbers, np.int32),
            False,
            f"the labels are not numbers of classes: the hook numbers the {len(number_of)} different labels "
            "itself, which is enough for substitutes; if your policy or sampler needs losses, call hook.losses",
        )
    return Classes(
        np.full(len(plain), UNLABELLED, np.int32),
        False,
        "the labels are not classes (whole numbers or texts), so no sample substitutes for another; if your policy or "
        "sampler needs losses, call hook.losses",
    )


def _plain(label: Any) -> Any:
    """A label as a number or text of Python; a label that is neither is returned as it is."""
    if isinstance(label, bytes):
        return label.decode(errors="replace")
    if type(label).__module__ != "builtins" and hasattr(label, "item"):
        try:
            label = label.item()
        except (TypeError, ValueError, RuntimeError):
            return label
    if isinstance(label, bool):
        return int(label)
    # Enumerations of numbers or texts become plain numbers or texts.
    for kind in (int, str):
        if isinstance(label, kind):
            return kind(label)
    return label


# -- paths


def _is_outside(path: bytes) -> bool:
    return path == b".." or path.startswith(b"../")


class _Relative:
    """Makes paths relative to the mount: a million per second if they begin with the mount's path."""

    def __init__(self, root: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
        self._root = os.fsencode(root)
        self._directory = os.fsencode(directory)
        # Beginnings of paths, and the directory in the mount that each of them leads to.
        self._beginnings = {self._root + b"/": b""}
        inside = self._inside(os.path.realpath(self._directory))
        if inside is not None:
            self._beginnings[self._directory + b"/"] = inside and inside + b"/"
        self._real: dict[bytes, bytes] = {}
        self._base: bytes | None = None

    def path(self, path: bytes) -> bytes:
        if not path.startswith(b"/"):
            path = os.path.join(self._base_of(path), path)
        if b"/." not in path and b"//" not in path:
            for beginning, inside in self._beginnings.items():
                if path.startswith(beginning):
                    return inside + path[len(beginning) :]
        # A path outside of the mount begins with "..".
        return os.path.relpath(self._resolved(path), self._root)

    def _base_of(self, path: bytes) -> bytes:
        """The directory at which relative paths start; the first path decides."""
        if self._base is None:
            here = os.getcwdb()
            found = os.path.join(here, path)
            lies_here = self._inside(self._resolved(found)) is not None
            lies_there = self._inside(self._resolved(os.path.join(self._directory, path))) is not None
            self._base = here if lies_here and (not lies_there or os.path.lexists(found)) else self._directory
        return self._base

    def _resolved(self, path: bytes, links: int = 40) -> bytes:
        """The path with all links resolved outside of the mount, which knows a last name by itself."""
        directory, name = os.path.split(path)
        if name in (b"", b".", b".."):
            return os.path.realpath(path)
        if directory not in self._real:
            self._real[directory] = os.path.realpath(directory)
        resolved = os.path.join(self._real[directory], name)
        # What lies outside of the mount may be a link into it.
        if links and self._inside(resolved) is None and os.path.islink(resolved):
            return self._resolved(os.path.join(self._real[directory], os.readlink(resolved)), links - 1)
        return resolved

    def _inside(self, path: bytes) -> bytes | None:
        if path == self._root:
            return b""
        return path[len(self._root) + 1 :] if path.startswith(self._root + b"/") else None


class _ServedRelative:
    """Makes `spiderfs://NAME/a` relative to what is served as NAME; other paths start at the directory there."""

    def __init__(self, root: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
        self._beginning = os.fsencode(root) + b"/"
        self._directory = os.fsencode(directory) + b"/"

    def path(self, path: bytes) -> bytes:
        if b"://" not in path and not path.startswith(b"/"):
            path = self._directory + path
        if not path.startswith(self._beginning):
            return b"../" + path
        below = path[len(self._beginning) :]
        return os.path.normpath(below) if b"." in below or b"//" in below else below
