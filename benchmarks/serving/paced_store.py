"""A store that speaks as S3 does, answers each request after some milliseconds, and counts what it is asked and gives.

It runs in a process of its own. It checks no signature, knows one bucket, and limits nothing but the bytes a second of
its line, if it is asked to. Its objects are made of the same bytes; a listing has their sizes.
"""

from __future__ import annotations

import asyncio
import bisect
import multiprocessing
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from benchmarks.common.sources import BUCKET, patterned

PAGE_KEYS = 1000
E_TAG = "0123456789abcdef0123456789abcdef"
MODIFIED = formatdate(1_700_000_000, usegmt=True)
END_PATIENCE_S = 5.0


class Asked(NamedTuple):
    """What a store was asked for, and gave."""

    gets: int = 0
    lists: int = 0
    heads: int = 0
    given_bytes: int = 0
    """Of objects."""


@dataclass
class Objects:
    """Keys in order, all of which have the same size but those in `large`."""

    keys: Sequence[str]
    size: int
    large: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sorted = sorted([*self.keys, *self.large])
        self._known = set(self._sorted)

    def size_of(self, key: str) -> int | None:
        """None if there is no such object."""
        return self.large.get(key, self.size) if key in self._known else None

    def page(self, prefix: str, delimiter: str, after: str, most: int) -> tuple[list[str], bool]:
        """Keys, and prefixes that end with the delimiter, behind `after`; and whether there are more."""
        found: list[str] = []
        at = max(bisect.bisect_left(self._sorted, prefix), _behind(self._sorted, after, delimiter))
        while at < len(self._sorted) and self._sorted[at].startswith(prefix):
            if len(found) == most:
                return found, True
            below, cut, _ = self._sorted[at][len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            found.append(prefix + below + cut if cut else self._sorted[at])
            at = _behind(self._sorted, found[-1], delimiter)
        return found, False


def _behind(keys: list[str], shown: str, delimiter: str) -> int:
    """Where what comes after a key, or after all that a prefix stands for, begins."""
    last = shown + "\U0010ffff" if delimiter and shown.endswith(delimiter) else shown
    return bisect.bisect_right(keys, last)


class _Answers:
    """What the store says, whoever asks."""

    def __init__(self, objects: Objects, latency_s: float) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = 0  # 0 is unlimited
        self.asked = Asked()
        self._objects = objects
        self._free_s = 0.0

    def due_s(self, now_s: float, size: int) -> float:
        """When the last of so many bytes has come over the line."""
        if not self.bytes_per_s:
            return now_s + self.latency_s
        self._free_s = max(self._free_s, now_s + self.latency_s) + size / self.bytes_per_s
        return self._free_s

    def answer(self, method: str, target: str, headers: str) -> bytes:
        address = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
        key = unquote(address.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        if not key:
            self.asked = self.asked._replace(lists=self.asked.lists + 1)
            return _head(200, self._listing(query)) if method == "GET" else _head(200, b"")
        size = self._objects.size_of(key)
        if method == "HEAD":
            self.asked = self.asked._replace(heads=self.asked.heads + 1)
            return _head(404, b"") if size is None else _head(200, b"", length=size)
        self.asked = self.asked._replace(gets=self.asked.gets + 1)
        if size is None:
            return _head(404, b"<Error><Code>NoSuchKey</Code></Error>")
        begin, end = 0, size
        ranged = re.search(r"(?im)^range: *bytes=(\d+)-(\d*)", headers)
        if ranged:
            begin, end = int(ranged[1]), min(size, int(ranged[2]) + 1 if ranged[2] else size)
        content = patterned(begin, end)
        self.asked = self.asked._replace(given_bytes=self.asked.given_bytes + len(content))
        return (
            _head(206, content, f"Content-Range: bytes {begin}-{end - 1}/{size}\r\n") if ranged else _head(200, content)
        )

    def _listing(self, query: dict[str, str]) -> bytes:
        """A page, in the first or in the second form of ListObjects."""
        after = query.get("continuation-token") or query.get("start-after") or query.get("marker") or ""
        most = min(PAGE_KEYS, int(query.get("max-keys") or PAGE_KEYS))
        delimiter = query.get("delimiter", "")
        shown, more = self._objects.page(query.get("prefix", ""), delimiter, after, most)
        rows = [
            f"<CommonPrefixes><Prefix>{quote(name)}</Prefix></CommonPrefixes>"
            if delimiter and name.endswith(delimiter)
            else f"<Contents><Key>{quote(name)}</Key><LastModified>2023-11-14T22:13:20.000Z</LastModified>"
            f"<ETag>&quot;{E_TAG}&quot;</ETag><Size>{self._objects.size_of(name)}</Size></Contents>"
            for name in shown
        ]
        token = "NextContinuationToken" if "list-type" in query else "NextMarker"
        rest = f"<{token}>{quote(shown[-1])}</{token}>" if more else ""
        return (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{quote(query.get('prefix', ''))}</Prefix><EncodingType>url</EncodingType>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{rest}{''.join(rows)}</ListBucketResult>"
        ).encode()


def _head(status: int, body: bytes, headers: str = "", length: int | None = None) -> bytes:
    """An answer; with a `length`, that of a HEAD."""
    words = {200: "OK", 206: "Partial Content", 404: "Not Found"}[status]
    head = (
        f"HTTP/1.1 {status} {words}\r\nContent-Length: {len(body) if length is None else length}\r\n"
        f"Content-Type: {'application/xml' if body.startswith(b'<') else 'application/octet-stream'}\r\n"
        f'ETag: "{E_TAG}"\r\nLast-Modified: {MODIFIED}\r\nAccept-Ranges: bytes\r\n{headers}\r\n'
    )
    return head.encode() + body


class _Connection(asyncio.Protocol):
    def __init__(self, answers: _Answers) -> None:
        self._answers = answers
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            request, _, headers = head.decode().partition("\r\n")
            method, target, _ = request.split(" ", 2)
            answer = self._answers.answer(method, target, headers)
            loop = asyncio.get_running_loop()
            loop.call_at(self._answers.due_s(loop.time(), len(answer)), self._transport.write, answer)


def _serve(objects: Objects, latency_s: float, address: str, connection: Connection) -> None:
    """Say at which port the store is; then, for each message, what it was asked since the last one."""
    answers = _Answers(objects, latency_s)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(answers), address, 0, backlog=1000)
        connection.send(server.sockets[0].getsockname()[1])
        ended = loop.create_future()

        def released() -> None:
            try:
                answers.bytes_per_s = connection.recv()
            except EOFError:
                loop.remove_reader(connection.fileno())
                ended.set_result(None)
                return
            connection.send(answers.asked)
            answers.asked = Asked()

        loop.add_reader(connection.fileno(), released)
        await ended

    asyncio.run(run())


class PacedStore:
    def __init__(self, address: str, connection: Connection) -> None:
        self.url = f"http://{address}:{connection.recv()}"
        self.bytes_per_s = 0
        self._connection = connection

    def asked(self) -> Asked:
        """What it was asked since this was called last; from now on its line gives `bytes_per_s`, 0 for unlimited."""
        self._connection.send(self.bytes_per_s)
        asked: Asked = self._connection.recv()
        return asked


@contextmanager
def paced_store(objects: Objects, latency_ms: float, address: str = "127.0.0.1") -> Iterator[PacedStore]:
    """A store of these objects, at this address of this machine; its process ends with the context."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(objects, latency_ms / 1000, address, there), daemon=True)
    process.start()
    there.close()
    try:
        yield PacedStore(address, here)
    finally:
        here.close()
        process.join(END_PATIENCE_S)
        process.terminate()


def bucket(url: str) -> Any:
    from obstore.store import S3Store

    options: Any = {"allow_http": True}
    return S3Store(BUCKET, endpoint=url, region="us-east-1", skip_signature=True, client_options=options)


class Bucket:
    """GETs by obstore. The client is made in the loader's worker, because it does not outlive a fork."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._store: Any = None

    def read(self, key: str) -> int:
        import obstore

        if self._store is None:
            self._store = bucket(self._url)
        return len(obstore.get(self._store, key).bytes())
