"""Requests to one bucket: pages of its listing, objects through obstore, and its errors.

`s3.py`, `google.py` and `azure.py` have how each store is reached, and how it lists. A GET by obstore in the calling
thread takes 98 to 116 us of processor time with 64 in flight, and 180 over asyncio. Its own listing fails at one key
that cannot be a path. So a page is parsed from XML here: 1,000 keys take 6 ms, and 46 in botocore's parser.

**Processes.** obstore's threads do not survive a fork: after one GET even a new store hangs in a forked child. So every
process connects at its first request. The location of the store is resolved once, before the forks of a mount: the
cache belongs to it.

**Errors.** 503, a deleted bucket, expired credentials and archived objects are one error to obstore, so the `<Code>` in
the body tells them apart. A file is gone only if the store says so of the object. `sources/client.py` makes retries,
`source.py` those of later pages. No message has a text of the store's, which may repeat signatures and tokens; for the
same reason the libraries do not log.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import unquote, unquote_plus
from xml.etree import ElementTree

from spiderfs import errors
from spiderfs.sources.object_source import CONNECT_S, NO_DESCRIPTORS, StoreSettings, lacks_descriptors
from spiderfs.sources.source import MAX_SIZE, STREAMED_BYTES

if TYPE_CHECKING:
    from obstore import Bytes, GetResult
    from obstore.store import ClientConfig

# What a blob says of itself that stands for a directory; servers keep letters large or small as they were written.
_FOLDER = "hdi_isfolder"


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


def _listed(key: str, size: str, modified: datetime, e_tag: str) -> Listed:
    if not 0 <= int(size) <= MAX_SIZE:
        raise ValueError("an object has a size that no file has")
    return Listed(key, int(size), seconds(modified), e_tag)


def amazons_page(body: bytes, quoted: bool = False) -> Page:
    """The answer to ListObjectsV2, with keys `quoted` though it does not say so; raises SourceUnavailable."""
    with _readable():
        page = _parsed(body, "ListBucketResult")
        said = _texts(page)
        unquoted: Callable[[str], str] = unquote_plus if quoted or said.get("EncodingType") == "url" else str
        objects, prefixes = [], []
        for element in page:
            if element.tag == "Contents":
                row = _texts(element)
                modified = datetime.fromisoformat(row["LastModified"])
                objects.append(_listed(unquoted(row["Key"]), row["Size"], modified, row.get("ETag", "")))
            elif element.tag == "CommonPrefixes":
                prefixes += [unquoted(prefix.text or "") for prefix in element.iterfind("Prefix")]
        if said.get("IsTruncated") != "true":
            return Page(objects, prefixes, None)
        if not said.get("NextContinuationToken"):
            raise ValueError("the next page cannot be asked for")
        return Page(objects, prefixes, said["NextContinuationToken"])


def microsofts_page(body: bytes) -> Page:
    """The answer to List Blobs; raises SourceUnavailable if it cannot be read."""
    with _readable():
        page = _parsed(body, "EnumerationResults")
        objects, prefixes = [], []
        for element in page.iterfind("Blobs/*"):
            row = _texts(element)
            for properties in element.iterfind("Properties"):
                row |= _texts(properties)
            marks = {mark.tag.lower(): mark.text for mark in element.iterfind("Metadata/*")}
            is_folder = marks.get(_FOLDER) == "true" and row["Content-Length"] == "0"
            if element.tag == "BlobPrefix":
                prefixes.append(row["Name"])
            elif is_folder or row.get("ResourceType") == "directory":
                # Accounts with a hierarchy of their own have directories, which are listed as blobs too. Somewhere else
                # Hadoop, AzCopy and others mark blobs that stand for one.
                prefixes.append(f"{row['Name']}/")
            elif element.tag == "Blob":
                modified = parsedate_to_datetime(row["Last-Modified"])
                objects.append(_listed(row["Name"], row["Content-Length"], modified, row.get("Etag", "")))
        return Page(objects, prefixes, page.findtext("NextMarker") or None)


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (ElementTree.ParseError, KeyError, OverflowError, ValueError) as exc:
        raise errors.SourceUnavailable(f"the store has answered with a listing that cannot be read: {exc}") from exc


def _parsed(body: bytes, root: str) -> ElementTree.Element:
    """A page, whose elements have names without namespaces; raises ParseError, and ValueError for another root."""
    page = ElementTree.fromstring(body)
    for element in page.iter():
        element.tag = element.tag.rpartition("}")[2]
    if page.tag != root:
        raise ValueError("this is not a listing")
    return page


def _texts(element: ElementTree.Element) -> dict[str, str]:
    """The texts of the elements right below one, by their names."""
    return {
        below.tag: unquote(below.text or "") if below.get("Encoded") == "true" else below.text or ""
        for below in element
    }


# obstore asks for credentials again after so long; those that end sooner are renewed by whoever gives them.
CREDENTIALS_S = 300.0
# After credentials were refused, others are looked for no more often than this: to connect takes 0.2 s.
RECONNECT_S = 5.0
# How many time limits a streamed answer may take: one for each MiB that it has at most (`vfs/large_files.py`).
_STREAMED_TIMES = 8
# What is said of a server that cannot be connected to.
UNREACHED = "it cannot be reached: check source.endpoint and the network"
NO_ADDRESS = "its address, or a proxy's, cannot be used: check source.endpoint, HTTP_PROXY and HTTPS_PROXY"
_CODE = re.compile(r"<Code>(\w+)</Code>")
# What obstore says of a store that has sent all of an object though a part was asked for.
_WHOLE_ONLY = "NotPartial"
_STATUS = re.compile(r"status code: (\d{3})")
# In what obstore says of one that has not answered in time; in an address a blank would be escaped.
_LATE = "kind: Timeout,"

# What the codes of errors mean, those of all stores together, and what a user can do. All others say that the store has
# not answered.
_GONE = {"NoSuchKey", "NoSuchVersion", "BlobNotFound"}
_CHANGED = {"InvalidRange", "PreconditionFailed", "ConditionNotMet"}
_THROTTLED = {
    "SlowDown", "ServiceUnavailable", "ServerBusy", "RequestLimitExceeded", "TooManyRequests", "Throttling", "503",
    "429",
}  # fmt: skip
_ARCHIVED = "it lies in an archive: restore it first"
_DENIED = {
    "AllAccessDisabled": "the store refuses all access to it",
    "AccountIsDisabled": "the store refuses all access to it",
    "InvalidObjectState": _ARCHIVED,
    "BlobArchived": _ARCHIVED,
    "BlobBeingRehydrated": _ARCHIVED,
    "PublicAccessNotPermitted": "not everybody may read it: leave out source.anonymous",
    "403": "the store refuses access to it",
}
_MAY_NOT_READ = {
    "AccessDenied", "AuthorizationFailure", "AuthorizationPermissionMismatch", "AuthorizationResourceTypeMismatch",
    "AuthorizationServiceMismatch", "AuthorizationProtocolMismatch", "AuthorizationSourceIPMismatch",
    "InsufficientAccountPermissions",
}  # fmt: skip
_REFUSED_CREDENTIALS = {
    "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId",
    "SignatureDoesNotMatch", "AuthenticationRequired", "AuthenticationFailed", "InvalidAuthenticationInfo",
    "NoAuthenticationInformation", "401",
}  # fmt: skip
_ELSEWHERE = "the bucket lies in another region: set source.region"
_NO_BUCKET = "there is no such bucket: check its name"
_ADVICE = {
    "NoSuchBucket": f"{_NO_BUCKET}, source.endpoint and source.region",
    "ContainerNotFound": f"{_NO_BUCKET} and source.endpoint",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "PermanentRedirect": _ELSEWHERE,
    "AuthorizationHeaderMalformed": _ELSEWHERE,
    "InvalidBucketName": "no bucket can have this name: check it",
    "UserProjectMissing": "this bucket requires requester pays, which spiderfs does not support at Google's",
}


class Clients(NamedTuple):
    """What one process asks by: something that lists, obstore's store, and when they were made."""

    pid: int
    lists: Any
    gets: Any
    made_at: float


