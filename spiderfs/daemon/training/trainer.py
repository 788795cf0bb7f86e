"""Trainers, and the lists of samples that they declare.

A list is declared by paths (`SampleList`). The manager knows it by files (`KnownList`), and what it knows is shared by
all jobs that have declared the list.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import trio
import xxhash

from spiderfs.core.policy import Key
from spiderfs.protocol import Hello
from spiderfs.vfs.catalogue import Catalogue, Node
from spiderfs.vfs.lister import MOST_LINKS, Lister

# How many samples are looked up between two chances for other tasks, in 5 ms.
_AT_A_TIME = 500

Oldest = Callable[[npt.NDArray[np.uint32], int], npt.NDArray[np.int64] | None]
"""Chooses that many of the rows of waiting batches with these samples, or none of them if it does not know them all."""


@dataclass(frozen=True)
class Declared:
    """What became of a declared list: how many paths are unknown, an `example`, and what the trainer should know."""

    unknown: int = 0
    warnings: Sequence[str] = ()
    example: bytes = field(default=b"", compare=False)
    oldest: Oldest | None = field(default=None, compare=False)
    """Chooses among rows of batches of the list that wait; the others are dropped. None if all have to wait."""


@dataclass(eq=False)
class Trainer:
    """`pid` and `uid` come from the kernel (SO_PEERCRED); the pid is 0 for a process of a foreign pid namespace."""

    pid: int
    uid: int
    hello: Hello
    lists: dict[str, int] = field(default_factory=dict)
    """The number of samples of each list that was declared, by its name."""
    batches: int = 0

    @property
    def rank(self) -> int:
        return self.hello.rank

    @property
    def job_id(self) -> str:
        return self.hello.job

    def status(self) -> dict[str, Any]:
        figures = {"client": self.hello.client, "pid": self.pid, "rank": self.rank}
        return figures | {"lists": self.lists, "batches": self.batches}


@dataclass(frozen=True, eq=False)
class SampleList:
    """A whole declared list: sample i has path `paths[i]` and label `labels[i]` (-1: none).

    `text` has the paths, each with a zero byte after it; a list of `bytes` would take another 41 a path. An empty path
    is one that cannot lie below the mount. `sends_batches` is whether the trainer has said that it will send batches of
    the list.
    """

    name: str
    split: str
    text: bytes
    labels: npt.NDArray[np.int32]
    sends_batches: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def paths(self) -> list[bytes]:
        """The paths, split again at each call."""
        return self.text.split(b"\0")[:-1]

    @property
    def digest(self) -> str:
        """Two declarations have one if they name the same files with the same labels in the same order."""
        return xxhash.xxh3_64_hexdigest(self.text[:-1] + self.labels.tobytes())

    def leave_out_contradictions(self, inodes: npt.NDArray[np.uint64]) -> None:
        """Make a file unknown that the list names with different labels: for which samples may it stand in?"""
        label_of: dict[int, int] = {}
        contradicted = set()
        for inode, label in zip(inodes.tolist(), self.labels.tolist(), strict=True):
            if label_of.setdefault(inode, label) != label:
                contradicted.add(inode)
        if contradicted:
            inodes[np.isin(inodes, np.array(sorted(contradicted), np.uint64))] = 0


class KnownList:
    """A declared list, whose samples and files do not change: sample i is the file `inodes[i]`, 0 if it is unknown."""

    def __init__(self, digest: str, samples: SampleList, inodes: npt.NDArray[np.uint64]) -> None:
        self.digest = digest
        self.name = f"{samples.name} ({samples.split})"
        # -1 stands for no label. Each of these samples gets a label of its own, below all labels that can be declared,
        # which have 32 bits: so no two of them have the same label.
        own = -(1 << 32) - np.arange(len(samples), dtype=np.int64)
        self.labels = np.where(samples.labels == -1, own, samples.labels)
        self._know(inodes)

    def _know(self, inodes: npt.NDArray[np.uint64]) -> None:
        self.inodes = inodes
        self.superseded: dict[int, bytes] = {}
        """The paths of those files that have another version by now, as far as that is known."""
        self.followed_s = -math.inf
        """When these were last looked for, and some not found."""
        self.keys: list[int] = inodes.tolist()
        self.index_of = {inode: index for index, inode in enumerate(self.keys) if inode}
        indices = (self.index_of.get(inode, index) for index, inode in enumerate(self.keys))
        self.one_of_file = np.fromiter(indices, np.uint32, len(self.keys))
        """For each sample, the sample of the same file that `index_of` knows."""

    def with_files(self, inodes: npt.NDArray[np.uint64]) -> KnownList:
        """The list of the same samples, which are these files now."""
        found = copy(self)
        found._know(inodes)
        found.superseded = {inode: path for inode, path in self.superseded.items() if inode in found.index_of}
        return found

    @property
    def label_of(self) -> dict[Key, int]:
        """The label of each known file, in the order of the list."""
        labels: list[int] = self.labels.tolist()
        return {inode: labels[index] for index, inode in enumerate(self.keys) if self.index_of.get(inode) == index}


async def inodes_of(paths: Sequence[bytes], catalogue: Catalogue, lister: Lister) -> npt.NDArray[np.uint64]:
    """The file that each path leads to, also by links, 0 for a path without one; lists directories not known yet."""
    inodes = np.zeros(len(paths), np.uint64)
    indices: Sequence[int] = range(len(paths))
    for _ in range(MOST_LINKS + 1):
        links: list[tuple[int, Node]] = []
        listed = await lister.directories({path.rpartition(b"/")[0] for path in paths}, ttl_s=60.0)
        for number, (index, path) in enumerate(zip(indices, paths, strict=True)):
            directory, _, name = path.rpartition(b"/")
            parent = listed.get(directory)
            dentry = None if parent is None else catalogue.find(parent.inode, name)
            if parent is None or dentry is None:
                pass
            elif stat.S_ISREG(dentry.stat.mode):
                inodes[index] = dentry.inode
            elif stat.S_ISLNK(dentry.stat.mode):
                links.append((index, dentry.below(parent)))
            if number % _AT_A_TIME == 0:
                await trio.lowlevel.checkpoint()
        if not links:
            break
        targets = await lister.targets([link for _, link in links])
        led = [(index, target) for (index, _), target in zip(links, targets, strict=True) if target is not None]
        indices, paths = [index for index, _ in led], [target for _, target in led]
    return inodes
