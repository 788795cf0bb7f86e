"""A source that is a dataset of the Hugging Face Hub, or a directory of one, at one commit.

The revision is resolved once: the first process of a mount that needs the commit asks for it, and all use that one
(`_Commit`). Nothing changes in a commit. So all that is shown was there at one time, and stays while it is mounted.

A file's version is its size and a tag: the hash of its git blob's id, or of the SHA-256 of a file in LFS or Xet. The
hub answers a GET with a redirect to a server of contents, by a URL that is signed and expires. Later reads of the file
ask there at once, so each is one request; when that server refuses, the hub is asked again. With the redirect the hub
names the same id, as an ETag, which is compared; where it names another one, or none, the tree decides. An answer that
names no commit is none of the hub's, and a page of HTML only the file if the id is the hash of it. A page of another
type, of just the file's size, from the server of contents would be taken for the file.

**The token** goes to the hub's own scheme, host and port, and nowhere else. It is read when it is needed first, and
again after the hub has refused it: `HF_TOKEN`, or the file in which `hf auth login` has put it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Container, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from spiderfs.errors import ConfigError, SourceChanged, SourceDenied, SourceError, SourceNotFound, SourceUnavailable
from spiderfs.sources.object_source import DIRECTORY, Pages, StoreSettings, file_stat, is_name, later_page, tag_of
from spiderfs.sources.source import MAX_SIZE, SourceStat, Version
from spiderfs.sources.web.asking import Answer, Web, WebSource, is_address, led_to, origin

log = logging.getLogger(__name__)

HUB = "https://huggingface.co"
# NAME or OWNER/NAME; a revision has a slash only as %2F, or as the hub's own references do.
_URL = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+(?:/[\w.-]+)?+)"
    r"(?:@(?P<revision>refs/(?:convert/[\w.-]+|pr/\d+)|[^/@?#]+))?(?:/(?P<path>[^?#]*))?",
    re.ASCII,
)
# JSON has them, and no name.
_SURROGATE = re.compile("[\ud800-\udfff]")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TOKEN = re.compile(r"[!-~]*")
_NEXT = re.compile(r'<([^>]*)>;\s*rel="next"')
# A page of a thousand names has some 300 kB.
_PAGE_BYTES = 64 << 20
# Redirects of files that are kept, of about 1 kB each; and how many are followed for one question.
_KEPT_LINKS, _HOPS = 4096, 5
# After a token was refused, another one is looked for no more often than this.
_RENEWED_S = 5.0


class _Place(NamedTuple):
    name: str
    revision: str
    path: str
    """Empty, or ends with a slash."""

    @classmethod
    def parse(cls, url: str) -> _Place:
        """From the URL that a user has written; raises ConfigError, which repeats nothing that may be a secret."""
        found = _URL.fullmatch(url)
        path = (found["path"] or "").rstrip("/") if found else ""
        if not found or (path and not all(map(is_name, path.split("/")))):
            raise ConfigError(
                "the source names no data set of the hub: write hf://datasets/OWNER/NAME, with @REVISION and /PATH"
                " behind it if needed"
            )
        return cls(found["name"], unquote(found["revision"] or "main"), f"{path}/" if path else "")


class _Commit:
    """The commit that all processes of a mount show. Each may ask for it, and all take what was written down first."""

    def __init__(self) -> None:
        # Made before the forks, so it is one file of all processes. The kernel puts what is written behind the rest.
        self._fd = os.memfd_create("spiderfs-commit")
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)

    def known(self) -> str:
        return os.pread(self._fd, 40, 0).decode()

    def settle(self, commit: str) -> str:
        os.write(self._fd, commit.encode())
        return self.known()

    def __del__(self) -> None:
        os.close(self._fd)


class _Token:
    """The user's token, as the programs of the hub find it."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._read: str | None = None
        self._read_at = -math.inf

    def headers(self) -> dict[str, str]:
        if self._read is None:
            self._read, self._read_at = self._find() if self._wanted else "", time.monotonic()
        return {"Authorization": f"Bearer {self._read}"} if self._read else {}

    def refused(self) -> bool:
        """Whether there is a token at all. It may have been renewed: the next question is asked with what is there."""
        if time.monotonic() - self._read_at > _RENEWED_S:
            self._read, token = None, self._read
            return bool(token)
        return bool(self._read)

    def _find(self) -> str:
        token = (os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or self._in_file()).strip()
        if not _TOKEN.fullmatch(token):
            raise SourceUnavailable(
                "the token of the hub has characters that no token has: set HF_TOKEN again, or log in (hf auth login)"
            )
        return token

    @staticmethod
    def _in_file() -> str:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
        try:
            return Path(os.environ.get("HF_TOKEN_PATH") or f"{home}/token").expanduser().read_text()
        except (OSError, ValueError, RuntimeError):  # no file, no text, or no home
            return ""


