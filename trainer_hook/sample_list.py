"""Which files a data set reads, in the order of its indices, and their labels."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer_hook.client import Declaration

Sample = tuple[str | bytes | os.PathLike[str], int]
UNLABELLED = -1


def declaration(
    dataset: Any, root: Path, directory: Path, name: str, split: str, given: Iterable[Sample] | None = None
) -> Declaration:
    """The list of a data set whose files lie below the mount `root`; relative names are taken from `directory`.

    Raises ValueError for a data set that does not say which files it reads, unless they are `given`.
    """
    samples = list(given) if given is not None else samples_of(dataset)
    if not samples:
        raise ValueError("the data set has no samples")
    relative = _Relative(root, directory)
    paths = [relative.path(os.fsencode(path)) for path, _ in samples]
    labels = np.fromiter((label for _, label in samples), np.int32, len(samples))
    return Declaration(name, split, paths, labels)


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
        if isinstance(entries, Sequence) and len(entries):
            return _with_labels(entries, getattr(dataset, "targets", None))
    kind = type(dataset).__name__
    raise ValueError(f"{kind} has no .samples or .imgs: give samples=[(path, label), ...] in the order of its indices")


def _with_labels(entries: Sequence[Any], targets: Sequence[Any] | None) -> list[Sample]:
    if not isinstance(entries[0], str | bytes | os.PathLike):
        return [(path, int(label)) for path, label, *_ in entries]
    if targets is None:
        return [(path, UNLABELLED) for path in entries]
    return [(path, int(label)) for path, label in zip(entries, targets, strict=True)]


class _Relative:
    """Takes the mount's path off, a million times a second where the path simply begins with it."""

    def __init__(self, root: Path, directory: Path) -> None:
        self._roots = {os.fsencode(root) + b"/", os.path.realpath(os.fsencode(root)) + b"/"}
        self._root = os.fsencode(root)
        self._directory = os.fsencode(directory)

    def path(self, path: bytes) -> bytes:
        for root in self._roots:
            if path.startswith(root) and b"/." not in path and b"//" not in path:
                return path[len(root) :]
        # A path outside of the mount comes out with "..", and the daemon says how many of those there are.
        return os.path.relpath(os.path.join(self._directory, path), self._root)
