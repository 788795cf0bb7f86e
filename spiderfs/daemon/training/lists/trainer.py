"""A trainer as the daemon knows it: which process it is, and the lists that it declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np
import numpy.typing as npt

from spiderfs.errors import ProtocolError
from spiderfs.protocol import Hello, Samples
from spiderfs.views.tree import VIEWS_DIRECTORY


class SamplePaths(Sequence[bytes]):
    """Relative paths in one piece of memory; b"" stands for a path that cannot lie below the mount.

    This takes 8 bytes a path beside the text; a list of `bytes` objects would take 33.
    """

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._ends = np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == 0)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        end = int(self._ends[index])
        begin = self._text.rfind(b"\0", 0, end) + 1
        return self._text[begin:end]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._text.split(b"\0")[:-1])


@dataclass(frozen=True, eq=False)
class SampleList:
    """A whole declared list: sample i has path `paths[i]` and label `labels[i]` (-1: none).

    `teaches` is whether the trainer has said that it will send batches of the list.

    The paths are there only while the list is declared. With eight ranks and a million samples they would take 0.6 GB.
    """

    name: str
    split: str
    paths: SamplePaths
    labels: npt.NDArray[np.int32]
    teaches: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def without_paths(self) -> SampleList:
        """The list as it is kept once its files are known."""
        return replace(self, paths=SamplePaths(b""))


@dataclass(frozen=True)
class Declared:
    """What became of a list that was declared: how many of its paths are unknown, and what the trainer should know."""

    unknown: int = 0
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class TrainerStatus:
    """`lists` has the number of samples by the list's name."""

    client: str
    pid: int
    rank: int
    lists: Mapping[str, int]
    batches: int


@dataclass(eq=False)
class Trainer:
    """`pid` and `uid` come from the kernel (SO_PEERCRED); the pid is 0 for a process of a foreign pid namespace."""

    pid: int
    uid: int
    hello: Hello
    lists: dict[str, SampleList] = field(default_factory=dict)
    batches: int = 0

    @property
    def rank(self) -> int:
        return self.hello.rank

    @property
    def job_id(self) -> str:
        return self.hello.job

    def status(self) -> TrainerStatus:
        lists = {name: len(samples) for name, samples in self.lists.items()}
        return TrainerStatus(self.hello.client, self.pid, self.rank, lists, self.batches)


class ListAssembly:
    """Puts the chunks of a list together; `rejected` counts paths that cannot lie below the mount."""

    def __init__(self, first: Samples) -> None:
        self._head = first
        self._texts: list[bytes] = []
        self._labels: list[npt.NDArray[np.int32]] = []
        self._samples = 0
        self.rejected = 0
        self.message_bytes = 0
        """Bytes of the chunks that were added; `declaring.py` counts them."""

    def add(self, chunk: Samples) -> SampleList | None:
        """Add a chunk; returns the list if this was its last. Raises ProtocolError if the chunk does not come next."""
        head = self._head
        if (chunk.split, chunk.total, chunk.first) != (head.split, head.total, self._samples):
            raise ProtocolError(f"list {chunk.list!r}: a chunk from {chunk.first} where {self._samples} was due")
        paths = chunk.split_paths()
        good = [path if is_below_mount(path) else b"" for path in paths]
        self.rejected += sum(bool(path) and not kept for path, kept in zip(paths, good, strict=True))
        self._texts.append(b"".join(path + b"\0" for path in good))
        self._labels.append(chunk.labels)
        self._samples += len(paths)
        if self._samples < head.total:
            return None
        paths, labels = SamplePaths(b"".join(self._texts)), np.concatenate(self._labels)
        return SampleList(head.list, head.split, paths, labels, bool(head.teaches))


def is_below_mount(path: bytes) -> bool:
    """Whether a relative path lies below the mount, and is written in its one normal form.

    Control files are no samples, so of the control directory only the views count.
    """
    names = path.split(b"/")
    if names[0] == b".spiderfs" and not path.startswith(VIEWS_DIRECTORY + b"/"):
        return False
    return not any(name in (b"", b".", b"..") for name in names)
