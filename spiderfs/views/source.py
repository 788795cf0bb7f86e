"""A source that also shows a view of each of its files."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from spiderfs.errors import ViewFailed
from spiderfs.sources.source import FromPeer, Source, Version
from spiderfs.views.pool import MakerLost, MakerPool
from spiderfs.views.recipe import ORIGINAL, Unmade
from spiderfs.views.tree import Forms, TreeSource

log = logging.getLogger(__name__)

_LENGTH = "its view would have as many bytes as the file, or more than sample_max_bytes"


def unknown_length(longest_bytes: int) -> int:
    """The length that a reader asks for if it does not know a view's length: more than any file with a view has."""
    return longest_bytes + 1


class ViewSource(TreeSource):
    """A `TreeSource` that gives the bytes of views where `forms` shows these; `makers` make them.

    A view's file is identified by the original's version. It is read as a whole. Its length is part of what it is: a
    reader who knows the length asks for that many bytes and gets exactly these, or ViewFailed. A reader who does not
    know it asks for `unknown_length`, and gets the view, or the original as it is where there is none. So where makers
    fail for a while, the first answer counts, and no reader gets bytes of two lengths for one version. A reader who
    asks for as many bytes as the original has gets the original: so there is no view of exactly that length, and such a
    file is shown as it is. So are files of more than `longest_bytes`; any piece of them may be read.
    """

    def __init__(
        self, inner: Source, forms: Forms, makers: MakerPool, longest_bytes: int, count: Callable[[str], None]
    ) -> None:
        """`count` gets the name of a counter, from one thread at a time."""
        super().__init__(inner, forms)
        self._makers = makers
        self._longest_bytes = longest_bytes
        self._unknown_length = unknown_length(longest_bytes)
        self._count = count
        self._counting = threading.Lock()
        self._told: set[str] = set()

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        """As `Source.read`; raises ViewFailed, too, if the view of this length cannot be made now."""
        form, _, path = self._forms.place(path)
        if form == ORIGINAL or length == version.size or version.size > self._longest_bytes:
            return self._inner.read(path, offset, length, version)
        original = self._inner.read(path, 0, version.size, version)
        try:
            view = self._makers.make(original, self._forms.recipes[form])
        except MakerLost as exc:
            self._tell("view_makers_lost", path, str(exc), logging.WARNING)
            if length != self._unknown_length:
                raise ViewFailed(f"{os.fsdecode(path)}: the view cannot be made now: {exc}") from exc
            return original
        if isinstance(view, Unmade) or len(view) == version.size or len(view) > self._longest_bytes:
            reason = view.reason if isinstance(view, Unmade) else _LENGTH
            if length != self._unknown_length:
                raise ViewFailed(f"{os.fsdecode(path)}: there was a view, and now there is none: {reason}")
            self._tell("views_as_they_are", path, reason, logging.INFO)
            return original
        if length not in (len(view), self._unknown_length):
            raise ViewFailed(f"{os.fsdecode(path)}: the view has {len(view)} bytes now, and had {length}")
        with self._counting:
            self._count("views_made")
        return (FromPeer if isinstance(original, FromPeer) else bytes)(view[offset:])

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
            told = "%s is shown as it is: %s (said once; the metrics count the others)"
            log.log(level, told, os.fsdecode(path), reason)
