"""Which files a data set reads, in the order of its indices, and their labels."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer_hook.client import Declaration

log = logging.getLogger("trainer_hook")

Sample = tuple[str | bytes | os.PathLike[str], Any]
UNLABELLED = -1
_LABEL_MAX = 2**31 - 1


def declaration(
    dataset: Any, root: Path, directory: Path, name: str, split: str, given: Iterable[Sample] | None = None
) -> Declaration:
    """The list of a data set whose files lie below the mount `root`, which is a real path.

    Relative names are taken from the working directory if they lie in the mount there, else from `directory`. Raises
    ValueError for a data set that does not say which files it reads, unless they are `given`.
    """
    samples = _with_labels(list(given), None) if given is not None else samples_of(dataset)
    if not samples:
        raise ValueError("the data set has no samples")
    relative = _Relative(root, directory)
    paths = [relative.path(os.fsencode(path)) for path, _ in samples]
    classes = classes_of([label for _, label in samples])
    if classes.remark:
        log.warning("%s", classes.remark)
    return Declaration(name, split, paths, classes.labels, classes.numbered)


def samples_of(dataset: Any) -> list[Sample]:
    """(path, label) by index, from `.samples` or `.imgs` (with `.targets` where they hold paths only).

    Subset and ConcatDataset are followed to what they are made of. Raises ValueError where nothing is found.
    """
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        base = samples_of(dataset.dataset)
        return [base[int(index)] for index in dataset.indices]
    if hasattr(dataset, "datasets"):
        return [sample for part in dataset.datasets for sample in samples_of(part)]
    for attribute in ("samples", "imgs"):
        entries = getattr(dataset, attribute, None)
        if isinstance(entries, Sequence | np.ndarray) and len(entries):
            return _with_labels(entries, getattr(dataset, "targets", None))
    raise ValueError(f"{type(dataset).__name__} has no .samples or .imgs: {_GIVE_SAMPLES}")


_GIVE_SAMPLES = "give samples=[(path, label), ...] in the order of its indices"


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
    """A class for each sample, -1 for none; `numbered` if it is also the place of the class in a model's output."""

    labels: npt.NDArray[np.int32]
    numbered: bool
    remark: str = ""


def classes_of(labels: Sequence[Any]) -> Classes:
    """Classes are whole numbers from 0 on, or texts; a sample without a class stands in for none, nor another for it.

    Where one label is something else (a number with a fraction, a vector), they are targets, and none of them a class.
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
            f"the labels are not numbers of classes: the hook numbers the {len(number_of)} different ones, for "
            "stand-ins alone; call hook.losses where losses are needed",
        )
    return Classes(
        np.full(len(plain), UNLABELLED, np.int32),
        False,
        "the labels are no classes (whole numbers, or texts): no sample stands in for another; call hook.losses where "
        "losses are needed",
    )


def _plain(label: Any) -> Any:
    """A number or text of Python's; what holds several, or is neither, as it is."""
    if isinstance(label, bytes):
        return label.decode(errors="replace")
    if type(label).__module__ != "builtins" and hasattr(label, "item"):
        try:
            label = label.item()
        except (TypeError, ValueError, RuntimeError):
            return label
    if isinstance(label, bool):
        return int(label)
    # Enumerations of numbers or texts, and the like.
    for kind in (int, str):
        if isinstance(label, kind):
            return kind(label)
    return label


# -- paths


class _Relative:
    """Takes the mount's path off, a million times a second where the path simply begins with it."""

    def __init__(self, root: Path, directory: Path) -> None:
        self._root = os.fsencode(root)
        self._directory = os.fsencode(directory)
        # What a path may begin with, and what stands for that in the mount.
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
        # A path outside of the mount comes out with "..", and the daemon says how many of those there are.
        return os.path.relpath(self._resolved(path), self._root)

    def _base_of(self, path: bytes) -> bytes:
        """What relative paths begin from, decided by the first."""
        if self._base is None:
            here = os.getcwdb()
            found = os.path.join(here, path)
            lies_here = self._inside(self._resolved(found)) is not None
            lies_there = self._inside(self._resolved(os.path.join(self._directory, path))) is not None
            self._base = here if lies_here and (not lies_there or os.path.lexists(found)) else self._directory
        return self._base

    def _resolved(self, path: bytes) -> bytes:
        """By the real path of its directory: a file of a mount may be a link, and is that link's name there."""
        directory, name = os.path.split(path)
        if name in (b"", b".", b".."):
            return os.path.realpath(path)
        if directory not in self._real:
            self._real[directory] = os.path.realpath(directory)
        return os.path.join(self._real[directory], name)

    def _inside(self, path: bytes) -> bytes | None:
        if path == self._root:
            return b""
        return path[len(self._root) + 1 :] if path.startswith(self._root + b"/") else None
