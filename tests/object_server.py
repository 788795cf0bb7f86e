"""A small store in a thread of the test: it counts what it is asked, and fails as it is told.

It speaks as Amazon's (`s3`), Google's (`gs`) or Microsoft's (`az`) does, as their documents have it, and checks no
signatures. `requests` has an entry for each request: `LIST PREFIX` or `GET KEY`, or the method and path of any other;
`headers` has the headers of each, and `queries` what stands behind the `?`.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, quote, quote_plus, unquote, urlsplit
from xml.sax.saxutils import escape

from local_server import AskedServer

MODIFIED_S = 1_700_000_000


class ObjectServer(AskedServer):
    """The objects of one bucket; everything may be changed while it is asked."""

    def __init__(self, bucket: str = "bucket", certificate: Path | None = None, dialect: str = "s3") -> None:
        """`certificate`: a PEM file with a key; then it speaks TLS, as the host `localhost`."""
        self.bucket, self.dialect = bucket, dialect
        self.no_object, self.no_bucket = (
            ("BlobNotFound", "ContainerNotFound") if dialect == "az" else ("NoSuchKey", "NoSuchBucket")
        )
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.queries: list[dict[str, str]] = []
        self.token = "TOKEN"
        self.latency_s = 0.0
        self.page_keys = 1000
        self.fails: Callable[[str], tuple[int, str] | None] = lambda request: None
        """Given a request, status and code of an error, or None; an empty code is an answer without a body."""
        self.folders: set[str] = set()
        """Keys that are marked as directories, as Microsoft's store has them."""
        self.listed_tag: Callable[[str], str] = lambda tag: tag
        """What listings have in place of the tag that GETs have."""
        self.modified_s: dict[str, int] = {}
        """When each object was written; MODIFIED_S for others."""
        self.cuts: set[str] = set()
        """Keys of which half of the bytes come."""
        self.pause_s = 0.0
        """How long each MiB of an answer takes to come."""
        super().__init__(_handler_of(self), certificate)

    def e_tag(self, content: bytes) -> str:
        """As a GET has it; Microsoft's listings have it without quotes."""
        return f'"0x{e_tag(content)[:15].upper()}"' if self.dialect == "az" else f'"{e_tag(content)}"'

    def modified(self, key: str) -> datetime:
        return datetime.fromtimestamp(self.modified_s.get(key, MODIFIED_S), UTC)

    def listing(self, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("marker" if self.dialect == "az" else "continuation-token", "")
        most = int(query.get("maxresults" if self.dialect == "az" else "max-keys", "1000"))
        most = min(most, self.page_keys)
        # A test may change the objects meanwhile.
        objects = dict(self.objects)
        rows: list[str] = []
        last, prefixes, more = "", set(), False
        for key in sorted(key for key in objects if key.startswith(prefix)):
            below, slash, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            shown = prefix + below + slash if slash else key
            if shown <= after or shown in prefixes:
                continue
            if len(rows) == most:
                more = True
                break
            is_told = query.get("include") == "metadata"
            rows.append(self._prefix_row(shown) if slash else self._object_row(key, objects[key], is_told))
            if slash:
                prefixes.add(shown)
            last = shown
        if self.dialect == "az":
            return (
                f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="{self.bucket}">'
                f"<Prefix>{escape(prefix)}</Prefix><Delimiter>/</Delimiter><Blobs>{''.join(rows)}</Blobs>"
                f"<NextMarker>{escape(last) if more else ''}</NextMarker></EnumerationResults>"
            ).encode()
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else ""
        text = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{self.bucket}</Name><EncodingType>url</EncodingType>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(rows)}</ListBucketResult>"
        )
        return text.encode()

    def _prefix_row(self, prefix: str) -> str:
        if self.dialect == "az":
            return f"<BlobPrefix>{_name(prefix)}</BlobPrefix>"
        return f"<CommonPrefixes><Prefix>{_quoted(prefix)}</Prefix></CommonPrefixes>"

    def _object_row(self, key: str, content: bytes, is_told: bool) -> str:
        modified, tag = self.modified(key), self.listed_tag(self.e_tag(content).strip('"'))
        if self.dialect == "az":
            told = "<Metadata><Hdi_isfolder>true</Hdi_isfolder></Metadata>" if is_told and key in self.folders else ""
            return (
                f"<Blob>{_name(key)}<Properties><Creation-Time>Mon, 13 Nov 2023 22:13:20 GMT</Creation-Time>"
                f"<Last-Modified>{format_datetime(modified, usegmt=True)}</Last-Modified><Etag>{tag}</Etag>"
                f"<Content-Length>{len(content)}</Content-Length><Content-MD5>x==</Content-MD5>"
                f"<BlobType>BlockBlob</BlobType></Properties>{told}<OrMetadata /></Blob>"
            )
        return (
            f"<Contents><Key>{_quoted(key)}</Key><LastModified>{modified:%Y-%m-%dT%H:%M:%S.123Z}</LastModified>"
            f"<ETag>&quot;{tag}&quot;</ETag><Size>{len(content)}</Size>"
            "<Owner><ID>1</ID></Owner><StorageClass>STANDARD</StorageClass></Contents>"
        )


