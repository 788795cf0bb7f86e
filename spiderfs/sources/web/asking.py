"""GETs over HTTP for sources that are no buckets, and of peers: each one is one request, and its answer one answer.

Redirects are answers like others, and nothing is repeated: `sources/client.py` repeats. Only where a server ends a kept
connection before it has answered, it is asked once more, over another one. A server that says how long it wants to be
left alone is (`Retry-After`, `RateLimit`): until then all who ask get SourceThrottled, and it nothing.

They go by `http.client`: a GET of 110 kB in 64 threads takes 140 to 190 us of processor time, as with obstore, and with
urllib3 230 to 260. What it has not is here: connections that are kept, proxies, a limit of time for a whole answer.

**Processes.** Connections do not survive a fork, so every process makes its own when it asks its first question.

**Secrets.** URLs may be signed, and headers may have tokens. So no message has more of a URL than its host, and none
has a text of the server's.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import math
import os
import re
import select
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from functools import cache, partial
from typing import Any, NamedTuple
from urllib.parse import unquote, urlencode, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from spiderfs.errors import SourceChanged, SourceThrottled, SourceTimeout, SourceUnavailable
from spiderfs.sources import object_source
from spiderfs.sources.source import STREAMED_BYTES, SourceStat, Version

# So much of the body of an error is read, for the connection's sake; the connection of a longer one is closed.
_ERROR_BYTES = 1 << 16
# No server is left alone for longer, whatever it says: the windows of the Hugging Face Hub are five minutes.
_LONGEST_REST_S = 300.0
_RESETS = re.compile(r"\br=0;t=(\d{1,4})\b")
_RANGE = re.compile(r"bytes (\d{1,19})-\d+/(\d{1,19})")
_REDIRECTS = (301, 302, 303, 307, 308)
_THROTTLED = (429, 503)

_TROUBLES = {
    "gaierror": "there is no such host: check its name and the network",
    "ConnectionRefusedError": "it cannot be reached: check its address and the network",
    "IncompleteRead": "the answer broke off",
    "OSError": "it cannot be reached: check its address, the network and HTTPS_PROXY",
    "InvalidURL": "this is no address of a server: check it",
    "TimeoutError": "it has not answered in time",
    "SSLError": "it does not answer with TLS: check its address",
    "SSLCertVerificationError": "its certificate is not trusted: name the authority's in SSL_CERT_FILE",
}


# Names of headers may be asked for in any case.
Headers = Message | Mapping[str, str]


class Answer(NamedTuple):
    """One answer; of an error or a redirect there is no body, nor of a part that comes piece by piece."""

    status: int
    headers: Headers
    body: bytes = b""

    @property
    def ok(self) -> bool:
        return self.status in (200, 206)

    @property
    def redirect(self) -> str:
        """Where to ask instead; empty if this is no redirect."""
        return self.headers.get("Location", "") if self.status in _REDIRECTS else ""

    @property
    def size(self) -> int:
        """The size of the whole file of which this is all or a part, in bytes."""
        found = _RANGE.fullmatch(self.headers.get("Content-Range", "")) if self.status == 206 else None
        return int(found[2]) if found else len(self.body)


class WebSource(object_source.ObjectSource):
    """A source whose bytes come in answers."""

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        """As `Source.read`."""
        end = min(offset + length, version.size)
        if offset >= end:
            self._check(path, version)
            return b""
        body = b"".join(self.stream(path, offset, length, version))
        if len(body) != end - offset:
            raise SourceUnavailable(f"{os.fsdecode(path)}: {len(body)} bytes came and not {end - offset}")
        return body

    def stream(self, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
        """As `Streams.stream`, by one GET."""
        end = min(offset + length, version.size)
        return self._pieces(path, None if offset == 0 and end == version.size else (offset, end), version)

    def _pieces(self, path: bytes, extent: tuple[int, int] | None, version: Version) -> Iterator[bytes]:
        """The bytes of a file, or those from one offset up to another, of just this version; raises SourceError."""
        raise NotImplementedError

    def _check(self, path: bytes, version: Version, found: Version | None = None) -> None:
        """Raise SourceChanged unless what was found, or else what is listed now, is this version."""
        if (self.stat(path).version if found is None else found) != version:
            raise SourceChanged(f"{os.fsdecode(path)}: no longer the version that was asked for")

    def stat(self, path: bytes) -> SourceStat:
        raise NotImplementedError


def origin(url: str) -> str:
    """Scheme, host and port of a URL, the port also where it is that of the scheme."""
    address = urlsplit(url)
    return f"{address.scheme}://{address.hostname}:{address.port or (443 if address.scheme == 'https' else 80)}"


def is_address(url: str) -> bool:
    """Whether this is a URL of a web server, so that `origin` knows its parts."""
    try:
        return urlsplit(url).scheme in ("http", "https") and "None" not in origin(url)
    except ValueError:  # brackets that do not close, or a port that is no number or too large
        return False


def led_to(url: str, location: str) -> str:
    """The address that an answer from `url` names; raises SourceUnavailable if it is none."""
    try:
        found = urljoin(url, location)
    except ValueError:
        found = ""
    if not is_address(found):
        raise SourceUnavailable(f"{urlsplit(url).hostname} leads to an address that is none")
    return found


def left_s(until: float) -> float:
    """How long it is until a time; raises TimeoutError when it has come."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Limited(io.RawIOBase):
    """What a socket brings until a time. By itself it would begin to wait again for each byte of those that drip."""

    def __init__(self, sock: socket.socket, raw: Any, silence_s: float, until: float) -> None:
        self._socket, self._raw, self._silence_s, self._until = sock, raw, silence_s, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(min(left_s(self._until), self._silence_s))
        read: int | None = self._raw.readinto(buffer)
        return read

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that has come whole, its headers too, by a time."""

    def __init__(self, sock: socket.socket, *args: Any, silence_s: float, until: float, **named: Any) -> None:
        super().__init__(sock, *args, **named)
        self.fp = io.BufferedReader(_Limited(sock, self.fp.detach(), silence_s, until))


class Line(NamedTuple):
    """A connection to a host, or to the proxy in front of it, which wants more with each request."""

    connection: http.client.HTTPConnection
    prefix: str = ""
    headers: Mapping[str, str] = {}


class Web:
    """Asks nothing until the first question. Safe for threads, and on both sides of a fork."""

    def __init__(self, timeout_s: float, connect: Callable[[str, float], Line] | None = None) -> None:
        """`connect` reaches the server of a URL by some time, in a way of its own."""
        self._timeout_s = timeout_s
        self._connect = connect or _connected
        self._pid = 0
        self._idle: dict[str, list[Line]] = {}
        self._rests_until: dict[str, float] = {}
        self._lock = threading.Lock()

    def get(self, url: str, headers: Mapping[str, str] | None = None, **question: Any) -> Answer:
        """The answer to the question that `coming` asks; it takes at most the time-out unless that says otherwise."""
        with self.coming(url, headers, **{"within_s": self._timeout_s} | question) as (answer, pieces):
            return answer._replace(body=b"".join(pieces))

    @contextlib.contextmanager
    def coming(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        extent: tuple[int, int] | None = None,
        most_bytes: int,
        within_s: float | None = None,
        form: Mapping[str, str] | None = None,
        quota: str = "",
    ) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        """The answer to a GET, or to the POST of a `form`, and its body piece by piece, until the `with` block ends.

        `extent` asks for the bytes from one offset up to another; without it the body is one piece. The whole answer
        takes at most `within_s` (default: the time-out for each piece that it may have). `quota` names what the server
        counts together. Raises SourceUnavailable, SourceThrottled, and SourceChanged for more than `most_bytes`.
        """
        host = urlsplit(url).hostname or "it"
        quota = quota or host
        if (rest_s := self._rests_until.get(quota, -math.inf) - time.monotonic()) > 0:
            raise SourceThrottled(f"{host} wants not to be asked for another {rest_s:.0f} s (429)")
        asked = {"Accept-Encoding": "identity", "User-Agent": "spiderfs", **(headers or {})}
        if extent is not None:
            asked["Range"] = f"bytes={extent[0]}-{extent[1] - 1}"
        if form is not None:
            asked["Content-Type"] = "application/x-www-form-urlencoded"
        pieces_at_most = 1 if extent is None else max(1, -(-most_bytes // STREAMED_BYTES))
        until = time.monotonic() + (self._timeout_s * pieces_at_most if within_s is None else within_s)
        try:
            line, response = self._response(url, asked, form, until)
            kept = False
            try:
                with response:
                    answer = self._answer(response, host, quota, extent)
                    pieces = self._body(response, host, most_bytes) if answer.ok else iter(())
                    if extent is None:
                        # How long it is may not be known before it has come.
                        answer = answer._replace(body=b"".join(pieces))
                        pieces = iter((answer.body,))
                    yield answer, pieces
                    # After a word of 1xx the answer is yet to come.
                    kept = response.length == 0 and not response.will_close and response.status >= 200
            finally:
                self._give_back(url, line, kept)
        except (http.client.HTTPException, OSError, ValueError) as exc:
            if object_source.lacks_descriptors(exc):
                raise SourceThrottled(f"{host}: {object_source.NO_DESCRIPTORS}") from None
            # What is wrong in a header or a proxy's address is a ValueError of whatever reads it.
            name = type(exc).__name__
            kind = SourceTimeout if isinstance(exc, TimeoutError) else SourceUnavailable
            raise kind(f"{host}: {_TROUBLES.get(name, f'the answer broke off ({name})')}") from None

    def _response(
        self, url: str, asked: Mapping[str, str], form: Mapping[str, str] | None, until: float
    ) -> tuple[Line, http.client.HTTPResponse]:
        _, _, place = url.partition("://")[2].partition("/")
        body, method = (None, "GET") if form is None else (urlencode(form), "POST")
        while True:
            line, again = self._line(url, until)
            connection = line.connection
            try:
                connection.sock.settimeout(min(self._timeout_s, left_s(until)))
                connection.response_class = partial(_Response, silence_s=self._timeout_s, until=until)  # type: ignore[assignment]
                connection.request(method, f"{line.prefix}/{place}", body, {**asked, **line.headers})
                return line, connection.getresponse()
            except BaseException as exc:
                self._give_back(url, line, kept=False)
                # The server may just have ended a connection that was kept, which says nothing of it.
                if not again or not isinstance(exc, ConnectionError):
                    raise

    def _answer(
        self, response: http.client.HTTPResponse, host: str, quota: str, extent: tuple[int, int] | None
    ) -> Answer:
        status, headers = response.status, response.headers
        if status not in (200, 206):
            if (response.length or 0) <= _ERROR_BYTES:
                for _ in self._body(response, host, _ERROR_BYTES):
                    pass
            if status in _THROTTLED:
                self._rest(quota, headers)
                raise SourceThrottled(f"{host} is asked for too much at a time ({status})")
            if status >= 500:
                raise SourceUnavailable(f"{host} has failed ({status})")
            return Answer(status, headers)
        if extent is not None and status == 200:
            raise SourceUnavailable(
                f"{host} gives no parts of files: raise sample_max_bytes, so that none is asked for"
            )
        if status == 206:
            found = _RANGE.fullmatch(headers.get("Content-Range", ""))
            if extent is None or found is None or int(found[1]) != extent[0]:
                raise SourceUnavailable(f"{host} gives another part of a file than it was asked for")
        if response.length is None and not response.chunked:
            raise SourceUnavailable(f"{host} sends answers without Content-Length: configure it to send it")
        return Answer(status, headers)

    def _body(self, response: http.client.HTTPResponse, host: str, most_bytes: int) -> Iterator[bytes]:
        size = response.length or 0
        while size <= most_bytes and (piece := response.read(STREAMED_BYTES)):
            size += 0 if response.length is not None else len(piece)
            yield piece
        if size > most_bytes:
            raise SourceChanged(f"{host} gives more than the {most_bytes} bytes that were asked for")
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)

    def _rest(self, quota: str, headers: Headers) -> None:
        said = headers.get("Retry-After", "")
        resets = _RESETS.search(headers.get("RateLimit", ""))
        rest_s = float(said) if said.isdecimal() else float(resets[1]) if resets else 0.0
        if rest_s:
            self._rests_until[quota] = time.monotonic() + min(rest_s, _LONGEST_REST_S)

    # -- connections

    def _line(self, url: str, until: float) -> tuple[Line, bool]:
        """A connection, and whether it was kept."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._idle = os.getpid(), {}
            idle = self._idle.get(origin(url), [])
            while idle:
                line, looked_at = idle.pop(), select.poll()
                looked_at.register(line.connection.sock, select.POLLIN)
                # Where nothing was asked, there is something to read only if the server has closed the connection.
                if not looked_at.poll(0):
                    return line, True
                line.connection.close()
        return self._connect(url, until), False

    def _give_back(self, url: str, line: Line, kept: bool) -> None:
        with self._lock:
            idle = self._idle.setdefault(origin(url), [])
            if kept and self._pid == os.getpid() and len(idle) < object_source.KEPT_CONNECTIONS:
                idle.append(line)
                return
        line.connection.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for line in (line for lines in idle.values() for line in lines):
            line.connection.close()


