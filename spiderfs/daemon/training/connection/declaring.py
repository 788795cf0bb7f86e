"""The lists that trainers are declaring: each is put together from chunks, and bounded before it takes memory.

A chunk counts from when it was read until its list is declared or given up. There is a limit for the bytes of one list,
and one for the bytes of all lists that all connections declare at a time. After a list was refused, its further chunks
are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from spiderfs.daemon.training.trainer import SampleList
from spiderfs.errors import ProtocolError
from spiderfs.protocol import Samples
from spiderfs.views.tree import VIEWS_DIRECTORY


class DeclaredBytes:
    """The bytes of all lists that are being declared, over all connections; `limit` is how many there may be."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


@dataclass
class _Begun:
    """What there is of a list; `rejected` counts paths that cannot lie below the mount."""

    split: str
    total: int
    teaches: bool
    texts: list[bytes] = field(default_factory=list)
    labels: list[npt.NDArray[np.int32]] = field(default_factory=list)
    samples: int = 0
    rejected: int = 0
    message_bytes: int = 0


class Declaring:
    """The lists that one connection declares: at most `lists` of them, each of at most `list_bytes`."""

    def __init__(self, lists: int, list_bytes: int, together: DeclaredBytes) -> None:
        self._lists = lists
        self._list_bytes = list_bytes
        self._together = together
        self._held = 0
        # Bytes of each list since its first chunk; None if the list was refused.
        self._read: dict[str, int | None] = {}
        self._begun: dict[str, _Begun] = {}

    def admit(self, chunk: Samples) -> bool:
        """Count a chunk; False if its list was refused before. Raises ProtocolError to refuse the list now."""
        before = self._read.get(chunk.list, 0) if chunk.first else 0
        if before is None:
            return False
        size = _bytes_of(chunk)
        self._read[chunk.list] = None
        if before + size > self._list_bytes:
            raise ProtocolError(
                f"list {chunk.list!r}: more than {self._list_bytes} bytes of paths and labels", "too-large"
            )
        if self._together.held + size > self._together.limit:
            raise ProtocolError(
                f"list {chunk.list!r}: the lists on their way from all trainers take more than {self._together.limit} "
                "bytes: declare it again when others are done",
                "too-many",
            )
        self._read[chunk.list] = before + size
        self._hold(size)
        return True

    def add(self, chunk: Samples, declared: Iterable[str]) -> tuple[SampleList, int] | None:
        """Add a chunk that was admitted; returns the list and how many of its paths are unusable, if this was its last.

        The caller then has to call `done`. Raises ProtocolError for a chunk that does not follow the one before.
        """
        try:
            begun, paths = self._begun_by(chunk, declared), chunk.split_paths()
        except ProtocolError:
            self._hold(-_bytes_of(chunk))
            raise
        good = [path if is_below_mount(path) else b"" for path in paths]
        begun.rejected += sum(bool(path) and not kept for path, kept in zip(paths, good, strict=True))
        begun.texts.append(b"".join(path + b"\0" for path in good))
        begun.labels.append(chunk.labels)
        begun.samples += len(paths)
        begun.message_bytes += _bytes_of(chunk)
        if begun.samples < chunk.total:
            return None
        text, labels = b"".join(begun.texts), np.concatenate(begun.labels)
        return SampleList(chunk.list, chunk.split, text, labels, begun.teaches), begun.rejected

    def _begun_by(self, chunk: Samples, declared: Iterable[str]) -> _Begun:
        """What there is of the list whose next chunk this is."""
        begun = self._begun.get(chunk.list)
        if chunk.first == 0:
            if len({*declared, *self._begun, chunk.list}) > self._lists:
                raise ProtocolError(f"more than {self._lists} lists", "too-many")
            self.done(chunk.list)
            begun = self._begun[chunk.list] = _Begun(chunk.split, chunk.total, bool(chunk.teaches))
        due = 0 if begun is None else begun.samples
        if begun is None or (chunk.split, chunk.total, chunk.first) != (begun.split, begun.total, due):
            raise ProtocolError(f"list {chunk.list!r}: a chunk from {chunk.first} where {due} was due")
        return begun

    def __contains__(self, name: object) -> bool:
        """Whether a list with this name is being declared."""
        return name in self._begun

    def done(self, name: str) -> None:
        """Forget the chunks of a list."""
        begun = self._begun.pop(name, None)
        if begun is not None:
            self._hold(-begun.message_bytes)

    def end(self) -> None:
        """The connection has ended: forget the lists that it was declaring."""
        self._begun.clear()
        self._hold(-self._held)

    def _hold(self, size: int) -> None:
        self._held += size
        self._together.held += size


def _bytes_of(chunk: Samples) -> int:
    return chunk.paths.nbytes + chunk.labels.nbytes


def is_below_mount(path: bytes) -> bool:
    """Whether a relative path lies below the mount, and is written in its one normal form.

    Control files are no samples, so of the control directory only the views count.
    """
    names = path.split(b"/")
    if names[0] == b".spiderfs" and not path.startswith(VIEWS_DIRECTORY + b"/"):
        return False
    return not any(name in (b"", b".", b"..") for name in names)
