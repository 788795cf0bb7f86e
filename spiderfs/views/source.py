"""A source that also shows a view of each of its files."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

from spiderfs.errors import ViewFailed
from spiderfs.sources.source import Source, Version
from spiderfs.views.pool import MakerLost
from spiderfs.views.unmade import REASONS, Unmade

log = logging.getLogger(__name__)

# No file of a source can be read by such a path, because a mount's control files are there.
_DIRECTORY = b".spiderfs/view/"
_LENGTH = "its view would have as many bytes as the file, or more than sample_max_bytes"


def view_path(path: bytes) -> bytes:
    """The path by which a `ViewSource` has the view of a file."""
    return _DIRECTORY + path


class Makers(Protocol):
    def make(self, original: bytes) -> bytes | Unmade:
        """The view of an original, or why there is none; raises MakerLost."""

    def close(self) -> None: ...


class ViewSource:
    """`inner`, and for each of its files, by `view_path`, the view that `makers` make of it.

    A view's file is identified by the original's version. It is read as a whole. Its length is part of what it is: a
    reader who knows the length asks for so many bytes and gets exactly these, or ViewFailed. A reader who does not know
    it asks for `longest_bytes`, and gets the view, or the original as it is where there is none. So where makers fail
    for a while, the first answer counts, and no reader gets bytes of two lengths for one version. A view of exactly the
    original's length would be taken for an original; such a file is shown as it is.
    """

    def __init__(self, inner: Source, makers: Makers, longest_bytes: int, count: Callable[[str], None]) -> None:
        """`count` gets the name of a counter, from one thread at a time."""
        self._inner = inner
        self._makers = makers
        self._longest_bytes = longest_bytes
        self._count = count
        self._counting = threading.Lock()
        self._told: set[str] = set()
        self.stat, self.scan, self.statvfs = inner.stat, inner.scan, inner.statvfs
        self.readlink, self.listxattr, self.getxattr = inner.readlink, inner.listxattr, inner.getxattr

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        """As `Source.read`; raises ViewFailed, too, if the view of this length cannot be made now."""
        if not path.startswith(_DIRECTORY):
            return self._inner.read(path, offset, length, version)
        path = path.removeprefix(_DIRECTORY)
        original = self._inner.read(path, 0, version.size, version)
        if length == version.size:
            return original[offset:]
        try:
            view = self._makers.make(original)
        except MakerLost as exc:
            self._tell("view_makers_lost", path, str(exc), logging.WARNING)
            if length != self._longest_bytes:
                raise ViewFailed(f"{os.fsdecode(path)}: the view cannot be made now: {exc}") from exc
            return original
        if isinstance(view, Unmade) or len(view) == version.size or len(view) > self._longest_bytes:
            reason = REASONS[view] if isinstance(view, Unmade) else _LENGTH
            if length != self._longest_bytes:
                raise ViewFailed(f"{os.fsdecode(path)}: there was a view, and now there is none: {reason}")
            self._tell("views_as_they_are", path, reason, logging.INFO)
            return original
        if length not in (len(view), self._longest_bytes):
            raise ViewFailed(f"{os.fsdecode(path)}: the view has {len(view)} bytes now, and had {length}")
        with self._counting:
            self._count("views_made")
        return view[offset:]

    def close(self) -> None:
        self._makers.close()
        self._inner.close()

    def _tell(self, counter: str, path: bytes, reason: str, level: int) -> None:
        """Count a file that is shown as it is, and name the first one of each reason."""
        with self._counting:
            self._count(counter)
            first = reason not in self._told
            self._told.add(reason)
        if first:
            log.log(level, "%s is shown as it is: %s (said once; the metrics count the others)", _named(path), reason)


def _named(path: bytes) -> str:
    return os.fsdecode(path).encode(errors="backslashreplace").decode()
