"""A data set of the Hugging Face Hub as a source: what is asked, what errors mean, and where the token goes."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from source_trees import listed, whole
from web_servers import FakeHub, Reply, fake_hub

from spiderfs.errors import (
    ConfigError,
    SourceChanged,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceThrottled,
    SourceUnavailable,
)
from spiderfs.sources import object_source
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.web import hub as module
from spiderfs.sources.web.hub import HubSource

URL, TOKEN = "hf://datasets/owner/photos", "hf_SECRETtoken"
LARGE = Random(1).randbytes(5000)
OPENED: list[HubSource] = []
FILES = {"README.md": b"read me", "train/a.txt": b"small", "train/b.bin": LARGE, "train/deep/c.bin": b"c" * 200}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(object_source, "_PAGE_PAUSES_S", (0.0, 0.0))
    with fake_hub() as made:
        made.push(FILES)
        yield made
        while OPENED:
            OPENED.pop().close()


@pytest.fixture
def source(hub: FakeHub) -> HubSource:
    return opened(hub)


def opened(hub: FakeHub, url: str = URL, **settings: object) -> HubSource:
    OPENED.append(HubSource(url, StoreSettings(endpoint=hub.url, **{"timeout_s": 5.0, **settings})))
    return OPENED[-1]


# -- names


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("hf://datasets/owner/photos", ("owner/photos", "main", "")),
        ("hf://datasets/owner/photos/", ("owner/photos", "main", "")),
        ("hf://datasets/owner/photos/data/train", ("owner/photos", "main", "data/train/")),
        ("hf://datasets/owner/photos@v1.0/data/", ("owner/photos", "v1.0", "data/")),
        ("hf://datasets/squad@main/plain", ("squad", "main", "plain/")),
        ("hf://datasets/owner/photos@refs/convert/parquet/x", ("owner/photos", "refs/convert/parquet", "x/")),
        ("hf://datasets/owner/photos@refs/pr/10", ("owner/photos", "refs/pr/10", "")),
        ("hf://datasets/owner/photos@feature%2Fnew/x", ("owner/photos", "feature/new", "x/")),
    ],
)
def test_urls_are_read_as_the_programs_of_the_hub_read_them(url: str, place: tuple[str, str, str]) -> None:
    assert module._Place.parse(url) == place


@pytest.mark.parametrize(
    "url",
    [
        "hf://owner/photos",
        "hf://datasets/",
        "hf://datasets/owner/photos@",
        "hf://datasets/owner/photos/../x",
        "hf://datasets/owner/photos//x",
        "hf://hf_SECRETtoken@datasets/owner/photos",
        "hf://datasets/owner/photos?token=hf_SECRETtoken",
    ],
)
def test_what_names_no_data_set_is_refused_in_a_line(url: str) -> None:
    with pytest.raises(ConfigError, match="write hf://datasets/OWNER/NAME") as caught:
        HubSource(url, StoreSettings())
    assert "SECRET" not in str(caught.value)


def test_a_directory_of_a_data_set_can_be_the_root(hub: FakeHub) -> None:
    source = opened(hub, f"{URL}/train")
    assert listed(source) == {"a.txt": "f", "b.bin": "f", "deep": "d"}
    assert stat.S_ISDIR(source.stat(b"").mode)
    assert whole(source, b"deep/c.bin") == FILES["train/deep/c.bin"]
    for missing in ("none", "README.md"):
        with pytest.raises(SourceNotFound, match=f"has no directory {missing}"):
            opened(hub, f"{URL}/{missing}").stat(b"")


def test_any_name_can_be_read(hub: FakeHub) -> None:
    odd = "b+c d%20#?&é日本~*'()!\"<>\\{}^[]`|"
    hub.push({f"{odd}/{odd}": b"small", f"{odd}/large": LARGE, "a%2Fb": b"x"})
    source = opened(hub)
    assert listed(source) == {odd: "d", "a%2Fb": "f"}
    assert whole(source, f"{odd}/{odd}".encode()) == b"small"
    assert whole(source, f"{odd}/large".encode()) == LARGE
    assert whole(source, b"a%2Fb") == b"x"


def test_a_listing_has_many_pages_and_later_ones_are_asked_for_again(hub: FakeHub, source: HubSource) -> None:
    hub.push({f"{number:03}": b"x" for number in range(25)})
    hub.page_names = 4
    failures = iter([Reply(500), Reply(503)] * 6)
    hub.fails = lambda request: next(failures, None) if len(hub.requests) > 2 and len(hub.requests) % 3 else None
    assert len(listed(source)) == 25
    assert len(hub.asked("API tree")) > 10


def test_the_next_page_is_asked_of_the_same_hub(hub: FakeHub, source: HubSource) -> None:
    """Whatever host its address has: a mirror may name the hub that it mirrors."""
    hub.page_names = 1
    place = f"api/datasets/owner/photos/tree/{hub.revisions['main']}?cursor=1"
    first = [Reply(200, b"[]", {"Link": f'<{hub.contents.url}/{place}>; rel="next"'})]
    hub.fails = lambda request: first.pop() if request.startswith("API tree") and first else None
    assert listed(source) == {"train": "d"}
    assert hub.contents.requests == []
    again = Reply(200, b"[]", {"Link": '<?recursive=False&expand=False>; rel="next"'})
    hub.fails = lambda request: again if request.startswith("API tree") else None
    with pytest.raises(SourceUnavailable, match="again and again"):
        listed(source)


def test_the_revision_is_resolved_once(hub: FakeHub, source: HubSource) -> None:
    before = source.stat(b"README.md")
    hub.push({"README.md": b"another"})
    assert source.stat(b"README.md") == before
    assert whole(source, b"README.md") == FILES["README.md"]
    assert [request for request in hub.requests if "revision" in request] == ["API revision/main"]
    assert whole(opened(hub), b"README.md") == b"another"


def test_processes_and_threads_show_one_commit(hub: FakeHub, source: HubSource) -> None:
    """Also if they ask at the same time, and the branch moves between their questions."""

    def answered(request: str) -> None:
        if request.startswith("API revision"):
            hub.push({"README.md": request.encode() + bytes(len(hub.commits))})

    hub.fails = answered
    hub.latency_s = 0.05
    with ThreadPoolExecutor(4) as pool:
        commits = set(pool.map(lambda _: source._shown, range(4)))
    assert len(commits) == 1
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, source._shown.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert {os.read(reader, 100).decode()} == commits
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("revision", ["v1", "refs/convert/parquet", "feature/new"])
def test_other_revisions_are_shown(hub: FakeHub, revision: str) -> None:
    commit = hub.push({"old": b"old"}, revision)
    written = revision if revision.startswith("refs/") else revision.replace("/", "%2F")
    for named in (written, commit):
        assert listed(opened(hub, f"{URL}@{named}")) == {"old": "f"}


def test_a_data_set_that_has_moved_is_found(hub: FakeHub) -> None:
    hub.moved_from = "once/called"
    source = opened(hub, "hf://datasets/once/called")
    assert listed(source, b"train") == {"a.txt": "f", "b.bin": "f", "deep": "d"}
    assert whole(source, b"train/a.txt") == b"small"
    assert whole(source, b"train/b.bin") == LARGE


# -- bytes


def test_the_redirect_is_used_again_until_it_expires(hub: FakeHub, source: HubSource) -> None:
    version = source.stat(b"train/b.bin").version
    hub.asked()
    for begin in range(0, 5000, 1000):
        assert source.read(b"train/b.bin", begin, 1000, version) == LARGE[begin : begin + 1000]
    assert len(hub.asked()) == 1
    assert hub.contents.asked() == ["CONTENT train/b.bin"] * 5
    assert [headers["range"] for headers in hub.contents.headers[:2]] == ["bytes=0-999", "bytes=1000-1999"]
    hub.expire()
    assert source.read(b"train/b.bin", 10, 10, version) == LARGE[10:20]
    assert [request.split("/")[0] for request in hub.asked()] == ["RESOLVE resolve"]
    assert len(hub.contents.asked()) == 2
    assert source.read(b"train/b.bin", 20, 10, version) == LARGE[20:30]
    assert hub.asked() == []


def test_a_file_is_read_by_one_request_of_each_server(hub: FakeHub, source: HubSource) -> None:
    version = source.stat(b"train/b.bin").version
    hub.asked()
    assert source.read(b"train/b.bin", 0, 5000, version) == LARGE
    assert (len(hub.asked()), len(hub.contents.asked())) == (1, 1)
    assert "range" not in hub.contents.headers[-1]


def test_a_version_of_another_commit_is_not_read(hub: FakeHub) -> None:
    old = opened(hub)
    before = {path: old.stat(path).version for path in (b"train/a.txt", b"train/b.bin")}
    hub.push({"train/a.txt": b"SMALL", "train/b.bin": LARGE[::-1]})
    new = opened(hub)
    for path, version in before.items():
        with pytest.raises(SourceChanged):
            new.read(path, 0, version.size, version)
        with pytest.raises(SourceChanged):
            new.read(path, 1, 2, version)
        assert len(old.read(path, 0, version.size, version)) == version.size


def test_where_the_hub_names_no_etag_the_tree_decides(hub: FakeHub, source: HubSource) -> None:
    hub.e_tags = False
    assert whole(source, b"train/b.bin") == LARGE
    assert whole(source, b"train/a.txt") == b"small"
    version = source.stat(b"train/b.bin").version
    with pytest.raises(SourceChanged):
        source.read(b"train/b.bin", 0, 10, version._replace(tag=5))


def test_a_page_of_just_the_size_is_no_file(hub: FakeHub, source: HubSource) -> None:
    small, large = (source.stat(path).version for path in (b"train/a.txt", b"train/b.bin"))
    hub.fails = lambda request: Reply(200, b"sorry") if "a.txt" in request else None
    with pytest.raises(SourceUnavailable, match="names no commit is none of a hub's"):
        source.read(b"train/a.txt", 0, 5, small)
    page = {"Content-Type": "text/html; charset=utf-8"}
    hub.contents.fails = lambda request: Reply(200, bytes(5000), page)
    for extent in ((0, 5000), (1000, 1000)):
        with pytest.raises(SourceUnavailable, match="a page of HTML came for a file"):
            source.read(b"train/b.bin", *extent, large)
    # A file that is such a page by itself.
    hub.contents.fails = lambda request: Reply(200, LARGE, page)
    assert source.read(b"train/b.bin", 0, 5000, large) == LARGE


@pytest.mark.parametrize("path", [b"train/a.txt", b"train/b.bin"])
def test_a_body_that_is_cut_is_an_error(hub: FakeHub, source: HubSource, path: bytes) -> None:
    version = source.stat(path).version
    whole(source, path)
    hub.cuts = set(hub.requests)
    hub.contents.cuts = {"CONTENT train/b.bin"}
    with pytest.raises(SourceUnavailable, match="broke off"):
        source.read(path, 0, version.size, version)
    hub.cuts = hub.contents.cuts = set()
    assert whole(source, path) == FILES[path.decode()]


def test_a_server_without_tls_is_not_asked_for_contents_of_one_with_it(
    hub: FakeHub, source: HubSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = source.stat(b"train/b.bin").version
    secure = opened(hub)
    monkeypatch.setattr(secure, "_hub", "https://hub")
    monkeypatch.setattr(secure, "_origin", "https://hub:443")
    answers = {"revision": b'{"sha": "%b"}' % source._shown.encode()}

    class _Redirecting:
        def get(self, url: str, *_: object, **__: object) -> object:
            return module.Answer(200, {}, answers["revision"])

        def coming(self, url: str, *_: object, **__: object) -> contextlib.AbstractContextManager[object]:
            return contextlib.nullcontext((module.Answer(302, {"Location": "http://contents/x"}), iter(())))

        def close(self) -> None:
            pass

    monkeypatch.setattr(secure, "_web", _Redirecting())
    with pytest.raises(SourceUnavailable, match="without TLS"):
        secure.read(b"train/b.bin", 0, 5, version)


# -- errors

HUB_SAYS = [
    (Reply(404, b"SECRET", {"X-Error-Code": "EntryNotFound"}), SourceNotFound, "no such file"),
    (Reply(404, b"SECRET", {"X-Error-Code": "RevisionNotFound"}), SourceUnavailable, "has no revision main"),
    (Reply(404, b"SECRET", {"X-Error-Code": "RepoNotFound"}), SourceUnavailable, "check the name, and log in"),
    (Reply(401, b"SECRET"), SourceUnavailable, "check the name, and log in"),
    (Reply(404, b"SECRET"), SourceUnavailable, "check the name"),
    (Reply(401, b"SECRET", {"X-Error-Code": "GatedRepo"}), SourceDenied, "is gated: ask for access"),
    (Reply(403, b"SECRET", {"X-Error-Code": "GatedRepo"}), SourceDenied, "is gated: ask for access"),
    (Reply(403, b"SECRET"), SourceDenied, "may not read it"),
    (Reply(429, b"SECRET"), SourceThrottled, "too much at a time"),
    (Reply(503, b"SECRET"), SourceThrottled, "too much at a time"),
    (Reply(500, b"SECRET"), SourceUnavailable, "has failed"),
    (Reply(400, b"SECRET"), SourceUnavailable, "has failed"),
    (Reply(302, b"", {"Location": "http://127.0.0.1:1/SECRET"}), SourceUnavailable, "."),
    (Reply(307, b"", {"Location": "/api/datasets/owner/photos"}), SourceUnavailable, "redirects"),
    (Reply(307, b"", {"Location": "http://[SECRET"}), SourceUnavailable, "an address that is none"),
    (Reply(307, b"", {"Location": "file:///SECRET"}), SourceUnavailable, "an address that is none"),
]


@pytest.mark.parametrize(("reply", "error", "said"), HUB_SAYS)
def test_errors_are_told_apart(
    hub: FakeHub, source: HubSource, reply: Reply, error: type[SourceError], said: str
) -> None:
    version = source.stat(b"train/b.bin").version
    hub.fails = lambda request: reply
    for ask in (
        lambda: list(source.scan(b"train")),
        lambda: source.read(b"train/b.bin", 0, 5000, version),
        lambda: source.stat(b"train/b.bin"),
    ):
        with pytest.raises(error, match=said) as caught:
            ask()
        assert type(caught.value) is error
        assert not any(secret in str(caught.value) for secret in ("SECRET", "Signature", "\n"))


@pytest.mark.parametrize(
    ("status", "error"),
    [(429, SourceThrottled), (503, SourceThrottled), (500, SourceUnavailable), (404, SourceUnavailable)],
)
def test_errors_of_the_server_of_contents_say_nothing_about_the_file(
    hub: FakeHub, source: HubSource, status: int, error: type[SourceError]
) -> None:
    version = source.stat(b"train/b.bin").version
    for _ in range(2):
        hub.contents.fails = lambda request: Reply(status, b"SECRET")
        with pytest.raises(error) as caught:
            source.read(b"train/b.bin", 0, 5000, version)
        assert type(caught.value) is error
        assert not any(secret in str(caught.value) for secret in ("SECRET", "Signature"))
        hub.contents.fails = lambda request: None
        assert source.read(b"train/b.bin", 0, 5000, version) == LARGE


def test_a_hub_that_wants_to_be_left_alone_is(hub: FakeHub, source: HubSource) -> None:
    version = source.stat(b"train/b.bin").version
    hub.fails = lambda request: Reply(429, b"", {"RateLimit": '"api";r=0;t=55'}) if "API" in request else None
    with pytest.raises(SourceThrottled):
        listed(source)
    hub.asked()
    with pytest.raises(SourceThrottled, match=r"for another 5\d s"):
        listed(source)
    assert hub.asked() == []
    assert source.read(b"train/b.bin", 0, 5000, version) == LARGE, "files are counted apart"


def test_listings_that_cannot_be_read_are_errors(hub: FakeHub, source: HubSource) -> None:
    source.stat(b"")
    for body in (b"", b"<html>", b"{}", b"[1]", b"\xff"):
        hub.fails = lambda request, body=body: Reply(200, body)  # type: ignore[misc]
        with pytest.raises(SourceUnavailable):
            listed(source)
        with pytest.raises(SourceUnavailable):
            source.stat(b"")
    hub.fails = lambda request: Reply(
        200, b'[{"type": "file", "path": "x", "size": -1, "oid": "1"}, {"type": "commit"}]'
    )
    assert listed(source) == {}


def test_a_body_that_drips_ends_in_time(hub: FakeHub) -> None:
    source = opened(hub, timeout_s=0.3)
    version = source.stat(b"train/b.bin").version
    hub.contents.drip_s = 0.02
    with pytest.raises(SourceUnavailable, match="in time"):
        source.read(b"train/b.bin", 0, 5000, version)


def test_the_hubs_own_program_reads_the_fake_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import HfApi

    hub.token = TOKEN
    api = HfApi(endpoint=hub.url, token=TOKEN)
    found = api.dataset_info("owner/photos", revision="main", expand=["sha"])
    assert found.sha == hub.revisions["main"]
    hub.page_names = 2
    rows = list(api.list_repo_tree("owner/photos", "train", repo_type="dataset", revision=found.sha))
    assert [row.path for row in rows] == ["train/a.txt", "train/b.bin", "train/deep"]
    assert api.get_paths_info("owner/photos", "train/b.bin", repo_type="dataset")[0].lfs.size == 5000
    for path, content in FILES.items():
        place = api.hf_hub_download("owner/photos", path, repo_type="dataset", cache_dir=tmp_path / "files")
        assert Path(place).read_bytes() == content
    assert not any("authorization" in headers for headers in hub.contents.headers)


# -- the token


@pytest.mark.parametrize("where", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "file", "HF_TOKEN_PATH"])
def test_the_token_goes_to_the_hub_and_nowhere_else(
    hub: FakeHub, source: HubSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    hub.token = TOKEN
    place = tmp_path / ("token" if where == "file" else "remote")
    if where in ("file", "HF_TOKEN_PATH"):
        place.write_text(f"{TOKEN}\n")
    if where != "file":
        monkeypatch.setenv(where, str(place) if where == "HF_TOKEN_PATH" else TOKEN)
    assert listed(source, b"train") == {"a.txt": "f", "b.bin": "f", "deep": "d"}
    assert whole(source, b"train/a.txt") == b"small"
    assert whole(source, b"train/b.bin") == LARGE
    assert {headers["authorization"] for headers in hub.headers} == {f"Bearer {TOKEN}"}
    assert hub.contents.headers
    assert not any("authorization" in headers for headers in hub.contents.headers)


@pytest.mark.parametrize("token", ["hf_SECRET\nHost: x", "hf_SECRET token", "hf_SECRET\N{KELVIN SIGN}"])
def test_what_is_no_token_is_refused_in_a_line(
    hub: FakeHub, source: HubSource, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(SourceUnavailable, match="set HF_TOKEN again, or log in") as caught:
        listed(source)
    assert hub.requests == []
    assert not any(secret in str(caught.value) for secret in ("SECRET", "\n"))
    monkeypatch.setenv("HF_TOKEN", f" {TOKEN}\n")
    assert listed(source)
    assert hub.headers[-1]["authorization"] == f"Bearer {TOKEN}"


def test_without_a_token_none_is_sent(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    anonymous = opened(hub, anonymous=True)
    listed(anonymous)
    assert not any("authorization" in headers for headers in hub.headers)


def test_a_new_token_is_found(hub: FakeHub, source: HubSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_SECRETold")
    listed(source)
    hub.token = TOKEN
    with pytest.raises(SourceUnavailable, match="refuses the token") as caught:
        listed(source)
    assert "SECRET" not in str(caught.value)
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setattr(module, "_RENEWED_S", 0.0)
    with pytest.raises(SourceUnavailable, match="refuses the token"):
        listed(source)
    assert listed(source)


def test_nothing_of_the_libraries_is_logged(hub: FakeHub) -> None:
    """In a process of its own: it logs all that anybody says."""
    hub.token = TOKEN
    code = f"""
import logging
logging.basicConfig(level=logging.DEBUG)
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.web.hub import HubSource
source = HubSource({URL!r}, StoreSettings(endpoint={hub.url!r}))
found = source.stat(b"train/b.bin")
assert len(source.read(b"train/b.bin", 0, found.size, found.version)) == 5000
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "HF_TOKEN": TOKEN}, capture_output=True, text=True, check=True
    )
    assert "is commit" in done.stderr
    assert "SECRET" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_both_sides_of_a_fork_can_ask(hub: FakeHub, source: HubSource) -> None:
    assert whole(source, b"train/b.bin") == LARGE
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if all(whole(source, b"train/b.bin") == LARGE for _ in range(5)) else 2
            finally:
                os._exit(status)
        children.append(child)
    assert all(whole(source, b"train/b.bin") == LARGE for _ in range(5))
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
