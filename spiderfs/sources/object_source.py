"""The common part of sources of objects at a server: names, and no links, owners or times of directories.

A bucket has no directories: a key is text, and a `/` in it a character like others. A mount shows the keys below a
prefix as a tree, under these rules:

- `a/b.jpg` is the file `b.jpg` in the directory `a`, whether there is an object `a/` or not. An object `a/` makes the
  directory `a` exist, also an empty one; its content is not shown. So does an empty blob `a` of Azure's that is marked
  as a directory (`hdi_isfolder`).
- If there are both an object `d` and objects `d/...`, `d` is a directory, and the object `d` is not shown.
- A key with a part that cannot be a name is not shown: an empty part (`a//b`, `/lead.jpg`), `.` or `..`, more than 255
  bytes, or control characters. A key is text, so every name is UTF-8.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import random
import re
import stat
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import xxhash

from spiderfs.errors import ConfigError, SourceChanged, SourceNotFound, SourceUnavailable
from spiderfs.sources.source import SourceStat

NAME_MAX = 255
# S3 has no longer keys, and other stores have none either.
KEY_MAX = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f/]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_name(part: str) -> bool:
    """Whether a part of a key can be the name of a file."""
    if part in ("", ".", "..") or _CONTROL.search(part):
        return False
    return len(part) * 4 <= NAME_MAX or len(part.encode(errors="surrogatepass")) <= NAME_MAX


class Place(NamedTuple):
    """A bucket, and the prefix of all keys that are shown; the prefix is empty or ends with a slash."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Place:
        """From `SCHEME://BUCKET` or `SCHEME://BUCKET/PREFIX`; raises ConfigError, which repeats no password."""
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        prefix = prefix.removesuffix("/")
        if "?" in rest or ("@" in rest and not _BUCKET.fullmatch(bucket)):
            raise ConfigError(
                f"the source has more than {scheme}://BUCKET/PREFIX: leave out what signs or logs in (credentials are"
                " found in variables and profiles, as other programs find them)"
            )
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(f"{url} names no bucket: write {scheme}://BUCKET or {scheme}://BUCKET/PREFIX")
        if prefix and not all(map(is_name, prefix.split("/"))):
            raise ConfigError(f"{url} has a prefix that cannot be a path: write {scheme}://BUCKET/PREFIX")
        return cls(bucket, f"{prefix}/" if prefix else "")

    def key(self, path: bytes) -> str:
        """The key of a file; raises SourceNotFound where no key can be shown as this path."""
        try:
            text = path.decode()
        except UnicodeDecodeError:
            text = ""
        key = self.prefix + text
        if not all(map(is_name, text.split("/"))) or len(self.prefix.encode()) + len(path) > KEY_MAX:
            raise SourceNotFound(f"{path.decode(errors='backslashreplace')}: no object can have this name")
        return key

    def directory(self, path: bytes) -> str:
        """What all keys below a directory begin with; raises SourceNotFound as `key` does."""
        return f"{self.key(path)}/" if path else self.prefix


T = TypeVar("T")

log = logging.getLogger(__name__)

# A server that is there accepts a connection in milliseconds.
CONNECT_S = 5.0
# Connections to one server that are kept between requests; more questions at a time open further ones.
KEPT_CONNECTIONS = 128
# The longest pauses before a later page of a listing is asked for again.
_PAGE_PAUSES_S = (0.2, 0.8)
# A list of names, or a manifest, may take as many time-outs: who asks for one waits no longer (`context.py`).
LIST_TIMEOUTS = 20
# Stores may send pages without names, and some do not list in order; so many pages without a later name are none.
_IDLE_PAGES = 1000
_TOO_MANY_OPEN = os.strerror(errno.EMFILE)
NO_DESCRIPTORS = "this process may open no more files now: raise its limit (ulimit -n)"
# What a file system of such a server would say of itself: blocks of 1 MiB, and more of them than anybody has.
_BLOCK_BYTES, _BLOCKS = 1 << 20, 1 << 32
# Directories of which it was said that some names are left out; when there are more, it may be said again.
_REPORTED = 4096
# Files are shown as those of the user who mounts them.
_UID, _GID, _FILE_MODE = os.getuid(), os.getgid(), stat.S_IFREG | 0o444
DIRECTORY = SourceStat(stat.S_IFDIR | 0o555, _UID, _GID, 0, 0)