class _Link(NamedTuple):
    """Where the contents of a file can be had, by a signed URL, and which version that is."""

    url: str
    version: Version


_Coming = tuple[Answer, Iterator[bytes]]


class HubSource(WebSource):
    """What `hf://datasets/NAME[@REVISION][/PATH]` names; raises ConfigError for another text, and asks nothing yet."""

    def __init__(self, url: str, settings: StoreSettings) -> None:
        super().__init__()
        self._place = _Place.parse(url)
        self._hub = (settings.endpoint or os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
        if not is_address(self._hub) or any(sign in self._hub for sign in "@?#"):
            raise ConfigError("HF_ENDPOINT is no address of a hub: write it like https://hub.example.org")
        self._origin = origin(self._hub)
        self._where, self._named = f"hf://datasets/{self._place.name}", f"revision {self._place.revision}"
        self._api = f"{self._hub}/api/datasets/{self._place.name}"
        self._timeout_s = settings.timeout_s
        self._web = Web(settings.timeout_s)
        self._token = _Token(wanted=not settings.anonymous)
        self._commit = _Commit()
        self._links: OrderedDict[bytes, _Link] = OrderedDict()
        self._keeping = threading.Lock()

    @property
    def identity(self) -> str:
        """See `OpenedSource`."""
        name, revision, path = self._place
        return f"hf://datasets/{name}@{revision}/{path}".rstrip("/") + ("" if self._hub == HUB else f" at {self._hub}")

    def close(self) -> None:
        self._web.close()

    # -- names

    def stat(self, path: bytes) -> SourceStat:
        if not path and not self._place.path:
            # Asked of the hub each time, for this is also the question whether the hub is there.
            self._resolved(self._commit.known() or self._place.revision)
            return DIRECTORY
        wanted = self._full(path).rstrip("/")
        form = {"paths": wanted, "expand": "False"}
        rows = self._rows(self._asked(f"{self._api}/paths-info/{self._shown}", form=form))
        found = [_stat_of(row) for row in rows if row.get("path") == wanted]
        if not found or found[0] is None or (not path and found[0] != DIRECTORY):
            what = os.fsdecode(path) if path else f"{self._where} has no directory {wanted}"
            raise SourceNotFound(f"{what}: no such file or directory in {self._named}")
        return found[0]

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        yield b".", DIRECTORY
        below = self._full(path) if not path else f"{self._full(path)}/"
        inside = f"/{quote(below[:-1], safe='')}" if below else ""
        url = f"{self._api}/tree/{self._shown}{inside}?recursive=False&expand=False"
        found: dict[bytes, SourceStat] = {}
        left_out: list[str] = []
        pages = Pages(f"{self._where}: the hub", self._timeout_s)
        answer = self._asked(url)
        while True:
            rows = self._rows(answer)
            for row in rows:
                named = str(row.get("path"))
                name, shown = named.removeprefix(below), _stat_of(row)
                if not named.startswith(below) or shown is None:
                    continue
                if is_name(name) and not _SURROGATE.search(name):
                    found[name.encode()] = shown
                else:
                    left_out.append(named)
            following = _NEXT.search(answer.headers.get("Link", ""))
            if not following:
                break
            # A mirror may name the hub that it mirrors, which is not asked.
            hub, there = urlsplit(self._hub), urlsplit(led_to(url, following[1]))
            url = there._replace(scheme=hub.scheme, netloc=hub.netloc).geturl()
            pages.turn((str(row.get("path")) for row in rows), url)
            answer = later_page(partial(self._asked, url))
        if path and not found and not left_out:
            raise SourceNotFound(f"{os.fsdecode(path)}: no such directory in {self._named}")
        if left_out:
            self.report(path, left_out)
        yield from found.items()

    # -- bytes

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        found = self.stat(path)
        if found == DIRECTORY or found.size > most_bytes:
            raise SourceChanged(f"{os.fsdecode(path)}: no longer a file, or larger than it was")
        return found, self.read(path, 0, found.size, found.version)

    def _pieces(self, path: bytes, extent: tuple[int, int] | None, version: Version) -> Iterator[bytes]:
        most_bytes = version.size if extent is None else extent[1] - extent[0]
        question = {"extent": extent, "most_bytes": most_bytes}
        with contextlib.ExitStack() as answers:
            link = self._links.get(path)
            coming = self._by_link(path, link, question, answers) if link else None
            if link is None or coming is None:
                link, coming = self._by_hub(path, question, answers)
            if link.version != version:
                # Another version, or a hub that names its contents differently from its tree, or not at all.
                self._check(path, version)
            answer, pieces = coming
            if "text/html" in answer.headers.get("Content-Type", "") and not path.endswith((b".htm", b".html")):
                pieces = iter([body := b"".join(pieces)])
                if version.tag not in _tags_of(body):
                    raise SourceUnavailable(
                        f"{self._where}: a page of HTML came for a file: check HF_ENDPOINT and proxies"
                    )
            yield from pieces

    def _by_link(
        self, path: bytes, link: _Link, question: dict[str, Any], answers: contextlib.ExitStack
    ) -> _Coming | None:
        """What the server of contents answers to an earlier redirect; None if that has expired."""
        kept = False
        try:
            coming = answers.enter_context(self._web.coming(link.url, **question))
            kept = coming[0].ok
        finally:
            if not kept:
                self._links.pop(path, None)
        return coming if kept else None

    def _by_hub(self, path: bytes, question: dict[str, Any], answers: contextlib.ExitStack) -> tuple[_Link, _Coming]:
        """What the hub answers, or the server to which it redirects."""
        url = f"{self._hub}/datasets/{self._place.name}/resolve/{self._shown}/{quote(self._full(path))}"
        commit, e_tag, size = "", "", ""
        for _ in range(_HOPS):
            own = origin(url) == self._origin
            asked: dict[str, Any] = {"headers": self._token.headers(), "quota": "resolve"} if own else {}
            coming = answers.enter_context(self._web.coming(url, **asked, **question))
            answer = coming[0]
            if own:
                commit = answer.headers.get("X-Repo-Commit") or commit
                e_tag = answer.headers.get("X-Linked-Etag") or answer.headers.get("ETag") or e_tag
                size = answer.headers.get("X-Linked-Size") or size
            if answer.redirect:
                url = led_to(url, answer.redirect)
                if self._origin.startswith("https:") and not url.startswith("https:"):
                    raise SourceUnavailable(f"{self._where}: the hub redirects to a server without TLS")
                continue
            if answer.status == 416:
                raise SourceChanged(f"{os.fsdecode(path)}: shorter than it was")
            if not answer.ok and own:
                raise self._refusal(answer)
            if not answer.ok:
                raise SourceUnavailable(f"{self._where}: the server of its contents refuses them ({answer.status})")
            if not commit:
                raise SourceUnavailable(
                    f"{self._where}: an answer that names no commit is none of a hub's: check HF_ENDPOINT and proxies"
                )
            found = Version(int(size) if size.isdecimal() else answer.size, 0, tag_of(e_tag.removeprefix("W/")))
            link = _Link(url, found)
            if not own:
                with self._keeping:
                    self._links[path] = link
                    if len(self._links) > _KEPT_LINKS:
                        self._links.popitem(last=False)
            return link, coming
        raise SourceUnavailable(f"{self._where}: the hub redirects without end")

    # -- the hub

    @property
    def _shown(self) -> str:
        """The commit that is shown."""
        return self._commit.known() or self._resolved(self._place.revision)

    def _resolved(self, revision: str) -> str:
        """The commit that is shown, after asking the hub what a revision is."""
        row = _parsed(self._asked(f"{self._api}/revision/{quote(revision, safe='')}?expand=sha"))
        commit = row.get("sha") if isinstance(row, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise SourceUnavailable(f"{self._where}: the hub does not say which commit revision {revision} is")
        if not self._commit.known():
            log.info("%s: %s is commit %s", self._where, self._named, self._commit.settle(commit))
        return self._commit.known()

    def _full(self, path: bytes) -> str:
        """The path in the data set; raises SourceNotFound where there can be no such name."""
        try:
            text = path.decode()
        except UnicodeDecodeError:
            text = "/"
        if path and not all(map(is_name, text.split("/"))):
            raise SourceNotFound(f"{path.decode(errors='backslashreplace')}: no file can have this name")
        return self._place.path + text

    def _rows(self, answer: Answer) -> list[dict[str, Any]]:
        rows = _parsed(answer)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise SourceUnavailable(f"{self._where}: the hub has answered with a listing that cannot be read")
        return rows

    def _asked(self, url: str, form: dict[str, str] | None = None) -> Answer:
        """The hub's answer to a question about names, behind redirects of its own (a data set has moved)."""
        for _ in range(_HOPS):
            answer = self._web.get(url, self._token.headers(), most_bytes=_PAGE_BYTES, form=form, quota="api")
            if answer.ok:
                return answer
            if not answer.redirect:
                raise self._refusal(answer)
            url = led_to(url, answer.redirect)
            if origin(url) != self._origin:
                break
        raise SourceUnavailable(f"{self._where}: the hub redirects somewhere else: check its name, and HF_ENDPOINT")

    def _refusal(self, answer: Answer) -> SourceError:
        """What an error of the hub means. A file is gone only if the hub says just that."""
        code, where = answer.headers.get("X-Error-Code", ""), self._where
        if code == "EntryNotFound":
            return SourceNotFound(f"no such file or directory in {self._named}")
        if code == "GatedRepo":
            return SourceDenied(
                f"{where} is gated: ask for access on its page, and log in (hf auth login, or HF_TOKEN)"
            )
        if code == "RevisionNotFound":
            return SourceUnavailable(f"{where} has no {self._named}, or has it no more: check the name")
        if answer.status == 401 and self._token.refused():
            return SourceUnavailable(f"{where}: the hub refuses the token (401): renew it (hf auth login, or HF_TOKEN)")
        if answer.status in (401, 404):
            return SourceUnavailable(
                f"there is no {where}, or it is private ({answer.status}): check the name, and log in (hf auth login,"
                " or HF_TOKEN)"
            )
        if answer.status == 403:
            return SourceDenied(f"{where}: this token may not read it (403)")
        return SourceUnavailable(f"{where}: the hub has failed ({answer.status})")


def _parsed(answer: Answer) -> Any:
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        return None


def _tags_of(content: bytes) -> set[int]:
    """The tags of a file with this content: by its git blob, or in LFS."""
    blob = hashlib.sha1(b"blob %d\0%b" % (len(content), content))
    return {tag_of(blob.hexdigest()), tag_of(hashlib.sha256(content).hexdigest())}


def _stat_of(row: dict[str, Any]) -> SourceStat | None:
    """A row of a tree as attributes; None for what is no file or directory."""
    if row.get("type") == "directory":
        return DIRECTORY
    contents = row.get("lfs")
    size, name = row.get("size"), (contents if isinstance(contents, dict) else row).get("oid")
    if row.get("type") != "file" or not isinstance(size, int) or not 0 <= size <= MAX_SIZE:
        return None
    return file_stat(size, 0, tag_of(name)) if isinstance(name, str) and name.isascii() and name else None
