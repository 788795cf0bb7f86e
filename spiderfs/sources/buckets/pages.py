"""A page of a bucket's listing, read out of the XML by which stores list: Amazon's (and Google's) or Microsoft's.

For 1,000 keys this takes 6 ms of processor time, and botocore's own parser 46.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import ClassVar, NamedTuple
from urllib.parse import unquote, unquote_plus
from xml.parsers.expat import ExpatError, ParserCreate

from spiderfs.errors import SourceUnavailable
from spiderfs.sources.source import MAX_SIZE


class Listed(NamedTuple):
    key: str
    size: int
    modified_s: int
    e_tag: str


class Page(NamedTuple):
    """Some objects, some of what keys begin with up to the next slash, and how the next page is asked for."""

    objects: list[Listed]
    prefixes: list[str]
    next_token: str | None


def seconds(time: datetime) -> int:
    """A time in whole seconds: a listing may have milliseconds, the answer to a GET has none."""
    return int(time.timestamp())


def _is_quoted(key: str) -> bool:
    return "%" in key or "+" in key


def _unquoted(listed: Listed) -> Listed:
    return listed._replace(key=unquote_plus(listed.key))


def _listed(key: str, size: str, modified: datetime, e_tag: str) -> Listed:
    if not 0 <= int(size) <= MAX_SIZE:
        raise ValueError("an object has a size that no file has")
    return Listed(key, int(size), seconds(modified), e_tag)


class _Reader(ABC):
    """Collects a page while expat reads it."""

    root: ClassVar[str]

    def __init__(self) -> None:
        self.objects: list[Listed] = []
        self.prefixes: list[str] = []
        # What the page says of itself, and of the object that is being read.
        self.page: dict[str, str] = {}
        self.row: dict[str, str] = {}
        self.is_quoted = False
        self._inside: list[str] = []
        self._text: list[str] = []

    @abstractmethod
    def ended(self, within: str, name: str, text: str) -> None:
        """Take note of an element, and of that in which it lies."""

    @abstractmethod
    def finish(self) -> str | None:
        """Called at the end; returns how the next page is asked for."""

    def read(self, body: bytes) -> Page:
        parser = ParserCreate()
        parser.buffer_text = True
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        parser.CharacterDataHandler = self._text.append
        parser.Parse(body, True)
        next_token = self.finish()
        return Page(self.objects, self.prefixes, next_token)

    def _start(self, name: str, attributes: Mapping[str, str]) -> None:
        if not self._inside and name != self.root:
            raise ValueError("this is not a listing")
        self._inside.append(name)
        self._text.clear()
        self.is_quoted = attributes.get("Encoded") == "true"

    def _end(self, name: str) -> None:
        self._inside.pop()
        self.ended(self._inside[-1] if self._inside else "", name, "".join(self._text))
        self._text.clear()


class _AmazonsReader(_Reader):
    root = "ListBucketResult"

    def __init__(self, quoted: bool) -> None:
        super().__init__()
        self._quoted = quoted

    def ended(self, within: str, name: str, text: str) -> None:
        if name == "Contents":
            row, self.row = self.row, {}
            modified = datetime.fromisoformat(row["LastModified"])
            self.objects.append(_listed(row["Key"], row["Size"], modified, row.get("ETag", "")))
        elif within == "Contents":
            self.row[name] = text
        elif within == "CommonPrefixes" and name == "Prefix":
            self.prefixes.append(text)
        elif within == self.root:
            self.page[name] = text

    def finish(self) -> str | None:
        if self._quoted or self.page.get("EncodingType") == "url":
            self.objects = [_unquoted(listed) if _is_quoted(listed.key) else listed for listed in self.objects]
            self.prefixes = [unquote_plus(prefix) for prefix in self.prefixes]
        if self.page.get("IsTruncated") != "true":
            return None
        if not self.page.get("NextContinuationToken"):
            raise ValueError("the next page cannot be asked for")
        return self.page["NextContinuationToken"]


class _MicrosoftsReader(_Reader):
    root = "EnumerationResults"

    def ended(self, within: str, name: str, text: str) -> None:
        if name == "Blob":
            row, self.row = self.row, {}
            if row.get("ResourceType") == "directory":
                # Accounts with a hierarchy of their own have directories, which are listed as blobs too.
                self.prefixes.append(f"{row['Name']}/")
                return
            modified = parsedate_to_datetime(row["Last-Modified"])
            self.objects.append(_listed(row["Name"], row["Content-Length"], modified, row.get("Etag", "")))
        elif name == "BlobPrefix":
            self.prefixes.append(self.row["Name"])
            self.row = {}
        elif within in ("Blob", "BlobPrefix", "Properties"):
            self.row[name] = unquote(text) if self.is_quoted else text
        elif within == self.root:
            self.page[name] = text

    def finish(self) -> str | None:
        return self.page.get("NextMarker") or None


def amazons_page(body: bytes, quoted: bool = False) -> Page:
    """The answer to ListObjectsV2; raises SourceUnavailable if it cannot be read.

    `quoted`: its keys are quoted as in URLs, also if it does not say so.
    """
    return _page(_AmazonsReader(quoted), body)


def microsofts_page(body: bytes) -> Page:
    """The answer to List Blobs; raises SourceUnavailable if it cannot be read."""
    return _page(_MicrosoftsReader(), body)


def _page(reader: _Reader, body: bytes) -> Page:
    try:
        return reader.read(body)
    except (ExpatError, KeyError, OverflowError, ValueError) as exc:
        raise SourceUnavailable(f"the store has answered with a listing that cannot be read: {exc}") from exc