def file_stat(size: int, modified_s: int, tag: int) -> SourceStat:
    return SourceStat(_FILE_MODE, _UID, _GID, size, modified_s * 1_000_000_000, tag=tag)


def tag_of(e_tag: str) -> int:
    """64 bits for an ETag, with quotes or without; 0 for none. A weak one (W/...) is another tag than a strong one."""
    plain = e_tag.replace('"', "")
    return (xxhash.xxh3_64_intdigest(plain.encode()) or 1) if plain else 0


def later_page(ask: Callable[[], T]) -> T:
    """A page after the first. It is asked for again here, for a caller who repeats a scan begins with the first."""
    for longest_s in _PAGE_PAUSES_S:
        try:
            return ask()
        except SourceUnavailable:
            time.sleep(random.uniform(0, longest_s))
    return ask()


def lacks_descriptors(exc: BaseException | None) -> bool:
    """Whether a library could not connect because this process has too many files open, as it need not have soon."""
    while exc is not None and _TOO_MANY_OPEN not in str(exc):
        exc = exc.__context__
    return exc is not None


class Pages:
    """Sees to it that a listing by pages has an end."""

    def __init__(self, server: str, timeout_s: float) -> None:
        """`server`: who lists, as errors name it."""
        self._server = server
        self._until = time.monotonic() + LIST_TIMEOUTS * timeout_s
        self._asked: set[str] = set()
        self._last = ""
        self._idle = 0

    def turn(self, names: Iterable[str], following: str) -> None:
        """Note what a page has listed, and how the next one is asked for; raises SourceUnavailable if none is to be."""
        last = max(names, default="")
        self._idle = 0 if last > self._last else self._idle + 1
        self._last = max(last, self._last)
        if following in self._asked or self._idle > _IDLE_PAGES or time.monotonic() > self._until:
            raise SourceUnavailable(f"{self._server} gives a page of a listing again and again, or ever new ones")
        self._asked.add(following)


class StoreSettings(NamedTuple):
    """How a server is reached; what is empty is found as other programs find it (variables, profiles, roles)."""

    endpoint: str = ""
    region: str = ""
    profile: str = ""
    anonymous: bool = False
    requester_pays: bool = False
    addressing: str = "auto"
    timeout_s: float = 30.0
    names_by_time: bool = False
    """Names come from a list, which may have times in place of ETags."""


class ObjectSource:
    """The base of such sources."""

    undated_directories = True
    root_fd = None

    def __init__(self) -> None:
        self._reported: set[bytes] = set()
        # Made before the forks, so that one process of a mount speaks for all.
        self._warned = mmap.mmap(-1, 1)

    def connect(self) -> None:
        """Connect in this process, so that its first question need not wait for that; what fails, that will say."""

    def warn_once(self, text: str, *args: object) -> None:
        """Log one warning for the whole mount: that a server contradicts itself, about many or all of its files."""
        if not self._warned[0]:
            self._warned[0] = 1
            log.warning(text, *args)

    def report(self, path: bytes, left_out: list[str]) -> None:
        """Say once that these names, or keys, of a directory are not shown."""
        if path in self._reported:
            return
        if len(self._reported) >= _REPORTED:
            self._reported.clear()
        self._reported.add(path)
        text = "%d key(s) below %s cannot be names of files and are not shown, for example %r"
        log.warning(text, len(left_out), os.fsdecode(path) or "the prefix", left_out[0])

    def readlink(self, path: bytes) -> bytes:
        raise SourceChanged(f"{os.fsdecode(path)}: no symbolic link")

    def listxattr(self, path: bytes) -> list[str]:
        return []

    def getxattr(self, path: bytes, name: str) -> bytes | None:
        return None

    def statvfs(self) -> os.statvfs_result:
        return os.statvfs_result((_BLOCK_BYTES, _BLOCK_BYTES, *[_BLOCKS] * 6, os.ST_RDONLY, NAME_MAX))