def e_tag(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def _quoted(key: str) -> str:
    return quote_plus(key, safe="/")


def _name(key: str) -> str:
    """A name as Microsoft's listings have it: quoted if it has what XML cannot have."""
    if any(ord(letter) < 32 for letter in key):
        return f'<Name Encoded="true">{quote(key)}</Name>'
    return f"<Name>{escape(key)}</Name>"


def _handler_of(server: ObjectServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Without this the body waits for an acknowledgement of the headers.
        disable_nagle_algorithm = True
        wbufsize = -1

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
            bucket, _, key = unquote(address.path).removeprefix("/").partition("/")
            is_listing = "list-type" in query or query.get("comp") == "list"
            request = f"LIST {query.get('prefix', '')}" if is_listing else f"GET {key}"
            server.requests.append(request)
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            server.queries.append(query)
            if server.latency_s:
                time.sleep(server.latency_s)
            failure = server.fails(request)
            if failure is None and bucket != server.bucket:
                failure = 404, server.no_bucket
            if failure is not None:
                self._fail(*failure)
            elif is_listing:
                self._answer(200, server.listing(query), {"Content-Type": "application/xml"})
            elif (content := server.objects.get(key)) is None:
                self._fail(404, server.no_object)
            else:
                self._give(key, content)

        def do_POST(self) -> None:
            """Give a token, as a server of Google's credentials does."""
            self.rfile.read(int(self.headers["Content-Length"]))
            server.requests.append(f"POST {self.path}")
            token = f'{{"access_token": "{server.token}", "expires_in": 3600, "token_type": "Bearer"}}'
            self._answer(200, token.encode(), {"Content-Type": "application/json"})

        def do_HEAD(self) -> None:
            server.requests.append(f"HEAD {self.path}")
            self._answer(200, b"", {})

        def _give(self, key: str, content: bytes) -> None:
            modified = format_datetime(server.modified(key), usegmt=True)
            headers = {"ETag": server.e_tag(content), "Last-Modified": modified}
            status, part = 200, content
            if extent := self.headers.get("Range"):
                first, _, last = extent.removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last or len(content)) + 1, len(content))
                if start >= len(content):
                    self._fail(416, "InvalidRange")
                    return
                status, part = 206, content[start:end]
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            self._answer(status, part, headers, cut=key in server.cuts)

        def _fail(self, status: int, code: str) -> None:
            body = f"<Error><Code>{code}</Code><Message>SECRET MESSAGE</Message></Error>".encode() if code else b""
            self._answer(status, body, {"Content-Type": "application/xml"})

        def _answer(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            body = body[: len(body) // 2] if cut else body
            for at in range(0, len(body), 1 << 20):
                time.sleep(server.pause_s)
                self.wfile.write(body[at : at + (1 << 20)])
                self.wfile.flush()
            self.wfile.flush()
            if cut:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            # A client that was killed, or that does not want what it asked for.
            with contextlib.suppress(ConnectionError):
                super().handle()

    return Handler


@contextlib.contextmanager
def object_server(
    bucket: str = "bucket", certificate: Path | None = None, dialect: str = "s3"
) -> Iterator[ObjectServer]:
    server = ObjectServer(bucket, certificate, dialect)
    try:
        yield server
    finally:
        server.close()
