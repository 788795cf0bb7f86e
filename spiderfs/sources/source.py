"""The contract of a source: the place in which the training data lies.

A source is synchronous and thread-safe: `sources/client.py` calls it in threads and adds time limits and retries. Paths
are bytes, relative to the root, without a leading or trailing slash; `b""` is the root. Names need not be UTF-8.
Symbolic links are never followed. Only directories, regular files and symbolic links are shown.

The errors are those of `spiderfs.errors`. A source raises SourceNotFound only if it is certain that the name does not
exist; for anything that may be a passing fault on the way it raises SourceUnavailable.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import xxhash

_SECOND_NS = 1_000_000_000
HASH_MASK = (1 << 63) - 1
# Lower numbers belong to the root and to control files.
FIRST_INODE = 1 << 16
# What is streamed comes in pieces of so many bytes.
STREAMED_BYTES = 1 << 20
# The largest file that the kernel knows of (loff_t).
MAX_SIZE = (1 << 63) - 1


class Version(NamedTuple):
    """What tells one version of a file from another: its size, and its mtime or, where the source has one, its tag."""

    size: int
    mtime_ns: int
    tag: int = 0
    """64 bits for the object's ETag; with a tag `mtime_ns` is 0. Bytes never change under a tag: it has settled."""


def version_hash(path: bytes, version: Version | None, view: bytes = b"") -> int:
    """The number of a version of a file, the same on all machines: 63 bits, from FIRST_INODE on.

    `version` is None for a directory; `view` is the fingerprint of a view of the file.
    """
    text = path + b"/" if version is None else b"%s\0%d\0%d" % (path, version.size, version.mtime_ns)
    if version is not None and version.tag:
        text += b"\0tag %d" % version.tag
    if view:
        text += b"\0" + view
    hashed: int = xxhash.xxh3_64_intdigest(text) & HASH_MASK
    return max(hashed, FIRST_INODE)


class FromPeer(bytes):
    """Bytes of a file that another node's cache gave in place of the source (`peers.py`)."""


def split_time(time_ns: int) -> tuple[int, int]:
    """Seconds and nanoseconds: 64 bits hold each of them, and do not hold 64-bit seconds counted in nanoseconds."""
    return divmod(time_ns, _SECOND_NS)


def joined_time(seconds: int, nanoseconds: int) -> int:
    return seconds * _SECOND_NS + nanoseconds


class SourceStat(NamedTuple):
    """The attributes of one source entry; `mode` is the whole st_mode, type bits included.

    Times are whole numbers of any size: those of 64-bit seconds do not fit into 64 bits of nanoseconds.
    """

    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    original_size: int | None = None
    """Of a view: the size of the file that it was made of; `size` is then the view's."""
    viewed: bool = False
    """A view of the file is shown, if there is one."""
    tag: int = 0
    """See `Version`; 0 where the source has none."""

    @property
    def version(self) -> Version:
        """The version of the file at the source."""
        size = self.size if self.original_size is None else self.original_size
        return Version(size, 0, self.tag) if self.tag else Version(size, self.mtime_ns)


UNKNOWN = SourceStat(0, 0, 0, 0, 0)
"""In a listing: the directory has the name, and its attributes are not known."""


class Source(Protocol):
    @property
    def undated_directories(self) -> bool:
        """Whether directories have no mtime that says when their names have changed.

        Then no one asks for a directory's attributes, and its listing is trusted for a time and made again after it.
        """

    def stat(self, path: bytes) -> SourceStat:
        """lstat of one entry."""

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        """Every entry of a directory with its attributes, in no order; entries of other types are left out.

        The directory itself comes first, by the name ".": these attributes were asked for before the first entry. An
        entry whose attributes cannot be had is `UNKNOWN`; so may be each name in `known` that still has the type given
        there (S_IFMT), if to ask takes time.
        """

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        """Bytes [offset, offset + length) of this version, short only at its end; raises SourceChanged for another."""

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        """Attributes and bytes of the version there now; raises SourceChanged for none, a larger or a changing one."""

    def readlink(self, path: bytes) -> bytes:
        """The link's text, untouched."""

    def listxattr(self, path: bytes) -> list[str]:
        """Names of the extended attributes; empty where the source has none."""

    def getxattr(self, path: bytes, name: str) -> bytes | None:
        """Value of one extended attribute, or None."""

    def statvfs(self) -> os.statvfs_result:
        """Sizes of the file system the root lies on."""

    def close(self) -> None:
        """Let go of what the source holds open; idempotent."""


@runtime_checkable
class Streams(Protocol):
    """A source that can give bytes while they come."""

    def stream(self, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
        """What `Source.read` gives and raises, in order, if possible in one request; each step is of this version."""


def streamed(source: Source, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
    """See `Streams`; what a source cannot stream is one read."""
    if isinstance(source, Streams):
        return source.stream(path, offset, length, version)
    return iter((source.read(path, offset, length, version),))


class Delivery(Protocol):
    """One answer that waits for a file's content. Only the maker of the delivery knows what the answer means."""

    done: bool
    """Set once the answer was written, or once no one waited for it any more: then no one else may answer."""

    def messages(self, size: int) -> tuple[bytes, bytes] | None:
        """The two texts to write for a content of `size` bytes; None if the reading process must not answer.

        The reading process writes the first text with the content behind it, and then the second one, each in one call;
        no second one, if it is empty.
        """
