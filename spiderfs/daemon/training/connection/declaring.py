"""The lists that trainers are declaring: each is put together from chunks, and bounded before it takes memory.

A chunk counts from when it was read until its list is declared or given up. There is a limit for the bytes of one list,
and one for the bytes of all lists that all connections declare at a time. After a list was refused, its further chunks
are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable

from spiderfs.daemon.training.lists.trainer import ListAssembly, SampleList
from spiderfs.errors import ProtocolError
from spiderfs.protocol import Samples


class DeclaredBytes:
    """The bytes of all lists that are being declared, over all connections; `limit` is how many there may be."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


class Declaring:
    """The lists that one connection declares: at most `lists` of them, each of at most `list_bytes`."""

    def __init__(self, lists: int, list_bytes: int, together: DeclaredBytes) -> None:
        self._lists = lists
        self._list_bytes = list_bytes
        self._together = together
        self._held = 0
        # Bytes of each list since its first chunk; None if the list was refused.
        self._read: dict[str, int | None] = {}
        self._assemblies: dict[str, ListAssembly] = {}

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

    def has_begun(self, name: str) -> bool:
        """Whether a list with this name is being declared."""
        return name in self._assemblies

    def done(self, name: str) -> None:
        """Forget the chunks of a list."""
        assembly = self._assemblies.pop(name, None)
        if assembly is not None:
            self._hold(-assembly.message_bytes)

    def end(self) -> None:
        """The connection has ended: forget the lists that it was declaring."""
        self._assemblies.clear()
        self._hold(-self._held)

    def _hold(self, size: int) -> None:
        self._held += size
        self._together.held += size


def _bytes_of(chunk: Samples) -> int:
    return chunk.paths.nbytes + chunk.labels.nbytes
