"""Servers that answer as none should, byte for byte: no wrong byte, no name that goes, and an end in time."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from urllib.parse import unquote

import pytest

from benchmarks.common.sources import patterned
from spiderfs.errors import SourceChanged, SourceUnavailable
from spiderfs.sources import object_source
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.open import open_source
from spiderfs.sources.source import Version
from spiderfs.sources.web.hub import HubSource
from spiderfs.sources.web.manifest import ManifestSource

CONTENT = b"0123456789"
MANIFEST = b"a.jpg\t10\t1700000000\nb.jpg\t10\t1700000000\n"
VERSION = Version(10, 1_700_000_000 * 10**9)
DATA_SET = "hf://datasets/owner/photos"
DATE = "Last-Modified: Tue, 14 Nov 2023 22:13:20 GMT"


def answer(body: bytes, *headers: str, status: str = "200 OK", length: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status}", DATE, *headers, "Connection: close"]
    lines += [f"Content-Length: {len(body)}"] if length else []
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.contextmanager
def serving(give: Callable[[str], bytes | Iterator[bytes]], drip_s: float = 0.0) -> Iterator[str]:
    """The URL of a server that sends just these bytes for each path."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    threading.Thread(target=one, args=(connection,), daemon=True).start()

        def one(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                words = give(unquote(connection.recv(65536).split(b" ")[1].decode()))
                if not drip_s:
                    for piece in (words,) if isinstance(words, bytes) else words:
                        connection.sendall(piece)
                    return
                for byte in b"".join(words) if not isinstance(words, bytes) else words:
                    connection.sendall(bytes([byte]))
                    time.sleep(drip_s)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def of_manifest(file: bytes, manifest: bytes = answer(MANIFEST), drip_s: float = 0.0) -> Iterator[ManifestSource]:
    with (
        serving(lambda path: manifest if path == "/m.tsv" else file, drip_s) as url,
        contextlib.closing(ManifestSource(f"{url}/m.tsv", StoreSettings(timeout_s=1))) as source,
    ):
        yield source


@pytest.mark.parametrize(
    "file",
    [
        answer(CONTENT[:5], length=False),
        answer(CONTENT[:5], "Content-Length: -5", length=False),
        answer(CONTENT[:5], "Content-Range: bytes 0-4/10", status="206 Partial Content"),
        answer(CONTENT[:5], status="206 Partial Content"),
        answer(gzip.compress(CONTENT), "Content-Encoding: gzip"),
        answer(CONTENT).replace(DATE.encode(), b"Last-Modified: Mon, 01 Jan 2024 00:00:00 +99999999999999999999"),
    ],
    ids=["no length", "no right length", "a part", "some part", "packed", "no date"],
)
def test_what_may_be_no_whole_file_is_not_taken_for_one(file: bytes) -> None:
    with of_manifest(file) as source, pytest.raises(SourceUnavailable) as caught:
        source.read_present(b"a.jpg", 1000)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("headers", [["Content-Range: bytes 0-3/10"], []], ids=["wrong", "none"])
def test_another_part_than_was_asked_for_is_refused(headers: list[str]) -> None:
    file = answer(CONTENT[:4], *headers, status="206 Partial Content")
    with of_manifest(file) as source, pytest.raises(SourceUnavailable, match="another part"):
        source.read(b"a.jpg", 2, 4, VERSION)


SIZE = 4 << 20
PARTS = Version(SIZE, VERSION.mtime_ns)


@contextlib.contextmanager
def of_parts(given: Callable[[bytes], Iterator[bytes]]) -> Iterator[ManifestSource]:
    """A file of 4 MiB, of which a server gives all but the first byte; `given` makes the pieces of its answer."""
    part = f"Content-Range: bytes 1-{SIZE - 1}/{SIZE}"
    file, manifest = answer(patterned(1, SIZE), part, status="206 Partial Content"), answer(b"a\t4194304\t1700000000\n")
    with (
        serving(lambda path: manifest if path == "/m.tsv" else given(file)) as url,
        contextlib.closing(ManifestSource(f"{url}/m.tsv", StoreSettings(timeout_s=1))) as source,
    ):
        yield source


def test_a_part_is_given_while_it_comes() -> None:
    has_begun = threading.Event()

    def given(file: bytes) -> Iterator[bytes]:
        yield file[: 2 << 20]
        assert has_begun.wait(30)
        yield file[2 << 20 :]

    with of_parts(given) as source:
        pieces = source.stream(b"a", 1, SIZE - 1, PARTS)
        first = next(pieces)
        has_begun.set()
        assert first + b"".join(pieces) == patterned(1, SIZE)


@pytest.mark.parametrize("ends", ["broken off", "silent"])
def test_a_part_that_does_not_come_to_its_end_is_none(ends: str) -> None:
    has_failed = threading.Event()

    def given(file: bytes) -> Iterator[bytes]:
        yield file[: 3 << 20]
        if ends == "silent":
            has_failed.wait(10)

    with of_parts(given) as source:
        pieces = source.stream(b"a", 1, SIZE - 1, PARTS)
        assert next(pieces) == patterned(1, (1 << 20) + 1)
        with pytest.raises(SourceUnavailable, match="broke off" if ends == "broken off" else "not answered in time"):
            list(pieces)
        has_failed.set()


def test_a_part_of_another_version_gives_no_piece() -> None:
    with of_parts(lambda file: iter([file])) as source, pytest.raises(SourceChanged):
        next(source.stream(b"a", 1, SIZE - 1, PARTS._replace(mtime_ns=5 * 10**9)))


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (answer(MANIFEST[:20], length=False), "answers without Content-Length"),
        (answer(b"\xef\xbb\xbf" + MANIFEST), "byte order mark"),
        (answer(MANIFEST.replace(b"\n", b"\r\n")), "line 1 is not"),
    ],
    ids=["cut", "mark", "returns"],
)
def test_a_manifest_that_may_be_wrong_makes_no_name_go_or_come(manifest: bytes, said: str) -> None:
    with of_manifest(b"", manifest) as source, pytest.raises(SourceUnavailable, match=said) as caught:
        list(source.scan(b""))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("proxy", ["http://me:SECRET@proxy:port", "proxy:99999", "http://[proxy"])
