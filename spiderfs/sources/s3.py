"""A source that is a bucket of S3, or of a store that speaks as S3 does, or what lies below a prefix of one.

Names come from listings and bytes from GETs (`s3_bucket.py`). Nothing is asked by HEAD: its errors have no body that
says what is wrong, and to read an object once is one request.

An object's version is its size and a tag, the hash of its ETag (`Version`). A GET answers with both and with the bytes,
so bytes of another version are noticed, and never mixed with those of this one. Prefixes have no mtime: directories are
undated. `object_names.py` says which key is shown as which file.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import stat
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import xxhash

from spiderfs.errors import ConfigError, SourceChanged, SourceNotFound, SourceUnavailable
from spiderfs.sources.object_names import NAME_MAX, Place, is_name
from spiderfs.sources.s3_bucket import Bucket, StoreSettings
from spiderfs.sources.s3_listing import Page, seconds
from spiderfs.sources.source import SourceStat, Version

if TYPE_CHECKING:
    from obstore import GetResult

log = logging.getLogger(__name__)

# So many keys that begin with a name are looked at to find out what the name means; more of them take one more request.
_SIBLINGS = 100
# The longest pauses before a later page of a listing is asked for again.
_PAGE_PAUSES_S = (0.2, 0.8)
# What a file system of such a bucket would say of itself: blocks of 1 MiB, and more of them than anybody has.
_BLOCK_BYTES, _BLOCKS = 1 << 20, 1 << 32
# Directories of which it was said that some keys are left out; when there are more, it may be said again.
_REPORTED = 4096


class S3Source:
    """What lies below `url`, `s3://BUCKET/PREFIX`; raises ConfigError for another text, and asks nothing yet."""

    undated_directories = True
    root_fd = None

    def __init__(self, url: str, settings: StoreSettings) -> None:
        if not all(importlib.util.find_spec(library) for library in ("botocore", "obstore")):
            raise ConfigError("s3:// needs two more libraries: run pip install 'spiderfs[s3]'")
        self._place = Place.parse(url)
        self._url = url
        self._bucket = Bucket(self._place.bucket, settings)
        self._reported: set[bytes] = set()

    # -- names

    def stat(self, path: bytes) -> SourceStat:
        if not path:
            return self._root()
        key = self._place.key(path)
        page = self._bucket.page(key, most=_SIBLINGS)
        is_directory = f"{key}/" in page.prefixes
        if not is_directory and page.next_token:
            below = self._bucket.page(f"{key}/", most=1)
            is_directory = bool(below.objects or below.prefixes)
        if is_directory:
            return _DIRECTORY
        for found in page.objects:
            if found.key == key:
                return _file(found.size, found.modified_s, found.e_tag)
        raise SourceNotFound(f"{os.fsdecode(path)}: no such object")

    def _root(self) -> SourceStat:
        page = self._bucket.page(self._place.prefix, most=1)
        if not page.objects and not page.prefixes:
            raise SourceNotFound(f"{self._url} holds no objects: check the prefix, and whether this is the right store")
        return _DIRECTORY

    def scan(self, path: bytes) -> Iterator[tuple[bytes, SourceStat]]:
        prefix = self._place.directory(path)
        yield b".", _DIRECTORY
        files: dict[bytes, SourceStat] = {}
        directories: set[bytes] = set()
        left_out: list[str] = []
        exists, token = not path, ""
        while True:
            page = self._later_page(prefix, token) if token else self._bucket.page(prefix)
            exists = exists or bool(page.objects or page.prefixes)
            for found in page.objects:
                name = found.key[len(prefix) :]
                if is_name(name):
                    files[name.encode()] = _file(found.size, found.modified_s, found.e_tag)
                elif name:  # an object of the directory's own name says only that the directory exists
                    left_out.append(found.key)
            for below in page.prefixes:
                name = below[len(prefix) : -1]
                if is_name(name):
                    directories.add(name.encode())
                else:
                    left_out.append(below)
            if page.next_token is None:
                break
            if page.next_token == token:
                raise SourceUnavailable(f"{self._url}: the store gives the same page of a listing again and again")
            token = page.next_token
        if not exists:
            raise SourceNotFound(f"{os.fsdecode(path)}: no such directory")
        if left_out:
            self._report(path, left_out)
        yield from ((name, _DIRECTORY) for name in directories)
        yield from ((name, found) for name, found in files.items() if name not in directories)

    def _later_page(self, prefix: str, token: str) -> Page:
        """A page after the first. It is asked for again here, for a caller who repeats a scan begins with the first."""
        for longest_s in _PAGE_PAUSES_S:
            try:
                return self._bucket.page(prefix, token=token)
            except SourceUnavailable:
                time.sleep(random.uniform(0, longest_s))
        return self._bucket.page(prefix, token=token)

    def _report(self, path: bytes, left_out: list[str]) -> None:
        if path in self._reported:
            return
        if len(self._reported) >= _REPORTED:
            self._reported.clear()
        self._reported.add(path)
        told = "%d key(s) below %s cannot be names of files and are not shown, for example %r"
        log.warning(told, len(left_out), os.fsdecode(path) or "the prefix", left_out[0])

    # -- bytes

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        """As `Source.read`; what it returns is a buffer of obstore's, which nobody has copied yet."""
        end = min(offset + length, version.size)
        key = self._place.key(path)
        if offset >= end:
            self._check(path, self.stat(path).version, version)
            return b""
        whole = offset == 0 and end == version.size
        answer = self._bucket.get(key, None if whole else (offset, end))
        # Before the bytes: an object that was replaced may be of any size.
        self._check(path, _stat_of(answer).version, version)
        body: bytes = self._bucket.body(answer, key, end - offset)
        return body

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        key = self._place.key(path)
        try:
            answer = self._bucket.get(key)
        except SourceNotFound:
            self.stat(path)
            raise SourceChanged(f"{os.fsdecode(path)}: no longer a file") from None
        found = _stat_of(answer)
        if found.size > most_bytes:
            raise SourceChanged(f"{os.fsdecode(path)}: larger than it was")
        return found, bytes(self._bucket.body(answer, key, found.size))

    def _check(self, path: bytes, found: Version, version: Version) -> None:
        if found != version:
            raise SourceChanged(f"{os.fsdecode(path)}: no longer the version that was asked for")

    # -- the rest

    def readlink(self, path: bytes) -> bytes:
        raise SourceChanged(f"{os.fsdecode(path)}: no symbolic link")

    def listxattr(self, path: bytes) -> list[str]:
        return []

    def getxattr(self, path: bytes, name: str) -> bytes | None:
        return None

    def statvfs(self) -> os.statvfs_result:
        return os.statvfs_result((_BLOCK_BYTES, _BLOCK_BYTES, *[_BLOCKS] * 6, os.ST_RDONLY, NAME_MAX))

    def close(self) -> None:
        self._bucket.close()


def _stat_of(answer: GetResult) -> SourceStat:
    found = answer.meta
    return _file(found["size"], seconds(found["last_modified"]), found["e_tag"] or "")


def _file(size: int, modified_s: int, e_tag: str) -> SourceStat:
    return SourceStat(_FILE_MODE, _UID, _GID, size, modified_s * 1_000_000_000, tag=_tag(e_tag))


def _tag(e_tag: str) -> int:
    """64 bits for an ETag, with quotes or without; 0 for none. A weak one (W/...) is another tag than a strong one."""
    plain = e_tag.replace('"', "")
    return (xxhash.xxh3_64_intdigest(plain.encode()) or 1) if plain else 0


# A bucket has neither owners nor modes: its files are shown as those of the user who mounts it.
_UID, _GID, _FILE_MODE = os.getuid(), os.getgid(), stat.S_IFREG | 0o444
_DIRECTORY = SourceStat(stat.S_IFDIR | 0o555, _UID, _GID, 0, 0)
