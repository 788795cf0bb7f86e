"""Trees that the suite of sources alters: what they have in common, and those that a hub and a web server show."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator

import xxhash
from web_servers import FakeHub, FileServer, blob_id, fake_hub, file_server

from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.open import OpenedSource, open_source
from spiderfs.sources.source import SourceStat


class Tree:
    """How a test alters what a source shows; what a tree cannot do is not asked of it."""

    def add(self, path: bytes, content: bytes = b"", *, mtime_ns: int | None = None) -> SourceStat:
        raise NotImplementedError

    def change(self, path: bytes, content: bytes) -> SourceStat:
        return self.add(path, content)

    def remove(self, path: bytes) -> None:
        raise NotImplementedError

    def add_directory(self, path: bytes) -> SourceStat:
        raise NotImplementedError

    def add_symlink(self, path: bytes, target: bytes) -> SourceStat:
        raise NotImplementedError

    def set_xattr(self, path: bytes, name: str, value: bytes) -> None:
        raise NotImplementedError

    def break_entry(self, path: bytes) -> None:
        raise NotImplementedError

    def mend_entry(self, path: bytes) -> None:
        raise NotImplementedError


def _object(size: int, tag: str) -> SourceStat:
    mode = stat.S_IFREG | 0o444
    return SourceStat(mode, os.getuid(), os.getgid(), size, 0, tag=xxhash.xxh3_64_intdigest(tag.encode()))


class HubTree(Tree):
    """A hub whose commits change, which no real one's do; so a source that knows its commit can be asked again."""

    def __init__(self, hub: FakeHub) -> None:
        self._hub = hub
        hub.lfs_bytes = 4

    def add(self, path: bytes, content: bytes = b"", *, mtime_ns: int | None = None) -> SourceStat:
        self._hub.files[path.decode()] = content
        return _object(len(content), hashlib.sha256(content).hexdigest() if len(content) > 4 else blob_id(content))

    def remove(self, path: bytes) -> None:
        for name in [name for name in self._hub.files if f"{name}/".startswith(f"{path.decode()}/")]:
            del self._hub.files[name]


class ManifestTree(Tree):
    """Files of a web server, and their manifest, which is written again with each change."""

    def __init__(self, server: FileServer) -> None:
        self._server = server
        server.e_tag = lambda content, modified_s: f'"{hashlib.md5(content).hexdigest()}"'
        self._write()

    def add(self, path: bytes, content: bytes = b"", *, mtime_ns: int | None = None) -> SourceStat:
        self._server.put(os.fsdecode(path), content)
        self._write()
        return _object(len(content), hashlib.md5(content).hexdigest())

    def remove(self, path: bytes) -> None:
        for name in [name for name in self._server.files if f"{name}/".startswith(f"{os.fsdecode(path)}/")]:
            del self._server.files[name]
        self._write()

    def _write(self) -> None:
        self._server.files.pop("a manifest", None)
        # A text without a line would be taken for a mishap.
        self._server.put("a manifest", self._server.manifest(tags=True) or b"../not shown\t0\t0\n")


@contextlib.contextmanager
def web_source(kind: str) -> Iterator[tuple[OpenedSource, Tree]]:
    """A source of this kind, `hub` or `manifest`, and what it shows."""
    with fake_hub() as hub, file_server() as server:
        tree = HubTree(hub) if kind == "hub" else ManifestTree(server)
        url = "hf://datasets/owner/photos" if kind == "hub" else f"{server.url}/a manifest"
        settings = StoreSettings(endpoint=hub.url if kind == "hub" else "", timeout_s=10.0)
        with contextlib.closing(open_source(url, settings)) as source:
            yield source, tree