def test_a_proxy_without_an_address_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.delenv("no_proxy", raising=False)
    source = ManifestSource("http://data.example.org/m.tsv", StoreSettings())
    with pytest.raises(SourceUnavailable, match=r"^data.example.org: HTTP_PROXY is no address: write ") as caught:
        source.stat(b"")
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("proxy", ["http://me:SECRET@proxy:port", "proxy:99999"])
@pytest.mark.parametrize("url", ["s3://bucket", "gs://bucket"])
def test_a_bucket_behind_such_a_proxy_says_so_too(monkeypatch: pytest.MonkeyPatch, url: str, proxy: str) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.delenv("no_proxy", raising=False)
    source = open_source(url, StoreSettings(endpoint="http://store.example.org", anonymous=True, region="r"))
    with pytest.raises(SourceUnavailable, match=r"a proxy's, cannot be used: .* HTTP_PROXY and HTTPS_PROXY$") as caught:
        source.stat(b"")
    assert "SECRET" not in str(caught.value)


def test_a_time_that_no_file_has_is_a_tag() -> None:
    with of_manifest(b"", answer(b"a\t5\tffffffffffffffff-5\n")) as source:
        assert source.stat(b"a").tag


def test_headers_that_drip_end_in_time() -> None:
    with of_manifest(answer(CONTENT), drip_s=0.1) as source:
        began = time.monotonic()
        with pytest.raises(SourceUnavailable, match="in time"):
            source.read(b"a.jpg", 0, 10, VERSION)
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("row", [{"path": "b\ud800"}, {"path": "b", "lfs": "x"}, {"path": "b", "oid": 1}])
def test_odd_rows_of_a_hub_harm_no_other(row: dict[str, object]) -> None:
    file = {"type": "file", "oid": "a" * 40, "size": 3}
    rows = json.dumps([{**file, "path": "a"}, {**file, **row}]).encode()
    commit = json.dumps({"sha": "c" * 40}).encode()
    with serving(lambda path: answer(commit if "/revision/" in path else rows)) as url:
        source = HubSource(DATA_SET, StoreSettings(endpoint=url, anonymous=True, timeout_s=5))
        assert b"a" in dict(source.scan(b""))


