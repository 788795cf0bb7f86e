"""The types of the file system's questions and answers: plain values, which each binding translates."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Caller(NamedTuple):
    """The thread that asks for something; `pid` is its number.

    `request` is the kernel's number of what it asks, 0 if that is not known. After the death of a worker, two workers
    may answer one request: the second answer counts.
    """

    uid: int
    gid: int
    pid: int
    request: int = 0


class Attributes(NamedTuple):
    """As stat(2) gives them, to be kept for `timeout_s`; `shown`: the number to show if not the inode's, else 0."""

    inode: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    timeout_s: float
    shown: int = 0


class Entry(NamedTuple):
    """The answer to a look-up; the kernel may trust it for `timeout_s`. Inode 0: the name does not exist."""

    attributes: Attributes
    timeout_s: float


class Opened(NamedTuple):
    """The answer to an open.

    `fetched` is the whole content, if the open has brought it from the source. `large`: the kernel may read the file by
    itself, if `LargeFiles.plain_file` has one. `keeps_pages`: the pages that the kernel has of the inode are right for
    this handle too.
    """

    handle: int
    direct_io: bool
    fetched: bytes | None = None
    large: bool = False
    keeps_pages: bool = True


class OpenedDirectory(NamedTuple):
    """The answer to an opendir; the kernel is to keep the listing (`keeps`), and may use the one it has (`kept`)."""

    handle: int
    keeps: bool
    kept: bool


class EventSink(Protocol):
    """Takes a note of each read, for the policies; see `core/events.py`."""

    def record_access(
        self,
        inode: int,
        size: int,
        where: int,
        pid: int,
        block: int = 0,
        trainer: int = 0,
        wanted: int = 0,
        at_s: float = 0.0,
        waited_us: int = 0,
    ) -> None:
        """`at_s`: when the reader asked, in seconds since the epoch; by default now."""

    def flush(self) -> None:
        """Send what was noted now, and not with the next notes."""
