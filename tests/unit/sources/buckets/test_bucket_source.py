"""A bucket as a source, at each of the stores: which names it has, what is asked, and what errors mean."""

from __future__ import annotations

import base64
import contextlib
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from object_server import MODIFIED_S, ObjectServer, object_server
from source_trees import listed

from spiderfs.errors import (
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceThrottled,
    SourceTimeout,
    SourceUnavailable,
)
from spiderfs.sources import object_source
from spiderfs.sources.buckets.source import BucketSource
from spiderfs.sources.object_source import StoreSettings, tag_of
from spiderfs.sources.open import open_source
from spiderfs.sources.source import Version

SECRET = "SECRET-of-a-test"
ODD = "b+c d%20#?&é日本~*'()!\"<>\\{}^[]`|"


@pytest.fixture(params=["s3", "gs", "az"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectServer]:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    monkeypatch.setenv("AZURE_STORAGE_KEY", base64.b64encode(SECRET.encode()).decode())
    with object_server(dialect=request.param) as made:
        yield made


@pytest.fixture
def source(server: ObjectServer) -> BucketSource:
    return opened(server)


def opened(server: ObjectServer, place: str = "bucket/p", **settings: object) -> BucketSource:
    settings = {"endpoint": server.url, "anonymous": server.dialect == "gs", **settings}
    return open_source(f"{server.dialect}://{place}", StoreSettings(**settings))


def put(server: ObjectServer, *keys: str) -> None:
    server.objects.update({key: key.encode() for key in keys})


# -- names


def test_a_directory_hides_an_object_of_its_name(server: ObjectServer, source: BucketSource) -> None:
    put(server, "p/d", "p/d/x")
    assert listed(source) == {"d": "d"}
    assert stat.S_ISDIR(source.stat(b"d").mode)


def test_a_key_that_ends_with_a_slash_is_an_empty_directory(server: ObjectServer, source: BucketSource) -> None:
    put(server, "p/d/", "p/e/", "p/e/x")
    assert listed(source) == {"d": "d", "e": "d"}
    assert listed(source, b"d") == {}
    assert listed(source, b"e") == {"x": "f"}
    assert stat.S_ISDIR(source.stat(b"d").mode)


def test_an_empty_object_may_be_marked_as_a_directory(server: ObjectServer, source: BucketSource) -> None:
    put(server, "p/d/x", "p/marked but full")
    server.objects |= dict.fromkeys(("p/d", "p/e", "p/file"), b"")
    server.folders = {"p/d", "p/e", "p/marked but full"}
    marked = "d" if server.dialect == "az" else "f"
    assert listed(source) == {"d": "d", "e": marked, "file": "f", "marked but full": "f"}
    assert stat.S_ISDIR(source.stat(b"e").mode) == (marked == "d")
    if marked == "d":
        assert listed(source, b"e") == {}
    for path in (b"file", b"none"):
        with pytest.raises(SourceNotFound):
            list(source.scan(path))


def test_too_many_open_files_are_no_fault_of_the_store(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks tries again until a descriptor is free."""
    put(server, "p/a")
    source = opened(server)
    version = source.stat(b"a").version
    assert source.read(b"a", 0, 3, version) == b"p/a"
    source.close()
    again = opened(server)
    again.stat(b"a")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        with pytest.raises(SourceThrottled, match=r"may open no more files now: raise its limit \(ulimit -n\)"):
            again.read(b"a", 0, 3, version)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)
        for descriptor in taken:
            os.close(descriptor)
    assert again.read(b"a", 0, 3, version) == b"p/a"


def test_keys_that_cannot_be_names_are_left_out_and_said_once(
    server: ObjectServer, source: BucketSource, caplog: pytest.LogCaptureFixture
) -> None:
    put(server, "p/a", "p//lead", "p/d/b", "p/d//x", "p/d/../y", "p/d/bad\x01", "p/d/" + "n" * 256)
    assert listed(source) == {"a": "f", "d": "d"}
    assert listed(source, b"d") == listed(source, b"d") == {"b": "f"}
    assert [record.getMessage() for record in caplog.records] == [
        "1 key(s) below the prefix cannot be names of files and are not shown, for example 'p//'",
        "4 key(s) below d cannot be names of files and are not shown, for example 'p/d/bad\\x01'",
    ]


def test_any_other_key_can_be_read(server: ObjectServer, source: BucketSource) -> None:
    put(server, f"p/{ODD}/{ODD}", "p/..a", "p/ ", "p/a+b", "p/a b", "p/a%2Bb")
    assert listed(source) == dict.fromkeys(["..a", " ", "a+b", "a b", "a%2Bb"], "f") | {ODD: "d"}
    for key, content in server.objects.items():
        path = key.removeprefix("p/").encode()
        assert bytes(source.read(path, 0, len(content), source.stat(path).version)) == content


def test_a_listing_has_many_pages(server: ObjectServer, source: BucketSource) -> None:
    put(server, *(f"p/{number:04}{slash}" for number in range(25) for slash in ("", "/x")))
    server.page_keys = 4
    assert listed(source) == {f"{number:04}": "d" for number in range(25)}
    assert len(server.asked("LIST p/")) == 13


def test_a_later_page_is_asked_again(
    server: ObjectServer, source: BucketSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever repeats a listing begins again: one of many pages would never be had from a store that fails at times."""
    monkeypatch.setattr(object_source, "_PAGE_PAUSES_S", (0.0, 0.0))
    put(server, *(f"p/{number:04}" for number in range(25)))
    server.page_keys = 4
    failures = iter([(503, "SlowDown"), (500, "InternalError")] * 6)
    server.fails = lambda request: next(failures, None) if len(server.requests) % 3 else None
    server.requests = ["so that the first page is answered", "and the next ones are not"]
    assert len(listed(source)) == 25
    assert len(server.asked("LIST p/")) > 10
    server.fails = lambda request: None if len(server.requests) == 1 else (503, "SlowDown")
    with pytest.raises(SourceThrottled):
        listed(source)
    assert len(server.asked("LIST p/")) == 4


def test_a_name_that_many_keys_begin_with_takes_one_more_request(server: ObjectServer, source: BucketSource) -> None:
    put(
        server, *(f"p/d-{number}" for number in range(500)), "p/d/x", "p/f", *(f"p/f-{number}" for number in range(500))
    )
    server.asked()
    assert stat.S_ISDIR(source.stat(b"d").mode)
    assert server.asked() == ["LIST p/d", "LIST p/d/"]
    assert source.stat(b"f").size == 3
    assert server.asked() == ["LIST p/f", "LIST p/f/"]
    assert stat.S_ISREG(source.stat(b"f-1").mode)
    assert server.asked() == ["LIST p/f-1", "LIST p/f-1/"]
    with pytest.raises(SourceNotFound):
        source.stat(b"f-499x")
    assert server.asked() == ["LIST p/f-499x"]


def test_a_prefix_without_objects_is_said_to_be_empty(server: ObjectServer, source: BucketSource) -> None:
    put(server, "q/x")
    with pytest.raises(SourceNotFound, match="://bucket/p holds no objects: check the prefix"):
        source.stat(b"")
    assert listed(source) == {}


# -- bytes


def test_an_object_is_read_by_one_request(server: ObjectServer, source: BucketSource) -> None:
    server.objects["p/a"] = bytes(range(100))
    version = source.stat(b"a").version
    server.asked()
    assert bytes(source.read(b"a", 0, 100, version)) == bytes(range(100))
    assert bytes(source.read(b"a", 10, 20, version)) == bytes(range(10, 30))
    assert bytes(source.read(b"a", 90, 20, version)) == bytes(range(90, 100))
    assert server.asked() == ["GET p/a"] * 3
    assert [headers.get("range") for headers in server.headers[-3:]] == [None, "bytes=10-29", "bytes=90-99"]


@pytest.mark.parametrize("listed_tag", ["other {}".format, "".format], ids=["other tags", "no tags"])
def test_a_store_that_lists_other_etags_than_it_gives_is_read(
    server: ObjectServer, source: BucketSource, listed_tag: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    server.listed_tag = listed_tag
    for name in "ab":
        server.objects[f"p/{name}"] = b"first"
        found = source.stat(name.encode())
        assert bool(found.version.tag) == bool(listed_tag("x"))
        for _ in range(2):
            assert bytes(source.read(name.encode(), 0, 5, found.version)) == b"first"
            assert bytes(source.read(name.encode(), 1, 2, found.version)) == b"ir"
            assert source.read_present(name.encode(), 5) == (found, b"first")
    server.asked()
    source.read(b"a", 0, 5, source.stat(b"a").version)
    assert server.asked() == ["LIST p/a", "GET p/a"], "what was found out is remembered"
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{server.dialect}://bucket/p: listings have other ETags than the objects")
    # What is replaced is another version, and the old one is gone.
    version = source.stat(b"a").version
    server.objects["p/a"], server.modified_s["p/a"] = b"other", MODIFIED_S + 1
    for offset in (0, 1):
        with pytest.raises(SourceChanged):
            source.read(b"a", offset, 5 - offset, version)
    assert source.stat(b"a").version != version
    assert bytes(source.read(b"a", 0, 5, source.stat(b"a").version)) == b"other"
    assert len(caplog.records) == 1


def test_a_replaced_object_in_an_old_listing_is_refused(server: ObjectServer, source: BucketSource) -> None:
    """Its blocks may be cached: bytes of both must not come under one version."""
    server.listed_tag = "always {:.0}".format
    server.objects["p/a"] = b"first"
    version = source.stat(b"a").version
    assert bytes(source.read(b"a", 0, 5, version)) == b"first"
    server.objects["p/a"] = b"other"
    with pytest.raises(SourceUnavailable, match="lists 'a' with another size, time or ETag than it gives it"):
        source.read(b"a", 0, 5, version)


def test_a_store_that_lists_another_size_or_time_than_it_gives_is_refused(
    server: ObjectServer, source: BucketSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.objects["p/a"] = b"first"
    listing, modified = server.listing, server.modified
    monkeypatch.setattr(server, "listing", lambda query: listing(query).replace(b">5<", b">4<").replace(b":20", b":21"))
    server.listed_tag = "other {}".format
    version = source.stat(b"a").version
    for ask in (lambda: source.read(b"a", 0, 4, version), lambda: source.read_present(b"a", 9)):
        with pytest.raises(SourceUnavailable, match="lists 'a' with another size, time or ETag than it gives it"):
            ask()
    assert modified("p/a").second == 20


def test_an_answer_that_breaks_off_is_no_content(server: ObjectServer, source: BucketSource) -> None:
    server.objects["p/a"] = bytes(1000)
    version = source.stat(b"a").version
    server.cuts = {"p/a"}
    with pytest.raises(SourceUnavailable):
        source.read(b"a", 0, 1000, version)
    with pytest.raises(SourceUnavailable):
        source.read_present(b"a", 1000)


def test_tags_are_of_unquoted_etags() -> None:
    assert tag_of('"abc"') == tag_of("abc") != tag_of('W/"abc"')
    assert 0 < tag_of("abc") < 1 << 64
    assert tag_of("") == tag_of('""') == 0


# -- errors


OF_ALL = [
    (500, "InternalError", SourceUnavailable, "InternalError"),
    (404, "", SourceUnavailable, "404"),
    (503, "", SourceThrottled, "503"),
    (429, "TooManyRequests", SourceThrottled, "TooManyRequests"),
]
OF_AMAZON = [
    (404, "NoSuchBucket", SourceUnavailable, "no such bucket: check its name"),
    (503, "SlowDown", SourceThrottled, "SlowDown"),
    (403, "AccessDenied", SourceDenied, "allow s3:ListBucket and s3:GetObject"),
    (403, "InvalidObjectState", SourceDenied, "restore it first"),
    (400, "ExpiredToken", SourceUnavailable, "renew them"),
    (403, "InvalidAccessKeyId", SourceUnavailable, "renew them"),
    (403, "SignatureDoesNotMatch", SourceUnavailable, "renew them"),
    (403, "RequestTimeTooSkewed", SourceUnavailable, "clock is wrong"),
    (400, "AuthorizationHeaderMalformed", SourceUnavailable, "set source.region"),
    (301, "PermanentRedirect", SourceUnavailable, ""),
]
OF_GOOGLE = [
    (404, "NoSuchBucket", SourceUnavailable, "no such bucket: check its name"),
    (503, "SlowDown", SourceThrottled, "SlowDown"),
    (403, "AccessDenied", SourceDenied, "roles/storage.objectViewer"),
    (401, "AuthenticationRequired", SourceUnavailable, "renew them"),
    (400, "UserProjectMissing", SourceUnavailable, "requires requester pays"),
]
OF_MICROSOFT = [
    (404, "ContainerNotFound", SourceUnavailable, "no such bucket: check its name"),
    (503, "ServerBusy", SourceThrottled, "ServerBusy"),
    (500, "OperationTimedOut", SourceUnavailable, "OperationTimedOut"),
    (403, "AuthorizationPermissionMismatch", SourceDenied, "Storage Blob Data Reader"),
    (403, "AuthenticationFailed", SourceUnavailable, "renew them"),
    (409, "PublicAccessNotPermitted", SourceDenied, "leave out source.anonymous"),
    (409, "BlobArchived", SourceDenied, "restore it first"),
]
CODES = {"s3": OF_ALL + OF_AMAZON, "gs": OF_ALL + OF_GOOGLE, "az": OF_ALL + OF_MICROSOFT}


def test_errors_are_told_apart(server: ObjectServer, source: BucketSource) -> None:
    put(server, "p/a")
    version = source.stat(b"a").version
    for status, code, kind, said in CODES[server.dialect]:
        check_error(server, source, version, status, code, kind, said)


def check_error(
    server: ObjectServer,
    source: BucketSource,
    version: Version,
    status: int,
    code: str,
    kind: type[SourceError],
    said: str,
) -> None:
    server.fails = lambda request: (status, code)
    for ask in (lambda: source.read(b"a", 0, 3, version), lambda: source.stat(b"a"), lambda: list(source.scan(b""))):
        with pytest.raises(SourceError) as raised:
            ask()
        assert type(raised.value) is kind, code
        assert said in str(raised.value)
        for hidden in ("SECRET", "KEY", "Error>"):
            assert hidden not in repr(raised.value)
        assert raised.value.__suppress_context__


def test_only_the_store_says_that_an_object_is_gone(server: ObjectServer, source: BucketSource) -> None:
    put(server, "p/a")
    version = source.stat(b"a").version
    server.fails = lambda request: (404, server.no_object)
    with pytest.raises(SourceNotFound):
        source.read(b"a", 0, 3, version)
    with pytest.raises(SourceUnavailable):
        source.stat(b"a")
    with pytest.raises(SourceUnavailable):
        list(source.scan(b""))


@pytest.mark.parametrize("body", [b"", b"<html>no", b"<html></html>", b"<ListBucketResult>", b"\xff"])
def test_a_listing_that_cannot_be_read_is_no_listing(
    server: ObjectServer, source: BucketSource, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "listing", lambda query: body)
    with pytest.raises(SourceUnavailable, match=r"listing that cannot be read|has failed \(500\)"):
        source.stat(b"")


def test_a_store_that_is_not_there_or_slow_is_said_so(server: ObjectServer) -> None:
    put(server, "p/a")
    with pytest.raises(SourceUnavailable, match="cannot be reached: check"):
        opened(server, endpoint="http://127.0.0.1:1").stat(b"")
    source = opened(server, timeout_s=0.2)
    version = source.stat(b"a").version
    server.latency_s = 0.6
    with pytest.raises(SourceTimeout, match="has not answered"):
        source.read(b"a", 0, 3, version)
    with pytest.raises(SourceTimeout, match="not answered in time"):
        source.stat(b"a")


def test_a_page_of_html_is_no_answer(
    server: ObjectServer, source: BucketSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something in front of the store refuses; what it sends can be read as XML."""
    put(server, "p/a")
    handler = server._server.RequestHandlerClass
    monkeypatch.setattr(
        handler, "_fail", lambda self, status, code: self._answer(status, b"<html><body>no</body></html>", {})
    )
    for status, kind in ((403, SourceDenied), (404, SourceUnavailable), (503, SourceThrottled)):
        server.fails = lambda request, status=status: (status, "")
        with pytest.raises(kind, match=str(status)):
            source.stat(b"a")


def test_endless_redirects_are_an_error(
    server: ObjectServer, source: BucketSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, "p/a")
    version = source.stat(b"a").version
    handler = server._server.RequestHandlerClass
    for method in ("do_GET", "do_HEAD"):
        monkeypatch.setattr(handler, method, lambda self: self._answer(302, b"", {"Location": server.url + self.path}))
    with pytest.raises(SourceUnavailable, match=r"redirects requests without end|failed \(302\)"):
        source.stat(b"a")
    with pytest.raises(SourceUnavailable):
        source.read(b"a", 0, 3, version)


def test_empty_pages_before_the_first_name_are_passed_over(
    server: ObjectServer, source: BucketSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Microsoft's listings may have them."""
    put(server, "p/d/x", "p/f")
    listing, begun = server.listing, ("marker" if server.dialect == "az" else "continuation-token")
    empty = (
        b"<EnumerationResults><NextMarker> </NextMarker></EnumerationResults>"
        if server.dialect == "az"
        else b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken> </NextContinuationToken>"
        b"</ListBucketResult>"
    )
    monkeypatch.setattr(server, "listing", lambda query: listing(query) if begun in query else empty)
    assert listed(source) == {"d": "d", "f": "f"}
    assert stat.S_ISDIR(source.stat(b"").mode)
    assert stat.S_ISDIR(source.stat(b"d").mode)
    assert source.stat(b"f").size == 3


@pytest.mark.parametrize("size", [-1, 1 << 63])
def test_a_listing_with_an_impossible_size_is_no_listing(
    server: ObjectServer, source: BucketSource, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, "p/a")
    listing = server.listing
    name = "Content-Length" if server.dialect == "az" else "Size"
    text, impossible = f"<{name}>3</{name}>".encode(), f"<{name}>{size}</{name}>".encode()
    monkeypatch.setattr(server, "listing", lambda query: listing(query).replace(text, impossible))
    with pytest.raises(SourceUnavailable, match="a size that no file has"):
        list(source.scan(b""))