class Refusal(Exception):
    """A listing was answered with an error: its code, or the HTTP status where there is no code."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Bucket(ABC):
    """Asks nothing until the first question. Safe for threads, and on both sides of a fork."""

    scheme: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]]
    """What has to be installed, by `pip install '.[mount,SCHEME]'`."""
    rights: ClassVar[str]
    """What a user has to allow."""
    page_keys: ClassVar[int] = 1000
    """The most that the store lists in a page."""
    noisy: ClassVar[tuple[str, ...]]
    """Libraries that log what they send."""
    headers: ClassVar[Mapping[str, str]] = {}
    """What every GET says besides."""

    def __init__(self, name: str, settings: StoreSettings) -> None:
        self.name = name
        self.settings = settings
        self._clients: Clients | None = None
        self._connecting = threading.Lock()

    def __str__(self) -> str:
        return f"{self.scheme}://{self.name}"

    # -- what each store has its own way to do

    @cached_property
    @abstractmethod
    def endpoint(self) -> str:
        """The URL of the store, found once; empty where names of buckets are the same everywhere.

        Asks nothing of the network. Raises ConfigError where nothing says which store is meant.
        """

    @abstractmethod
    def connect(self) -> tuple[Any, Any]:
        """What lists, and obstore's store, for this process; raises SourceUnavailable if no credentials are found."""

    @abstractmethod
    def listed(self, lists: Any, prefix: str, token: str, most: int) -> Page:
        """See `page`; raises Refusal, SourceUnavailable."""

    # -- what is the same for all of them

    def page(self, prefix: str, token: str = "", most: int = 0) -> Page:
        """A page of the keys that begin with `prefix`, up to the next slash; raises SourceError."""
        clients = self.connected()
        try:
            return self.listed(clients.lists, prefix, token, most or self.page_keys)
        except Refusal as exc:
            # A listing says that something is gone by not having it.
            raise self._error("" if exc.code in _GONE else exc.code, prefix, clients) from None

    def get(self, key: str, extent: tuple[int, int] | None = None) -> GetResult:
        """What the store has under a key, or the bytes of `extent` of it; `body` reads them. Raises SourceError."""
        clients = self.connected()
        import obstore

        try:
            # `get_range` gives no ETag. A store that answers no ranges can give whole objects.
            return obstore.get(clients.gets, key, options=None if extent is None else {"range": extent})
        except Exception as exc:
            raise self._error(_code_of(exc), key, clients) from None

    def body(self, answer: GetResult, key: str, length: int) -> Any:
        """The bytes, in a buffer of obstore's; raises SourceUnavailable unless all `length` of them come."""
        try:
            body: Bytes = answer.bytes()
        except Exception as exc:
            raise _broken_off(key, exc) from None
        if len(body) != length:
            raise errors.SourceUnavailable(f"{key}: {len(body)} bytes came and not {length}")
        return body

    def stream(self, answer: GetResult, key: str) -> Iterator[Any]:
        """The bytes while they come, in buffers of obstore's; raises SourceUnavailable if the answer breaks off."""
        try:
            yield from answer.stream(min_chunk_size=STREAMED_BYTES)
        except Exception as exc:
            raise _broken_off(key, exc) from None

    def close(self) -> None:
        self._clients = None

    def store(self, kind: Any, url: str, authorities: str | None, /, **options: Any) -> Any:
        """A store of obstore's for this bucket, which lies at `url`; `authorities`: a file of further certificates."""
        from obstore.exceptions import BaseError

        client: ClientConfig = {
            # Whoever says https is not to be led away from it by a redirect.
            "allow_http": url.startswith("http:"),
            "connect_timeout": f"{CONNECT_S:g}s",
            # Between two pieces of an answer; a streamed one may take longer in all.
            "read_timeout": f"{self.settings.timeout_s:g}s",
            "timeout": f"{_STREAMED_TIMES * self.settings.timeout_s:g}s",
            "default_headers": dict(self.headers),
        }
        if authorities:
            with open(authorities, "rb") as file:
                client["root_certificate"] = file.read()
        try:
            return kind(self.name, client_options=client, retry_config={"max_retries": 0}, **options)
        except BaseError:
            raise errors.SourceUnavailable(f"{self} cannot be asked: check the variables of its environment") from None

    def connected(self) -> Clients:
        """What this process asks by; raises SourceUnavailable if no credentials are found."""
        clients = self._clients
        if clients is None or clients.pid != os.getpid():
            with self._connecting:
                clients = self._clients
                if clients is None or clients.pid != os.getpid():
                    for library in self.noisy:
                        logging.getLogger(library).setLevel(logging.CRITICAL)
                    lists, gets = self.connect()
                    clients = self._clients = Clients(os.getpid(), lists, gets, time.monotonic())
        return clients

    def _error(self, code: str, key: str, clients: Clients) -> errors.SourceError:
        """The error for a code of the store, or for an HTTP status where there is no code."""
        if code in _GONE:
            return errors.SourceNotFound(f"{key}: no such object")
        if code in _CHANGED:
            return errors.SourceChanged(f"{key}: no longer the version that was asked for")
        if code in _MAY_NOT_READ:
            return errors.SourceDenied(f"{self}/{key}: these credentials may not read it: {self.rights} ({code})")
        if code in _DENIED:
            return errors.SourceDenied(f"{self}/{key}: {_DENIED[code]} ({code})")
        if code in _THROTTLED:
            return errors.SourceThrottled(f"{self} is asked for too much at a time ({code})")
        if code == NO_DESCRIPTORS:
            return errors.SourceThrottled(f"{self}: {code}")
        if code in _REFUSED_CREDENTIALS:
            # They may have been rotated: the next question is asked with what can be found then.
            if self._clients is clients and time.monotonic() - clients.made_at > RECONNECT_S:
                self._clients = None
            return errors.SourceUnavailable(f"{self} refuses the credentials ({code}): renew them")
        if code == _WHOLE_ONLY:
            return errors.SourceUnavailable(
                f"{self} gives no parts of objects: raise sample_max_bytes to read this one whole"
            )
        if not code or code == _LATE:
            kind = errors.SourceTimeout if code else errors.SourceUnavailable
            return kind(f"{self} has not answered: check source.endpoint and the network")
        return errors.SourceUnavailable(f"{self}: {_ADVICE.get(code, 'the store has failed')} ({code})")


def _broken_off(key: str, exc: Exception) -> errors.SourceUnavailable:
    kind = errors.SourceTimeout if _LATE in str(exc) else errors.SourceUnavailable
    return kind(f"{key}: the answer broke off ({type(exc).__name__})")


def failure(asked: object, exc: Exception, troubles: Mapping[str, str]) -> errors.SourceUnavailable:
    """What a library has met, in our words, by the name of its error: its own text may have URLs of requests in it."""
    if lacks_descriptors(exc):
        return errors.SourceThrottled(f"{asked}: {NO_DESCRIPTORS}")
    name = type(exc).__name__
    text = troubles.get(name, f"{type(exc).__module__.partition('.')[0]} has failed ({name})")
    return (errors.SourceTimeout if "Timeout" in name else errors.SourceUnavailable)(f"{asked}: {text}")


def _code_of(exc: Exception) -> str:
    """The code of the store's error, or else obstore's or the HTTP status; without an answer _LATE or empty."""
    if lacks_descriptors(exc):
        return NO_DESCRIPTORS
    text = str(exc)
    if _WHOLE_ONLY in text:
        return _WHOLE_ONLY
    code = _CODE.search(text) or _STATUS.search(text)
    return code[1] if code else _LATE if _LATE in text else ""
