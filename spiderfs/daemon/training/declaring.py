"""Lists of samples on their way from trainers: put together from chunks, and bounded before they take memory.

A chunk is counted when it has been read, and until its list is declared or given up: one list may have so many bytes,
and the lists of all connections together. Of a list that was refused the rest is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable

from spiderfs.daemon.training.trainer import ListAssembly, SampleList
from spiderfs.errors import ProtocolError
from spiderfs.protocol import Samples


class DeclaredBytes:
    """How many bytes of lists there are on the way, of all connections; `limit` is how many there may be."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


class Declaring:
    """The lists of one connection: at most `lists` of them, each of at most `list_bytes`."""

    def __init__(self, lists: int, list_bytes: int, together: DeclaredBytes) -> None:
        self._lists = lists
        self._list_bytes = list_bytes
        self._together = together
        self._held = 0
        # Of each list since its first chunk; None: it was refused.
        self._read: dict[str, int | None] = {}
        self._assemblies: dict[str, ListAssembly] = {}

    def admit(self, chunk: Samples) -> bool:
        """Count a chunk; False for one of a list that was refused. Raises ProtocolError to refuse the list."""
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
        """The list and how many of its paths are no use, when this chunk, which was admitted, is its last.

        `done` is to be called for it then. Raises ProtocolError for a chunk that does not follow the last.
        """
        try:
            assembly = self._assembly_of(chunk, declared)
            samples = assembly.add(chunk)
        except ProtocolError:
            self._hold(-_bytes_of(chunk))
            raise
        assembly.message_bytes += _bytes_of(chunk)
        return None if samples is None else (samples, assembly.rejected)

    def _assembly_of(self, chunk: Samples, declared: Iterable[str]) -> ListAssembly:
        begun = self._assemblies.get(chunk.list)
        if chunk.first == 0:
            if len({*declared, *self._assemblies, chunk.list}) > self._lists:
                raise ProtocolError(f"more than {self._lists} lists", "too-many")
            self.done(chunk.list)
            begun = self._assemblies[chunk.list] = ListAssembly(chunk)
        if begun is None:
            raise ProtocolError(f"list {chunk.list!r}: a chunk from {chunk.first} where 0 was due")
        return begun

    def done(self, name: str) -> None:
        """Give up what is held of a list."""
        assembly = self._assemblies.pop(name, None)
        if assembly is not None:
            self._hold(-assembly.message_bytes)

    def end(self) -> None:
        """The connection has ended, with whatever was on its way."""
        self._assemblies.clear()
        self._hold(-self._held)

    def _hold(self, size: int) -> None:
        self._held += size
        self._together.held += size


def _bytes_of(chunk: Samples) -> int:
    return chunk.paths.nbytes + chunk.labels.nbytes
