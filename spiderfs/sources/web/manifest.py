"""A source that is any web server, with a manifest: a text that lists the files, for HTTP cannot list directories.

The URL names the manifest, and the files lie beside and below it. Each line is `PATH<tab>SIZE<tab>TAG`: the path from
the manifest's directory, the size in bytes, and either the ETag that the server gives for the file or the time of its
last change in seconds since 1970, whose fraction does not count. So GNU find writes one: `find . -type f -printf
'%P\\t%s\\t%T@\\n'`. A line of other form makes the whole manifest unusable, for it may have been written by halves.

With every question about names the server is asked whether the manifest is still the same one, which those who ask
meanwhile share. Bytes are compared with the version by what comes with them: the ETag, or Last-Modified where the
manifest has a time.

**Whole seconds.** nginx makes ETags of the time and the size, so a file may change within the second under its ETag.
Such an ETag is taken as the time that it is: then versions settle as those of a directory do (`vfs/rules.py`).
A manifest that was less than two seconds old when it was fetched is fetched again, whatever its ETag.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Container, Iterator, Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import quote, urlsplit

from spiderfs.errors import ConfigError, SourceChanged, SourceDenied, SourceError, SourceNotFound, SourceUnavailable
from spiderfs.sources.listed_files import ListedFiles
from spiderfs.sources.object_source import DIRECTORY, LIST_TIMEOUTS, StoreSettings, file_stat, is_name, tag_of
from spiderfs.sources.source import SourceStat, Version
from spiderfs.sources.web.asking import Answer, Headers, Web, WebSource, is_address

# A manifest of a million files has some 80 MB.
_MOST_BYTES = 1 << 30
# What means something in a URL by itself.
_RESERVED = "%/:[]!$&'()*+,;=~"
# An ETag or a time of whole seconds says nothing about changes within so many.
_YOUNG_S = 2


class ManifestSource(WebSource):
    """The files that the manifest at `url` lists; raises ConfigError for another text, and asks nothing yet."""

    def __init__(self, url: str, settings: StoreSettings) -> None:
        super().__init__()
        if not is_address(url) or any(sign in url for sign in "@?#"):
            raise ConfigError(
                "the source is more, or less, than the address of a manifest: write it like"
                " https://data.example.org/train/manifest.tsv, without what signs or logs in"
            )
        if url.endswith("/") or not urlsplit(url).path:
            raise ConfigError(f"{url} names no manifest: write its address, like {url.rstrip('/')}/manifest.tsv")
        self.identity = url
        # As people copy it from a browser it may have spaces, and letters of any script.
        self._url = quote(url, safe=_RESERVED)
        self._below = self._url[: self._url.rindex("/") + 1]
        self._longest_s = settings.timeout_s * LIST_TIMEOUTS
        self._web = Web(settings.timeout_s)
        self._asking = threading.Lock()
        # What was found when the server was asked last, when that was, and how to ask whether it is still the same.
        self._files: ListedFiles | SourceError = SourceUnavailable("the manifest was not asked for yet")
        self._asked_at = -math.inf
        self._validators: Mapping[str, str] = {}
        self._unchanged: ListedFiles | None = None

    def close(self) -> None:
        self._web.close()

    # -- names

    def stat(self, path: bytes) -> SourceStat:
        return self._listed().stat(path)

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        return self._listed().scan(path, self.report)

    # -- bytes

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        listed = self.stat(path)
        if listed == DIRECTORY:
            raise SourceChanged(f"{os.fsdecode(path)}: no longer a file")
        with self._coming(path, None, most_bytes, listed.version) as (answer, _):
            pass
        packed = answer.headers.get("Content-Encoding")
        if packed and answer.size != listed.size:
            raise SourceUnavailable(
                f"{self._below}: the server packs its files ({packed!r}): have it give them as they are"
            )
        return self._found(answer, listed.tag), answer.body

    def _pieces(self, path: bytes, extent: tuple[int, int] | None, version: Version) -> Iterator[bytes]:
        most_bytes = version.size if extent is None else extent[1] - extent[0]
        with self._coming(path, extent, most_bytes, version) as (answer, pieces):
            found = self._found(answer, version.tag).version
            if found != version and self.stat(path).version == version:
                text = "%s: the server gives other versions than the manifest lists, for example of %r: write it again"
                self.warn_once(text, self._url, os.fsdecode(path))
            self._check(path, version, found)
            yield from pieces

    @contextlib.contextmanager
    def _coming(
        self, path: bytes, extent: tuple[int, int] | None, most_bytes: int, version: Version
    ) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        if not all(map(is_name, os.fsdecode(path).split("/"))):
            raise SourceNotFound(f"{os.fsdecode(path)}: no file can have this name")
        with self._web.coming(self._below + quote(path), extent=extent, most_bytes=most_bytes) as (answer, pieces):
            if answer.ok:
                yield answer, pieces
                return
        if answer.status == 416:
            raise SourceChanged(f"{os.fsdecode(path)}: shorter than it was")
        # The manifest decides which files there are.
        self._check(path, version)
        if answer.status in (404, 410):
            raise SourceError(f"{os.fsdecode(path)} is in the manifest and not on the server: write the manifest again")
        raise _refusal(self._below, answer)

    def _found(self, answer: Answer, tag: int) -> SourceStat:
        """What an answer says about a file, in the manner of its line: by an ETag (if that has a tag), or by a time."""
        e_tag, modified = answer.headers.get("ETag", ""), answer.headers.get("Last-Modified", "")
        if tag and e_tag:
            return file_stat(answer.size, 0, tag_of(e_tag.removeprefix("W/")))
        try:
            if not tag:
                return file_stat(answer.size, int(parsedate_to_datetime(modified).timestamp()), 0)
        except (ValueError, OverflowError):
            pass
        named = "ETag" if tag else "Last-Modified"
        raise SourceUnavailable(f"{self._below}: the server gives no {named}, by which the manifest knows its files")

    # -- the manifest

    def _listed(self) -> ListedFiles:
        """What the manifest lists now, or since the caller came here."""
        came_at = time.monotonic()
        with self._asking:
            if self._asked_at <= came_at:
                self._asked_at = time.monotonic()
                try:
                    self._files = self._fetched()
                except SourceError as exc:
                    # Whoever came meanwhile need not wait for the same error.
                    self._files = exc
            if isinstance(self._files, SourceError):
                raise type(self._files)(*self._files.args)
            return self._files

    def _fetched(self) -> ListedFiles:
        answer = self._web.get(self._url, self._validators, most_bytes=_MOST_BYTES, within_s=self._longest_s)
        if answer.status == 304 and self._unchanged is not None:
            return self._unchanged
        if not answer.ok:
            raise _refusal(self._url, answer)
        try:
            files = ListedFiles(answer.body)
        except ValueError as exc:
            raise SourceUnavailable(f"{self._url}: {exc}: write the manifest again") from None
        self._unchanged, self._validators = files, _validators(answer.headers)
        return files


def _validators(headers: Headers) -> Mapping[str, str]:
    """The headers that ask for a text only if it is another one; none if it is so young that it may have changed."""
    e_tag, modified, now = (headers.get(name, "") for name in ("ETag", "Last-Modified", "Date"))
    if modified:
        try:
            age = parsedate_to_datetime(now) - parsedate_to_datetime(modified)
        except (ValueError, TypeError, OverflowError):  # no date, or one without a zone
            return {}
        if age.total_seconds() < _YOUNG_S:
            return {}
    return {"If-None-Match": e_tag} if e_tag else {"If-Modified-Since": modified} if modified else {}


def _refusal(url: str, answer: Answer) -> SourceError:
    if answer.status in (401, 403):
        return SourceDenied(f"{url}: the server refuses it ({answer.status}): allow GETs without a password")
    if answer.redirect:
        return SourceUnavailable(f"{url}: the server redirects: write the address to which it leads")
    if answer.status == 404:
        return SourceUnavailable(f"{url}: the server has no such manifest (404): check the address")
    return SourceUnavailable(f"{url}: the server has failed ({answer.status})")
