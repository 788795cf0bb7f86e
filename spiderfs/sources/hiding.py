"""A source without some entries of its root."""

from __future__ import annotations

import os
from collections.abc import Iterator

from spiderfs.errors import SourceNotFound
from spiderfs.sources.source import Source, SourceStat


class HidingSource:
    """`inner`, without the entries `hidden` of its root; what lies below them can still be read by its path."""

    def __init__(self, inner: Source, *hidden: bytes) -> None:
        self._inner = inner
        self._hidden = hidden
        self.readlink, self.listxattr, self.getxattr = inner.readlink, inner.listxattr, inner.getxattr
        self.read, self.read_present = inner.read, inner.read_present
        self.statvfs, self.close = inner.statvfs, inner.close

    def stat(self, path: bytes) -> SourceStat:
        if path in self._hidden:
            raise SourceNotFound(f"{os.fsdecode(path)} is not shown")
        return self._inner.stat(path)

    def scan(self, path: bytes) -> Iterator[tuple[bytes, SourceStat]]:
        entries = self._inner.scan(path)
        return entries if path else (entry for entry in entries if entry[0] not in self._hidden)