def test_a_listing_that_cannot_be_parsed_is_an_error() -> None:
    commit = json.dumps({"sha": "c" * 40}).encode()
    with serving(lambda path: answer(commit if "/revision/" in path else b"[" * 100_000)) as url:
        source = HubSource(DATA_SET, StoreSettings(endpoint=url, anonymous=True, timeout_s=5))
        with pytest.raises(SourceUnavailable, match="cannot be read"):
            list(source.scan(b""))


def test_pages_of_a_bucket_that_come_round_end() -> None:
    def page(path: str) -> bytes:
        following = "B" if "continuation-token=A" in path else "A"
        return answer(
            b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>%b</NextContinuationToken>"
            b"</ListBucketResult>" % following.encode()
        )

    with serving(page) as url:
        source = open_source("s3://bucket", StoreSettings(endpoint=url, anonymous=True, region="r", timeout_s=5))
        for ask in (lambda: list(source.scan(b"")), lambda: source.stat(b"a")):
            with pytest.raises(SourceUnavailable, match="again and again"):
                ask()


@pytest.mark.parametrize(("key", "shared"), [(b"a", 1000), (b"%08d", 0.2)], ids=["one name", "ever new names"])
def test_a_listing_with_ever_new_pages_ends(monkeypatch: pytest.MonkeyPatch, key: bytes, shared: float) -> None:
    monkeypatch.setattr(object_source, "_IDLE_PAGES", 20)
    monkeypatch.setattr(object_source, "LIST_TIMEOUTS", shared)
    pages = count()

    def page(path: str) -> bytes:
        number = next(pages)
        return answer(
            b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>%d</NextContinuationToken>"
            b"<Contents><Key>%b</Key><Size>1</Size><LastModified>2023-11-14T22:13:20Z</LastModified></Contents>"
            b"</ListBucketResult>" % (number, key % number if b"%" in key else key)
        )

    with serving(page) as url:
        source = open_source("s3://bucket", StoreSettings(endpoint=url, anonymous=True, region="r", timeout_s=5))
        with pytest.raises(SourceUnavailable, match="or ever new ones"):
            list(source.scan(b""))


def test_a_part_that_no_one_asked_for_is_no_shorter_file() -> None:
    listing = answer(
        b"<ListBucketResult><Contents><Key>a</Key><Size>10</Size><LastModified>2023-11-14T22:13:20Z</LastModified>"
        b'<ETag>"x"</ETag></Contents></ListBucketResult>'
    )
    part = answer(CONTENT[:5], 'ETag: "x"', "Content-Range: bytes 0-4/10", status="206 Partial Content")
    with serving(lambda path: listing if "list-type" in path else part) as url:
        source = open_source("s3://bucket", StoreSettings(endpoint=url, anonymous=True, region="r", timeout_s=5))
        version = source.stat(b"a").version
        for ask in (lambda: source.read(b"a", 0, 10, version), lambda: source.read_present(b"a", 1000)):
            with pytest.raises(SourceUnavailable, match="5 bytes came and not 10"):
                ask()


def test_a_page_in_front_of_a_bucket_is_no_new_version_of_a_file() -> None:
    with serving(lambda path: answer(b"<html>log in</html>")) as url:
        source = open_source("s3://bucket", StoreSettings(endpoint=url, anonymous=True, region="r", timeout_s=5))
        with pytest.raises(SourceUnavailable, match="without an ETag"):
            source.read_present(b"a", 1000)
