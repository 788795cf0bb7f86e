"""A source that is a bucket of an object store, or a prefix of one.

Names come from listings and bytes from GETs (`bucket.py`); nothing is asked by HEAD, whose errors have no body. An
object's version is its size and a tag, the hash of its ETag (`Version`). A GET answers with both and with the bytes, so
versions are never mixed. Prefixes have no mtime: directories are undated. `object_source.py` says which key is shown as
which file.

**Stores that contradict themselves.** Some list other ETags than their GETs have, or none (multipart and encrypted
objects, files that were put below a store's own directory). If the listing is the same before and after a GET, and size
and time are those of the GET, both mean one object. It keeps the version that is listed (by its time, where no ETag
is), and its ETag at GETs is remembered: with another one the object was replaced, though the listing has not changed.
That is refused, and so is whatever else differs for good.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections import OrderedDict
from collections.abc import Container, Iterator
from functools import partial
from typing import TYPE_CHECKING

from spiderfs.errors import ConfigError, SourceChanged, SourceError, SourceNotFound, SourceUnavailable
from spiderfs.sources.buckets.bucket import Bucket, Listed, Page, seconds
from spiderfs.sources.object_source import (
    DIRECTORY,
    ObjectSource,
    Pages,
    Place,
    StoreSettings,
    file_stat,
    is_name,
    later_page,
    tag_of,
)
from spiderfs.sources.source import SourceStat, Version

if TYPE_CHECKING:
    from obstore import GetResult

# So many keys that begin with a name are looked at to find out what the name means; more of them take one more request.
_SIBLINGS = 100
# Objects whose ETag at GETs is remembered, where listings have another one; forgetting one costs a listing.
_REMEMBERED = 65536


class BucketSource(ObjectSource):
    """What lies below `url`, `SCHEME://BUCKET/PREFIX`; raises ConfigError for another text, and asks nothing yet."""

    def __init__(self, make: type[Bucket], url: str, settings: StoreSettings) -> None:
        """`make`: the kind of bucket that the URL is of."""
        super().__init__()
        if not all(map(_is_installed, make.libraries)):
            what = f"run `pip install '.[mount,{make.scheme}]'` in a checkout of spiderfs"
            raise ConfigError(f"{make.scheme}:// needs more libraries: {what}")
        self._place = Place.parse(url)
        self._url, self._timeout_s, self._by_time = url, settings.timeout_s, settings.names_by_time
        self._bucket = make(self._place.bucket, settings)
        # By path: a version as it is listed, and the tag that GETs have for it.
        self._tags_of_gets: OrderedDict[bytes, tuple[Version, int]] = OrderedDict()

    @property
    def identity(self) -> str:
        url, endpoint = self._url.rstrip("/"), self._bucket.endpoint
        return f"{url} at {endpoint}" if endpoint else url

    def connect(self) -> None:
        import obstore

        with contextlib.suppress(SourceError):
            obstore.list(self._bucket.connected().gets)  # asks nothing yet

    # -- names

    def stat(self, path: bytes) -> SourceStat:
        if not path:
            return self._root()
        key = self._place.key(path)
        page = self._beginning(key, _SIBLINGS)
        is_directory = f"{key}/" in page.prefixes
        if not is_directory and page.next_token:
            is_directory = _has_keys(self._beginning(f"{key}/", 1))
        if is_directory:
            return DIRECTORY
        for found in page.objects:
            if found.key == key:
                return _file(found)
        raise SourceNotFound(f"{os.fsdecode(path)}: no such object")

    def _root(self) -> SourceStat:
        if not _has_keys(self._beginning(self._place.prefix, 1)):
            raise SourceNotFound(f"{self._url} holds no objects: check the prefix, and whether this is the right store")
        return DIRECTORY

    def _beginning(self, prefix: str, most: int) -> Page:
        """The first page that has any of the keys that begin with a prefix: stores may send empty ones before it."""
        pages = self._pages(prefix, most)
        page = next(pages)
        while not _has_keys(page) and page.next_token:
            page = next(pages)
        return page

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        prefix = self._place.directory(path)
        yield b".", DIRECTORY
        files: dict[bytes, SourceStat] = {}
        directories: set[bytes] = set()
        left_out: list[str] = []
        exists = not path
        for page in self._pages(prefix):
            exists = exists or _has_keys(page)
            for found in page.objects:
                name = found.key[len(prefix) :]
                if is_name(name):
                    files[name.encode()] = _file(found)
                elif name:  # an object of the directory's own name says only that the directory exists
                    left_out.append(found.key)
            for below in page.prefixes:
                name = below[len(prefix) : -1]
                if is_name(name):
                    directories.add(name.encode())
                else:
                    left_out.append(below)
        if not exists and self.stat(path) != DIRECTORY:  # it may be one without keys of its own, as Azure has them
            raise SourceNotFound(f"{os.fsdecode(path)}: no such directory")
        if left_out:
            self.report(path, left_out)
        yield from ((name, DIRECTORY) for name in directories)
        yield from ((name, found) for name, found in files.items() if name not in directories)

    def _pages(self, prefix: str, most: int = 0) -> Iterator[Page]:
        """The pages of what begins with a prefix; raises SourceUnavailable if they have no end."""
        pages = Pages(f"{self._url}: the store", self._timeout_s)
        page = self._bucket.page(prefix, most=most)
        yield page
        while (token := page.next_token) is not None:
            pages.turn([*page.prefixes, *(found.key for found in page.objects)], token)
            page = later_page(partial(self._bucket.page, prefix, token, most))
            yield page

    # -- bytes

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        """As `Source.read`; what it returns is a buffer of obstore's, which no one has copied yet."""
        end = min(offset + length, version.size)
        key = self._place.key(path)
        if offset >= end:
            self._check(path, self.stat(path), version)
            return b""
        whole = offset == 0 and end == version.size
        answer = self._bucket.get(key, None if whole else (offset, end))
        # Before the bytes: an object that was replaced may be of any size.
        self._check(path, _stat_of(answer), version)
        body: bytes = self._bucket.body(answer, key, end - offset)
        return body

    def stream(self, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
        """As `Streams.stream`, by one GET."""
        key = self._place.key(path)
        answer = self._bucket.get(key, (offset, min(offset + length, version.size)))
        self._check(path, _stat_of(answer), version)
        return self._bucket.stream(answer, key)

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        key = self._place.key(path)
        try:
            answer = self._bucket.get(key)
        except SourceNotFound:
            self.stat(path)
            raise SourceChanged(f"{os.fsdecode(path)}: no longer a file") from None
        found = _stat_of(answer)
        if not found.tag:
            # A page of something in front of the store would be shown as a new version of the file.
            raise SourceUnavailable(f"{os.fsdecode(path)}: an answer without an ETag is none of the store's")
        # An answer does not say whether it is a part that no one asked for.
        listed = self.stat(path)
        if listed == DIRECTORY or max(found.size, listed.size) > most_bytes:
            raise SourceChanged(f"{os.fsdecode(path)}: no longer a file, or larger than it was")
        if found.version == listed.version:
            return found, bytes(self._bucket.body(answer, key, found.size))
        return listed, bytes(self.read(path, 0, listed.size, listed.version))

    def _check(self, path: bytes, found: SourceStat, version: Version) -> None:
        """Raise SourceError unless what the store gives under this path is the version that it has listed."""
        by_time = self._by_time and not version.tag
        if found.version == version or (by_time and found._replace(tag=0).version == version):
            return
        if found.tag and found.tag == version.tag:
            raise SourceUnavailable(f"{os.fsdecode(path)}: {found.size} bytes came and not {version.size}, of one ETag")
        known, pair = self._tags_of_gets.get(path), (version, found.tag)
        if known == pair:
            return
        listed = self.stat(path)
        if listed.version != version:
            raise SourceChanged(f"{os.fsdecode(path)}: no longer the version that was asked for")
        replaced = known is not None and known[0] == version and version.tag != 0
        if replaced or listed._replace(tag=0) != found._replace(tag=0):
            raise SourceUnavailable(
                f"{self._url}: the store lists {os.fsdecode(path)!r} with another size, time or ETag than it gives it"
                " with: write the object again, or ask who runs the store"
            )
        self.warn_once(
            "%s: listings have other ETags than the objects, or none, for example of %r: the objects are served, and a"
            " new version is noticed by the listing",
            self._url,
            os.fsdecode(path),
        )
        self._tags_of_gets[path] = pair
        if len(self._tags_of_gets) > _REMEMBERED:
            self._tags_of_gets.popitem(last=False)

    def close(self) -> None:
        self._bucket.close()


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # the package that it is a part of
        return False


def _has_keys(page: Page) -> bool:
    return bool(page.objects or page.prefixes)


def _file(listed: Listed) -> SourceStat:
    return file_stat(listed.size, listed.modified_s, tag_of(listed.e_tag))


def _stat_of(answer: GetResult) -> SourceStat:
    found = answer.meta
    return file_stat(found["size"], seconds(found["last_modified"]), tag_of(found["e_tag"] or ""))
