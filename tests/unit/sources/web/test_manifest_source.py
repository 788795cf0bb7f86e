"""Files of a web server behind a manifest: what is asked, when a version has settled, and what errors mean."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from source_trees import listed, whole
from web_servers import FileServer, Reply, file_server

from spiderfs.errors import (
    ConfigError,
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceThrottled,
    SourceUnavailable,
)
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.source import Version
from spiderfs.sources.web.manifest import ManifestSource

MANIFEST, OLD_S = "data/manifest.tsv", 1_700_000_000


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as made:
        made.put("a.jpg", b"first")
        made.put("train/b.jpg", b"0123456789")
        made.put("train/deep/er/c.jpg", b"third")
        write(made)
        yield made


@pytest.fixture
def source(server: FileServer) -> Iterator[ManifestSource]:
    made = opened(server)
    yield made
    made.close()


def opened(server: FileServer, **settings: float) -> ManifestSource:
    return ManifestSource(f"{server.url}/{MANIFEST}", StoreSettings(**{"timeout_s": 5.0, **settings}))


def write(server: FileServer, text: bytes | None = None, tags: bool = False, modified_s: float = OLD_S) -> None:
    """Put all files below `data`, and a manifest of them, or this one, beside them."""
    for path in [path for path in server.files if not path.startswith("data/")]:
        server.files[f"data/{path}"] = server.files.pop(path)
    server.files.pop(MANIFEST, None)
    if text is None:
        text = server.manifest(tags).replace(b"data/", b"")
    server.put(MANIFEST, text, modified_s)


# -- names


def test_paths_that_cannot_be_names_are_left_out_and_said(
    server: FileServer, source: ManifestSource, caplog: pytest.LogCaptureFixture
) -> None:
    paths = ["a", "/lead", "b//c", "../d", "e/../f", "g/.", "..", "n" * 256, "h\x01"]
    write(server, "".join(f"{path}\t1\t5\n" for path in paths).encode())
    assert listed(source) == listed(source) == {"a": "f", "g": "d"}
    assert listed(source, b"g") == {}
    for path in (b"..", b"g/.", b"lead", b"h\x01"):
        with pytest.raises(SourceNotFound):
            source.stat(path)
    assert len(caplog.records) == 2


def test_a_directory_hides_a_file_of_its_name(server: FileServer, source: ManifestSource) -> None:
    write(server, b"d\t1\t5\nd/x\t1\t5\n")
    assert listed(source) == {"d": "d"}
    assert stat.S_ISDIR(source.stat(b"d").mode)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a\t1\t5\nb\t1", "line 2 is not PATH, SIZE and TAG"),
        (b"a\t1\t5", "line 1 is not"),
        (b"a 1 5\n", "line 1 is not"),
        (b"a\t1\t5\n\nb\t1\t5\n", "line 2 is not"),
        (b"a\tlarge\t5\n", "line 1 is not"),
        (b"a\t1\t\n", "line 1 is not"),
        (b"a\t1\t5\t6\n", "line 1 is not"),
        (b"a/\t1\t5\n", "line 1 is not"),
        (b"a/" * 300_000, "line 1 is not"),
        (b"", "lists no files"),
    ],
)
def test_a_bad_manifest_makes_no_file_vanish(
    server: FileServer, source: ManifestSource, text: bytes, said: str
) -> None:
    assert listed(source)
    write(server, text, modified_s=OLD_S + 5)
    for ask in (lambda: listed(source), lambda: source.stat(b"a.jpg")):
        with pytest.raises(SourceUnavailable, match=said) as caught:
            ask()
        assert len(str(caught.value).splitlines()) == 1
    write(server)
    assert whole(source, b"a.jpg") == b"first"


@pytest.mark.parametrize(
    "url",
    [
        "https://",
        "https:///manifest.tsv",
        "https://me:SECRET@host/manifest.tsv",
        "https://host/manifest.tsv?signature=SECRET",
        "https://host/manifest.tsv#x",
        "https://host/",
        "https://host",
        "http://host:99999/m",
        "http://[/m",
    ],
)
def test_what_is_no_address_of_a_manifest_is_refused_in_a_line(url: str) -> None:
    with pytest.raises(ConfigError, match=r"write i") as caught:
        ManifestSource(url, StoreSettings())
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://a b/m", "http://127.0.0.1:1/m", "http://no-such-host.invalid/m"])
def test_an_address_that_cannot_be_asked_says_so(url: str) -> None:
    with pytest.raises(SourceUnavailable, match=r"check i"):
        ManifestSource(url, StoreSettings()).stat(b"")


# -- changes


def test_a_changed_manifest_is_noticed_with_the_next_question(server: FileServer, source: ManifestSource) -> None:
    assert "new" not in listed(source)
    server.put("new", b"new")
    write(server)
    assert "new" in listed(source)
    assert whole(source, b"new") == b"new"
    sent = [headers for headers in server.headers if "if-none-match" in headers]
    assert len(sent) == 2
    server.asked()
    server.fails = lambda request: Reply(500) if len(server.requests) > 1 else None
    assert listed(source), "and an unchanged one is not sent again"


def test_a_young_manifest_is_fetched_again_whatever_its_etag(server: FileServer, source: ManifestSource) -> None:
    """It may be written twice in one second, to the same size: nginx gives both the same ETag."""
    server.now = lambda: OLD_S + 1.5
    write(server, b"a.jpg\t5\t1700000000\n")
    assert listed(source) == {"a.jpg": "f"}
    write(server, b"b.jpg\t5\t1700000000\n")
    assert listed(source) == {"b.jpg": "f"}
    server.now = lambda: OLD_S + 3
    assert listed(source) == {"b.jpg": "f"}
    server.headers.clear()
    assert listed(source) == {"b.jpg": "f"}
    assert server.headers[0]["if-none-match"]


@pytest.mark.parametrize("modified", [True, False])
def test_a_server_without_etags_is_asked_by_time(server: FileServer, source: ManifestSource, modified: bool) -> None:
    server.e_tag = lambda content, modified_s: ""
    if not modified:
        server.fails = lambda request: Reply(200, server.files[MANIFEST][0])
    assert listed(source) == listed(source)
    assert ("if-modified-since" in server.headers[-1]) is modified


def test_questions_at_one_time_share_an_answer(server: FileServer, source: ManifestSource) -> None:
    server.latency_s = 0.1
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(lambda _: "train" in listed(source), range(16))) == {True}
    assert len(server.asked()) <= 3


def test_questions_at_one_time_share_an_error(server: FileServer) -> None:
    source = opened(server, timeout_s=0.2)
    server.latency_s = 1.0

    def fails(_: int) -> bool:
        with pytest.raises(SourceUnavailable, match="in time"):
            listed(source)
        return True

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(fails, range(16)))
    assert len(server.asked()) <= 3
    source.close()


# -- versions


def test_etags_of_nginx_are_times(server: FileServer, source: ManifestSource) -> None:
    by_time = source.stat(b"a.jpg").version
    write(server, tags=True)
    assert source.stat(b"a.jpg").version == by_time == Version(5, OLD_S * 10**9)
    assert whole(source, b"a.jpg") == b"first"


def test_other_etags_are_tags(server: FileServer, source: ManifestSource) -> None:
    server.e_tag = lambda content, modified_s: f'"{hashlib.md5(content).hexdigest()}"'
    write(server, tags=True)
    version = source.stat(b"a.jpg").version
    assert version.mtime_ns == 0
    assert version.tag
    assert whole(source, b"a.jpg") == b"first"
    # Apache's: size and time; and a weak one, as of a server that could have compressed it.
    server.e_tag = lambda content, modified_s: f'W/"{len(content):x}-{int(modified_s * 1e6):x}"'
    write(server, tags=True)
    assert source.stat(b"a.jpg").version.tag not in (0, version.tag)
    assert whole(source, b"a.jpg") == b"first"


@pytest.mark.parametrize("tags", [True, False])
def test_bytes_of_another_version_are_not_given(server: FileServer, source: ManifestSource, tags: bool) -> None:
    write(server, tags=tags)
    version = source.stat(b"a.jpg").version
    for content, modified_s in [(b"other", OLD_S + 7), (b"more than it was", OLD_S + 7), (b"", OLD_S + 7)]:
        server.put("data/a.jpg", content, modified_s)
        with pytest.raises(SourceChanged):
            source.read(b"a.jpg", 0, 5, version)
        with pytest.raises(SourceChanged):
            source.read(b"a.jpg", 1, 2, version)
    server.put("data/a.jpg", b"other", OLD_S + 7)
    found, content = source.read_present(b"a.jpg", 100)
    assert (content, found.version) == (b"other", Version(5, (OLD_S + 7) * 10**9))


@pytest.mark.parametrize("written", [False, True])
def test_a_manifest_that_is_not_written_again_is_reported_once(
    server: FileServer, source: ManifestSource, caplog: pytest.LogCaptureFixture, written: bool
) -> None:
    """Reads of what has changed end in ESTALE until it is."""
    version = source.stat(b"a.jpg").version
    server.put("data/a.jpg", b"other", OLD_S + 7)
    if written:
        write(server, modified_s=OLD_S + 7)
    for _ in range(2):
        with pytest.raises(SourceChanged):
            source.read(b"a.jpg", 0, 5, version)
    said = (
        f"{source.identity}: the server gives other versions than the manifest lists, for example of 'a.jpg': write it"
        " again"
    )
    assert caplog.messages == ([] if written else [said])


def test_a_file_that_the_server_does_not_have_says_what_to_do(server: FileServer, source: ManifestSource) -> None:
    version = source.stat(b"a.jpg").version
    del server.files["data/a.jpg"]
    with pytest.raises(SourceError, match="in the manifest and not on the server: write the manifest again") as caught:
        source.read(b"a.jpg", 0, 5, version)
    assert type(caught.value) is SourceError, "no reason to ask again, and the file is not gone"
    write(server)
    with pytest.raises(SourceNotFound):
        source.read(b"a.jpg", 0, 5, version)


# -- errors


@pytest.mark.parametrize(
    ("reply", "error", "said"),
    [
        (Reply(404), SourceUnavailable, "no such manifest"),
        (Reply(403), SourceDenied, "without a password"),
        (Reply(401), SourceDenied, "without a password"),
        (Reply(302, b"", {"Location": "https://SECRET"}), SourceUnavailable, "redirects: write the address"),
        (Reply(429), SourceThrottled, "too much at a time"),
        (Reply(503, b"", {"Retry-After": "7"}), SourceThrottled, "too much at a time"),
        (Reply(500), SourceUnavailable, "has failed"),
        (Reply(418), SourceUnavailable, "has failed"),
    ],
)
def test_errors_are_told_apart(
    server: FileServer, source: ManifestSource, reply: Reply, error: type[SourceError], said: str
) -> None:
    version = source.stat(b"a.jpg").version
    server.fails = lambda request: reply
    with pytest.raises(error, match=said) as caught:
        listed(source)
    assert type(caught.value) is error
    assert "SECRET" not in str(caught.value)
    with pytest.raises(SourceError) as caught:
        source.read(b"a.jpg", 0, 5, version)
    assert not isinstance(caught.value, SourceNotFound | SourceChanged)
    server.fails = lambda request: None
    if "Retry-After" in reply.headers:
        server.asked()
        with pytest.raises(SourceThrottled, match=r"for another \d s"):
            listed(source)
        assert server.asked() == []
    else:
        assert whole(source, b"a.jpg") == b"first"


def test_a_body_that_is_cut_is_an_error(server: FileServer, source: ManifestSource) -> None:
    version = source.stat(b"a.jpg").version
    server.cuts = {"GET data/a.jpg", f"GET {MANIFEST}"}
    with pytest.raises(SourceUnavailable, match="broke off"):
        source.read(b"a.jpg", 0, 5, version)
    write(server, modified_s=OLD_S + 3)
    with pytest.raises(SourceUnavailable, match="broke off"):
        listed(source)
    server.cuts = set()
    assert whole(source, b"a.jpg") == b"first"


def test_a_server_without_ranges_says_what_to_do(server: FileServer, source: ManifestSource) -> None:
    server.ranges = False
    version = source.stat(b"train/b.jpg").version
    assert source.read(b"train/b.jpg", 0, 10, version) == b"0123456789"
    with pytest.raises(SourceUnavailable, match="raise sample_max_bytes"):
        source.read(b"train/b.jpg", 2, 3, version)


@pytest.mark.parametrize("header", ["ETag", "Last-Modified"])
def test_a_file_without_its_version_is_not_trusted(server: FileServer, source: ManifestSource, header: str) -> None:
    server.e_tag = lambda content, modified_s: f'"{hashlib.md5(content).hexdigest()}"'
    write(server, tags=header == "ETag")
    version = source.stat(b"a.jpg").version
    server.fails = lambda request: Reply(200, b"first") if "a.jpg" in request else None
    with pytest.raises(SourceUnavailable, match=f"gives no.* {header}"):
        source.read(b"a.jpg", 0, 5, version)


def test_a_proxy_is_used_as_usual(server: FileServer, monkeypatch: pytest.MonkeyPatch, source: ManifestSource) -> None:
    monkeypatch.setenv("http_proxy", server.url.replace("http://", "http://me:SECRET@"))
    monkeypatch.delenv("no_proxy", raising=False)
    far = ManifestSource(f"http://data.example.org/{MANIFEST}", StoreSettings(timeout_s=5))
    server.answer = lambda asked: (asked.path, Reply(200, b"a\t1\t5\n"))
    assert listed(far) == {"a": "f"}
    assert server.headers[-1]["host"] == "data.example.org"
    assert server.headers[-1]["proxy-authorization"].startswith("Basic ")
    far.close()
