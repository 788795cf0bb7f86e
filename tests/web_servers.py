"""Web servers in threads of the test: files as nginx gives them, and a hub of data sets with a server of its contents.

They count what they are asked, and fail as they are told. `requests` has an entry for each request, and `headers` the
headers of each, with names in small letters.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from local_server import AskedServer

NO_HEADERS: dict[str, str] = {}


class Reply(NamedTuple):
    status: int
    body: bytes = b""
    headers: dict[str, str] = NO_HEADERS


class Asked(NamedTuple):
    """One request; `form` is what a POST has brought."""

    path: str
    query: dict[str, str]
    headers: dict[str, str]
    form: dict[str, str]


class WebServer(AskedServer):
    def __init__(self, answer: Callable[[Asked], tuple[str, Reply]]) -> None:
        """`answer` gives the entry of a request in `requests`, and what is answered."""
        self.answer = answer
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.latency_s = 0.0
        self.drip_s = 0.0
        """The pause after each byte of a body."""
        self.fails: Callable[[str], Reply | None] = lambda request: None
        self.cuts: set[str] = set()
        """Requests that are answered with half of the body."""
        self.ranges = True
        super().__init__(_handler_of(self))


def _handler_of(server: WebServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Without this the body waits for an acknowledgement of the headers.
        disable_nagle_algorithm = True
        wbufsize = -1

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            form = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked = Asked(unquote(address.path, errors="surrogateescape"), _first(address.query), headers, _first(form))
            request, reply = server.answer(asked)
            server.requests.append(request)
            server.headers.append(headers)
            if server.latency_s:
                time.sleep(server.latency_s)
            reply = server.fails(request) or reply
            if reply.status == 200 and server.ranges and "range" in headers:
                reply = _part(reply, headers["range"])
            self._give(reply, request in server.cuts)

        do_POST = do_HEAD = do_GET

        def _give(self, reply: Reply, cut: bool) -> None:
            self.send_response_only(reply.status)
            for name, value in {
                "Date": self.date_time_string(),
                **reply.headers,
                "Content-Length": str(len(reply.body)),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            body = b"" if self.command == "HEAD" else reply.body[: len(reply.body) // 2] if cut else reply.body
            if server.drip_s:
                for place in range(len(body)):
                    self.wfile.write(body[place : place + 1])
                    self.wfile.flush()
                    time.sleep(server.drip_s)
            else:
                self.wfile.write(body)
            self.wfile.flush()
            self.close_connection = self.close_connection or cut

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            # A client that was killed, or that does not want what it asked for.
            with contextlib.suppress(ConnectionError):
                super().handle()

    return Handler


def _first(query: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}


def _part(reply: Reply, extent: str) -> Reply:
    first, _, last = extent.removeprefix("bytes=").partition("-")
    start, end = int(first), min(int(last) + 1, len(reply.body))
    if start >= len(reply.body):
        return Reply(416)
    headers = {**reply.headers, "Content-Range": f"bytes {start}-{end - 1}/{len(reply.body)}"}
    return Reply(206, reply.body[start:end], headers)


class FileServer(WebServer):
    """Files with the ETags of nginx, which are their times in whole seconds and their sizes."""

    def __init__(self) -> None:
        super().__init__(self._file)
        self.files: dict[str, tuple[bytes, float]] = {}
        """Contents and times of last change, by path."""
        self.e_tag: Callable[[bytes, float], str] = nginx_e_tag
        self.now: Callable[[], float] = time.time

    def put(self, path: str, content: bytes, modified_s: float = 1_700_000_000) -> None:
        self.files[path] = content, modified_s

    def manifest(self, tags: bool = False) -> bytes:
        """What a user would write: with ETags, or with times."""
        rows = []
        for path, (content, modified_s) in self.files.items():
            tag = self.e_tag(content, modified_s) if tags else f"{modified_s:.10f}"
            rows.append(f"{path}\t{len(content)}\t{tag}\n".encode(errors="surrogateescape"))
        return b"".join(rows)

    def _file(self, asked: Asked) -> tuple[str, Reply]:
        path = asked.path.removeprefix("/")
        request = f"GET {path}"
        if path not in self.files:
            is_directory = any(other.startswith(f"{path}/") for other in self.files)
            return request, Reply(301, b"", {"Location": f"{self.url}/{quote(path)}/"}) if is_directory else Reply(404)
        content, modified_s = self.files[path]
        headers = {
            "Last-Modified": formatdate(int(modified_s), usegmt=True),
            "Date": formatdate(self.now(), usegmt=True),
        }
        if e_tag := self.e_tag(content, modified_s):
            headers["ETag"] = e_tag
        unchanged = (
            asked.headers["if-none-match"] == e_tag
            if "if-none-match" in asked.headers
            else asked.headers.get("if-modified-since") == headers["Last-Modified"]
        )
        return request, Reply(304, b"", headers) if unchanged else Reply(200, content, headers)


def nginx_e_tag(content: bytes, modified_s: float) -> str:
    return f'"{int(modified_s):x}-{len(content):x}"'


class FakeHub(WebServer):
    """A hub with one data set. Files of more than `lfs_bytes` lie in LFS, and so on another server, `contents`."""

    NAME = "owner/photos"

    def __init__(self) -> None:
        super().__init__(self._hub)
        self.contents = WebServer(self._content)
        self.commits: dict[str, dict[str, bytes]] = {}
        self.revisions: dict[str, str] = {}
        self.push({})
        self.page_names = 1000
        self.lfs_bytes = 100
        self.token = ""
        """What a user has to send, if this is set."""
        self.gated = False
        self.e_tags = True
        self.moved_from = ""
        """Another name of the data set, from which the hub redirects."""
        self._signature = 1

    def close(self) -> None:
        self.contents.close()
        super().close()

    def push(self, files: dict[str, bytes], revision: str = "main") -> str:
        """A new commit with just these files, and its name."""
        commit = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.revisions[revision] = commit
        return commit

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the latest commit. A test that changes them has a hub whose commits change."""
        return self.commits[self.revisions["main"]]

    def expire(self) -> None:
        """The signatures so far count no more."""
        self._signature += 1

    def _hub(self, asked: Asked) -> tuple[str, Reply]:
        kind, found = "", asked.path.removeprefix("/")
        for prefix, name in (
            ("api/datasets/", "API"),
            ("api/resolve-cache/datasets/", "CACHE"),
            ("datasets/", "RESOLVE"),
        ):
            if found.startswith(prefix):
                kind, found = name, found.removeprefix(prefix)
        if self.moved_from and found.startswith(f"{self.moved_from}/"):
            moved = asked.path.replace(self.moved_from, self.NAME, 1)
            query = "&".join(f"{name}={quote(value)}" for name, value in asked.query.items())
            return f"MOVED {found}", Reply(307, b"", {"Location": f"{quote(moved)}?{query}"})
        inside = found.removeprefix(f"{self.NAME}/")
        return f"{kind} {inside}", self._refusal(asked, found, kind) or self._answer(kind, inside, asked)

    def _refusal(self, asked: Asked, found: str, kind: str) -> Reply | None:
        given = asked.headers.get("authorization", "").removeprefix("Bearer ")
        if given and given != (self.token or given):
            return Reply(401, b"SECRET MESSAGE", {"X-Error-Message": "Invalid credentials in Authorization header"})
        if not found.startswith(f"{self.NAME}/") or (self.token and not given):
            return Reply(404 if given else 401, b"SECRET MESSAGE", {"X-Error-Code": "RepoNotFound"})
        if self.gated and kind != "API":
            return Reply(403, b"SECRET MESSAGE", {"X-Error-Code": "GatedRepo"})
        return None

    def _answer(self, kind: str, inside: str, asked: Asked) -> Reply:
        what, _, rest = inside.partition("/") if kind == "API" else (kind, "", inside.removeprefix("resolve/"))
        # A revision with a slash comes with %2F in it.
        revision = next((name for name in self.revisions if rest == name or rest.startswith(f"{name}/")), "")
        commit = self.revisions.get(revision) or rest.partition("/")[0]
        if commit not in self.commits:
            return Reply(404, b"SECRET MESSAGE", {"X-Error-Code": "RevisionNotFound"})
        path = rest.removeprefix(revision or commit).removeprefix("/")
        files = self.commits[commit]
        if what == "revision":
            return _json({"id": self.NAME, "sha": commit})
        if what == "tree":
            return self._tree(files, path, asked)
        if what == "paths-info":
            row = self._row(files, asked.form["paths"])
            return _json([row] if row else [])
        if path not in files:
            return Reply(404, b"SECRET MESSAGE", {"X-Error-Code": "EntryNotFound"})
        return self._file(kind, commit, path, files[path])

    def _tree(self, files: dict[str, bytes], path: str, asked: Asked) -> Reply:
        below = f"{path}/" if path else ""
        names = {name[len(below) :].partition("/")[0] for name in files if name.startswith(below)}
        if path and not names:
            return Reply(404, b"SECRET MESSAGE", {"X-Error-Code": "EntryNotFound"})
        begin = int(asked.query.get("cursor", "0"))
        rows = [self._row(files, below + name) for name in sorted(names)]
        end = begin + self.page_names
        headers = {}
        if end < len(rows):
            headers["Link"] = f'<{self.url}{quote(asked.path)}?recursive=False&cursor={end}>; rel="next"'
        return _json(rows[begin:end], headers)

    def _file(self, kind: str, commit: str, path: str, content: bytes) -> Reply:
        row = self._row({path: content}, path)
        assert row is not None
        lfs = row.get("lfs")
        headers = {"X-Repo-Commit": commit}
        if lfs:
            if self.e_tags:
                headers |= {"X-Linked-Etag": f'"{lfs["oid"]}"', "X-Linked-Size": str(len(content)), "ETag": '"other"'}
            signed = f"Expires=1&Signature=SECRET-signature-{self._signature}"
            return Reply(302, b"", headers | {"Location": f"{self.contents.url}/{commit}/{quote(path)}?{signed}"})
        if self.e_tags:
            headers["ETag"] = f'"{row["oid"]}"'
        if kind == "RESOLVE":
            place = f"/api/resolve-cache/datasets/{self.NAME}/{commit}/{quote(path)}"
            return Reply(307, b"", headers | {"Location": place})
        return Reply(200, content, headers)

    def _row(self, files: dict[str, bytes], path: str) -> dict[str, object] | None:
        content = files.get(path)
        if content is None:
            is_directory = any(name.startswith(f"{path}/") for name in files)
            return {"type": "directory", "oid": "d" * 40, "size": 0, "path": path} if is_directory else None
        row = {"type": "file", "oid": blob_id(content), "size": len(content), "path": path}
        if len(content) > self.lfs_bytes:
            row["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return row

    def _content(self, asked: Asked) -> tuple[str, Reply]:
        commit, _, path = asked.path.removeprefix("/").partition("/")
        request = f"CONTENT {path}"
        if asked.query.get("Signature") != f"SECRET-signature-{self._signature}":
            return request, Reply(403, b"<Error>SECRET MESSAGE</Error>")
        return request, Reply(200, self.commits[commit][path], {"ETag": '"of the contents alone"'})


def _json(value: object, headers: dict[str, str] = NO_HEADERS) -> Reply:
    return Reply(200, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})


def blob_id(content: bytes) -> str:
    """The id of git's blob."""
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()


@contextlib.contextmanager
def file_server() -> Iterator[FileServer]:
    with contextlib.closing(FileServer()) as server:
        yield server


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    with contextlib.closing(FakeHub()) as hub:
        yield hub
