"""How programs walk a tree: to look at every name, and to list the samples of a data set."""

from __future__ import annotations

import os
from pathlib import Path


def walk(root: Path) -> None:
    for directory, _, names in os.walk(root, onerror=_fail):
        for name in names:
            os.stat(os.path.join(directory, name))


def _fail(error: OSError) -> None:
    """Raise the error of a directory that cannot be listed, which os.walk would leave out."""
    raise error


def index(root: Path) -> list[tuple[str, str]]:
    """The samples of a folder, listed in the way of torchvision's ImageFolder."""
    samples = []
    for label in sorted(entry.name for entry in os.scandir(root) if entry.is_dir()):
        for directory, _, names in sorted(os.walk(root / label, onerror=_fail, followlinks=True)):
            samples += [(os.path.join(directory, name), label) for name in sorted(names)]
    return samples
