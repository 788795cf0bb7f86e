"""Making a source from the name that a user gave it, with all that a mount wraps around it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from spiderfs.errors import ConfigError, SourceNotFound
from spiderfs.sources.faults import FaultState, SlowSource
from spiderfs.sources.local import LocalSource
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


# The function that makes a source of each kind, by the scheme with which its name begins; a directory has no scheme.
OPENERS = {"": LocalSource}


class OpenedSource(NamedTuple):
    """One source, as the two kinds of its users see it.

    `root_fd` is a descriptor of the root of a source that is a directory. It stays valid when the mount hides the root.
    """

    everything: Source
    shown: Source
    faults: FaultState
    root_fd: int

    def close(self) -> None:
        self.everything.close()


def open_source(named: str, faults: FaultState, *hidden: bytes) -> OpenedSource:
    """Open the source with this name; raises ConfigError if there is no such source.

    `faults` make it slow and unreliable. Readers of the mount are not shown the entries `hidden` of its root.
    """
    scheme, _, _ = named.rpartition("://")
    if scheme not in OPENERS:
        raise ConfigError(f"{named} is a source of a kind that spiderfs does not know: name a directory")
    opened = OPENERS[scheme](named)
    everything = SlowSource(opened, faults)
    return OpenedSource(everything, HidingSource(everything, *hidden), faults, opened.root_fd)