@cache
def _trusted() -> ssl.SSLContext:
    """Whom this machine trusts: to read the list of them takes 16 ms."""
    return ssl.create_default_context()


def _connected(url: str, _: float) -> Line:
    address = urlsplit(url)
    host, secure = address.hostname or "", address.scheme == "https"
    proxy = "" if proxy_bypass(host) else getproxies().get(address.scheme, "")
    try:
        via = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else address
        server, port = via.hostname or "", via.port
    except ValueError:  # brackets that do not close, or a port that is no number or too large
        # It may have a password.
        raise SourceUnavailable(
            f"{host}: {address.scheme.upper()}_PROXY is no address: write it like http://proxy.example.org:3128"
        ) from None
    connection = (
        http.client.HTTPSConnection(server, port, timeout=object_source.CONNECT_S, context=_trusted())
        if secure
        else http.client.HTTPConnection(server, port, timeout=object_source.CONNECT_S)
    )
    login, line = {}, Line(connection)
    if proxy and via.username:
        words = f"{unquote(via.username)}:{unquote(via.password or '')}".encode()
        login = {"Proxy-Authorization": f"Basic {b64encode(words).decode()}"}
    if proxy and secure:
        connection.set_tunnel(host, address.port, login)
    elif proxy:
        line = Line(connection, f"http://{address.netloc}", login)
    try:
        connection.connect()
    except BaseException:
        # Where TLS fails there is a socket already.
        connection.close()
        raise
    return line
