"""What every source must do, run against each of them. A mark says what a source has that not every source has."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xxhash
from archive_files import Link, patient_indexers, tar_of, zip_of
from moto_store import client_of, moto_store
from mounting import dead_mount
from object_server import MODIFIED_S, ObjectServer, object_server
from web_trees import Tree, web_source

from benchmarks.common.sources import patterned
from benchmarks.fakes import MemorySource
from spiderfs.archives.indexer_process import Indexers
from spiderfs.archives.source import ArchiveSource
from spiderfs.errors import SourceChanged, SourceNotADirectory, SourceNotFound, SourceUnavailable
from spiderfs.sources.listed_files import ListedFiles, ListedSource
from spiderfs.sources.local import LocalSource
from spiderfs.sources.members import Members
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.open import open_source
from spiderfs.sources.peers import PeerSource
from spiderfs.sources.ranges import RangeSource
from spiderfs.sources.slow import SlowSettings, SlowSource
from spiderfs.sources.source import UNKNOWN, Source, SourceStat, Version, streamed

NOT_UTF8 = b"caf\xe9-\xff.bin"

LINKS, XATTRS, ANY_NAMES = "links", "xattrs", "names that are not UTF-8"
EMPTY_DIRECTORIES = "directories that outlive what is in them"
MTIMES, WAYS = "versions by mtime", "tells a file on the way to a name from no name"
DEAD_ENTRIES = "entries that the source lists and says nothing else of"
BUCKETS = itertools.count()
OF_DIRECTORIES = frozenset({LINKS, XATTRS, EMPTY_DIRECTORIES, ANY_NAMES, MTIMES, WAYS, DEAD_ENTRIES})


class DirectoryTree(Tree):
    def __init__(self, root: Path) -> None:
        self.root = os.fsencode(root)
        self._dead = contextlib.ExitStack()
        self.mtime_ns = 1_700_000_000_000_000_000

    def add(self, path: bytes, content: bytes = b"", *, mtime_ns: int | None = None) -> SourceStat:
        target = self._prepared(path)
        with open(target, "wb") as file:
            file.write(content)
        self.mtime_ns += 1_000_000
        os.utime(target, ns=(self.mtime_ns, self.mtime_ns if mtime_ns is None else mtime_ns))
        return self._stat(target)

    def add_directory(self, path: bytes) -> SourceStat:
        os.mkdir(self._prepared(path))
        return self._stat(self._prepared(path))

    def add_symlink(self, path: bytes, target: bytes) -> SourceStat:
        os.symlink(target, self._prepared(path))
        return self._stat(self._prepared(path))

    def remove(self, path: bytes) -> None:
        target = os.path.join(self.root, path)
        if os.path.isdir(target) and not os.path.islink(target):
            shutil.rmtree(target)
        else:
            os.unlink(target)

    def set_xattr(self, path: bytes, name: str, value: bytes) -> None:
        try:
            os.setxattr(os.path.join(self.root, path), name, value)
        except OSError as exc:
            pytest.skip(f"no extended attributes on this file system: {exc}")

    def break_entry(self, path: bytes) -> None:
        self._dead.enter_context(dead_mount(os.fsdecode(os.path.join(self.root, path))))

    def mend_entry(self, path: bytes) -> None:
        self._dead.close()

    def _prepared(self, path: bytes) -> bytes:
        target = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        return target

    def _stat(self, target: bytes) -> SourceStat:
        found = os.lstat(target)
        return SourceStat(found.st_mode, found.st_uid, found.st_gid, found.st_size, found.st_mtime_ns)


class BucketTree(Tree):
    """A bucket of a store that others write to."""

    def __init__(self, client: Any, bucket: str, prefix: bytes) -> None:
        self._client, self._bucket, self._prefix = client, bucket, prefix.decode()
        self._client.create_bucket(Bucket=bucket)

    def add(self, path: bytes, content: bytes = b"", *, mtime_ns: int | None = None) -> SourceStat:
        self._put(path.decode(), content)
        found = self._client.head_object(Bucket=self._bucket, Key=self._prefix + path.decode())
        tag = xxhash.xxh3_64_intdigest(found["ETag"].strip('"').encode())
        mtime_ns = int(found["LastModified"].timestamp()) * 10**9
        return SourceStat(stat.S_IFREG | 0o444, os.getuid(), os.getgid(), len(content), mtime_ns, tag=tag)

    def remove(self, path: bytes) -> None:
        key = self._prefix + path.decode()
        listed = self._client.list_objects_v2(Bucket=self._bucket, Prefix=key).get("Contents", [])
        for found in listed:
            if found["Key"] == key or found["Key"].startswith(f"{key}/"):
                self._client.delete_object(Bucket=self._bucket, Key=found["Key"])

    def _put(self, key: str, content: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=content)


class ArchiveTree(Tree):
    """What is in an archive, which is written again at every change."""

    def __init__(self, archive: bytes, put: Callable[[bytes], SourceStat], source: Source) -> None:
        self._pack = tar_of if archive.endswith(b".tar") else zip_of
        self._put, self._source = put, source
        self._members: dict[bytes, bytes | None] = {}
        self._write()

    def add(self, path: bytes, content: bytes = b"", *, mtime_ns: int | None = None) -> SourceStat:
        return self._added(path, content)

    def add_directory(self, path: bytes) -> SourceStat:
        return self._added(path, None)

    def add_symlink(self, path: bytes, target: bytes) -> SourceStat:
        return self._added(path, Link(target))

    def remove(self, path: bytes) -> None:
        removed = [known for known in self._members if known == path or known.startswith(path + b"/")]
        for known in removed:
            del self._members[known]
        if b"/" in path:
            self._members.setdefault(path.rpartition(b"/")[0], None)
        self._write()

    def _added(self, path: bytes, content: bytes | None) -> SourceStat:
        self._members[path] = content
        self._write()
        return self._source.stat(path)

    def _write(self) -> None:
        self._put(self._pack(self._members))


class Within:
    """A source as it is below one of its directories."""

    def __init__(self, source: Source, root: bytes) -> None:
        self.undated_directories, self.statvfs, self.close = source.undated_directories, source.statvfs, source.close
        self.stat, self.readlink, self.listxattr = map(self._below, (source.stat, source.readlink, source.listxattr))
        self.scan, self.read, self.read_present = map(self._below, (source.scan, source.read, source.read_present))
        self.getxattr = self._below(source.getxattr)
        self._root = root

    def _below(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, *args: ask(self._root + b"/" + path if path else self._root, *args)


def archive_subject(kind: str, directory: Path, indexers: Indexers) -> Subject:
    """A tar in a directory, a zip among objects with tags, or a tar in a zip in a directory."""
    in_directory = kind != "zip"
    (directory / "root").mkdir()
    memory, files = MemorySource(tagged=True), DirectoryTree(directory / "root")
    source: Source = LocalSource(str(directory / "root")) if in_directory else memory
    for depth in range(2 if kind == "nested" else 1):
        source = ArchiveSource(source, ["tar", "zip"], directory / f"indices{depth}", 1 << 20, indexers)
    put = files.add if in_directory else memory.add
    if kind == "nested":
        source = Within(source, b"d/outer.zip/e/set.tar")
        tree = ArchiveTree(b"set.tar", lambda made: put(b"d/outer.zip", zip_of({b"e/set.tar": made})), source)
    else:
        source = Within(source, b"d/set." + kind.encode())
        tree = ArchiveTree(b"set." + kind.encode(), lambda made: put(b"d/set." + kind.encode(), made), source)
    names = {ANY_NAMES} if kind == "zip" else set()
    return Subject(source, tree, OF_DIRECTORIES - {XATTRS, MTIMES, DEAD_ENTRIES} - names)


@pytest.fixture(scope="module")
def indexers() -> Iterator[Indexers]:
    with patient_indexers() as made:
        yield made


class ServedTree(Tree):
    """The same for a store of our own, in any of its dialects."""

    def __init__(self, server: ObjectServer, prefix: bytes) -> None:
        self._server, self._prefix = server, prefix.decode()

    def add(self, path: bytes, content: bytes = b"", *, mtime_ns: int | None = None) -> SourceStat:
        self._server.objects[self._prefix + path.decode()] = content
        tag = xxhash.xxh3_64_intdigest(self._server.listed_tag(self._server.e_tag(content).strip('"')).encode())
        mode, mtime_ns = stat.S_IFREG | 0o444, MODIFIED_S * 10**9
        return SourceStat(mode, os.getuid(), os.getgid(), len(content), mtime_ns, tag=tag)

    def remove(self, path: bytes) -> None:
        objects, key = self._server.objects, self._prefix + path.decode()
        for found in [found for found in objects if found == key or found.startswith(f"{key}/")]:
            del objects[found]


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[str, Any]]:
    """The URL of a store, and a client of it."""
    with moto_store() as url:
        yield url, client_of(url)


class Subject(NamedTuple):
    source: Source
    tree: Tree | MemorySource
    has: frozenset[str] = OF_DIRECTORIES

    def needs(self, *marks: str) -> None:
        """Skip the test for a source that does not have these."""
        if missing := set(marks) - self.has:
            pytest.skip(f"this source has no {', '.join(missing)}")


KINDS = ["local", "slow", "memory", "tagged", "s3", "gs", "az", "other tags", "tar", "zip", "nested", "peers", "hub"]


@pytest.fixture(params=[*KINDS, "manifest"])
def subject(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    if request.param == "s3":
        (url, client), bucket = request.getfixturevalue("store"), f"bucket{next(BUCKETS)}"
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        bucket_source = open_source(f"s3://{bucket}/some/prefix/", StoreSettings(endpoint=url))
        tree = BucketTree(client, bucket, b"some/prefix/")
        yield Subject(bucket_source, tree, frozenset())
        bucket_source.close()
        return
    if request.param in ("tar", "zip", "nested"):
        yield archive_subject(request.param, tmp_path, request.getfixturevalue("indexers"))
        return
    if request.param in ("gs", "az", "other tags"):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
        with object_server(dialect="az" if request.param == "az" else "gs") as server:
            url = f"{server.dialect}://bucket/some/prefix/"
            if request.param == "other tags":
                server.listed_tag = "other {}".format
            store = open_source(url, StoreSettings(endpoint=server.url, anonymous=True))
            yield Subject(store, ServedTree(server, b"some/prefix/"), frozenset())
            store.close()
        return
    if request.param in ("hub", "manifest"):
        with web_source(request.param) as (asked, web_tree):
            yield Subject(asked, web_tree, frozenset({ANY_NAMES} if request.param == "manifest" else set()))
        return
    if request.param in ("memory", "tagged"):
        memory = MemorySource(tagged=request.param == "tagged")
        yield Subject(memory, memory, OF_DIRECTORIES - ({MTIMES} if request.param == "tagged" else set()))
        return
    root = tmp_path / "root"
    root.mkdir()
    source: Source = LocalSource(str(root))
    faults = SlowSettings.create(tmp_path / "faults")
    if request.param == "slow":
        source = SlowSource(source, faults)
    if request.param == "peers":
        # The other node, the home of half of the files, is away.
        own, other = "http://127.0.0.1:1", "http://127.0.0.1:2"
        members = Members()
        members.change({own: 1.0, other: 1.0}, {own})
        source = PeerSource(source, members, 0.2, 10.0, members.row(0), ())
    yield Subject(source, DirectoryTree(root))
    source.close()
    source.close()
    faults.close()


def test_the_root_is_a_directory(subject: Subject) -> None:
    names = [name for name, _ in subject.source.scan(b"")]
    assert names == [b"."]
    subject.tree.add(b"file")
    root = subject.source.stat(b"")
    assert stat.S_ISDIR(root.mode)
    assert (b".", root) in list(subject.source.scan(b""))


def test_stat_tells_type_size_and_time(subject: Subject) -> None:
    added = subject.tree.add(b"train/n01/a.png", b"12345", mtime_ns=1_600_000_000_123_456_789)
    found = subject.source.stat(b"train/n01/a.png")
    assert found == added
    assert stat.S_ISREG(found.mode)
    assert found.size == found.version.size == 5
    if MTIMES in subject.has:
        assert found.version == Version(5, 1_600_000_000_123_456_789)
    else:
        assert found.version.mtime_ns == 0
        assert 0 < found.version.tag < 1 << 64
    assert stat.S_ISDIR(subject.source.stat(b"train/n01").mode)


def test_symbolic_links_are_shown_and_not_followed(subject: Subject) -> None:
    subject.needs(LINKS)
    subject.tree.add(b"directory/file", b"x")
    subject.tree.add_symlink(b"link", b"directory")
    subject.tree.add_symlink(b"dangling", b"/nowhere/" + NOT_UTF8)
    assert stat.S_ISLNK(subject.source.stat(b"link").mode)
    assert subject.source.readlink(b"link") == b"directory"
    assert subject.source.readlink(b"dangling") == b"/nowhere/" + NOT_UTF8
    assert subject.source.stat(b"dangling").size == len(b"/nowhere/" + NOT_UTF8)
    with pytest.raises(SourceNotADirectory):
        subject.source.stat(b"link/file")
    with pytest.raises(SourceNotADirectory):
        list(subject.source.scan(b"link"))
    with pytest.raises(SourceChanged):
        subject.source.read(b"link", 0, 1, Version(1, 1))
    with pytest.raises(SourceChanged):
        subject.source.readlink(b"directory/file")


def test_scan_gives_what_stat_gives(subject: Subject) -> None:
    names = {b"file", b"empty", b"directory"}
    subject.tree.add(b"d/file", b"123")
    subject.tree.add(b"d/empty")
    subject.tree.add(b"d/directory/file")
    if ANY_NAMES in subject.has:
        subject.tree.add(b"d/" + NOT_UTF8, b"123")
        names.add(NOT_UTF8)
    if EMPTY_DIRECTORIES in subject.has:
        subject.tree.add_directory(b"d/below")
        names.add(b"below")
    if LINKS in subject.has:
        subject.tree.add_symlink(b"d/link", b"empty")
        names.add(b"link")
    own, *entries = subject.source.scan(b"d")
    assert own == (b".", subject.source.stat(b"d"))
    found = dict(entries)
    assert len(found) == len(entries)
    assert found.keys() == names
    assert found == {name: subject.source.stat(b"d/" + name) for name in found}


def test_an_entry_that_fails_hides_no_other(subject: Subject) -> None:
    subject.needs(DEAD_ENTRIES)
    subject.tree.add(b"d/file", b"x")
    subject.tree.add_directory(b"d/dead")
    subject.tree.add(b"d/below/file", b"x")
    subject.tree.break_entry(b"d/dead")
    try:
        _, *entries = subject.source.scan(b"d")
        beside = {name: subject.source.stat(b"d/" + name) for name in (b"file", b"below")}
        assert dict(entries) == beside | {b"dead": UNKNOWN}
        with pytest.raises(SourceUnavailable):
            subject.source.stat(b"d/dead")
    finally:
        subject.tree.mend_entry(b"d/dead")
    assert dict(subject.source.scan(b"d"))[b"dead"] == subject.source.stat(b"d/dead")


def test_a_scan_for_the_names_has_all_of_them_and_attributes_of_the_unknown_ones(subject: Subject) -> None:
    subject.tree.add(b"d/known", b"1")
    subject.tree.add(b"d/new", b"12")
    subject.tree.add(b"d/below/file", b"x")
    subject.tree.add(b"d/other/file", b"x")
    known = {b"known": stat.S_IFREG, b"below": stat.S_IFDIR, b"gone": stat.S_IFREG, b"other": stat.S_IFREG}
    own, *entries = subject.source.scan(b"d", known.items())
    assert own == (b".", subject.source.stat(b"d"))
    found = dict(entries)
    assert found.keys() == {b"known", b"new", b"below", b"other"}
    for name in (b"new", b"other"):
        assert found[name] == subject.source.stat(b"d/" + name), "its name or its type is new"
    for name in (b"known", b"below"):
        assert found[name] in (UNKNOWN, subject.source.stat(b"d/" + name))


def test_names_need_not_be_utf8(subject: Subject) -> None:
    subject.needs(ANY_NAMES)
    added = subject.tree.add(NOT_UTF8 + b"/" + NOT_UTF8, b"content")
    assert subject.source.stat(NOT_UTF8 + b"/" + NOT_UTF8) == added
    assert subject.source.read(NOT_UTF8 + b"/" + NOT_UTF8, 0, 7, added.version) == b"content"


def test_a_missing_path_is_not_found(subject: Subject) -> None:
    subject.tree.add(b"d/file", b"x")
    asks: list[Callable[[bytes], object]] = [
        subject.source.stat,
        lambda path: list(subject.source.scan(path)),
        lambda path: subject.source.read(path, 0, 1, Version(1, 1)),
        *([subject.source.readlink] if LINKS in subject.has else []),
        *([subject.source.listxattr] if XATTRS in subject.has else []),
    ]
    paths = [b"missing", b"d/missing", b"missing/missing", b"n" * 5000, b"..", b"d/../d/file", b"d/", b"./d", b"d\0"]
    for ask, path in itertools.product(asks, [*paths, b"."]):
        with pytest.raises(SourceNotFound):
            ask(path)


def test_a_file_is_not_a_directory(subject: Subject) -> None:
    subject.tree.add(b"file", b"x")
    with pytest.raises(SourceNotADirectory if WAYS in subject.has else SourceNotFound):
        subject.source.stat(b"file/below")
    with pytest.raises(SourceNotADirectory if WAYS in subject.has else SourceNotFound):
        list(subject.source.scan(b"file"))


def test_read_is_short_only_at_the_end(subject: Subject) -> None:
    version = subject.tree.add(b"file", b"0123456789").version
    for offset, length in ((0, 10), (3, 4), (8, 10), (10, 5), (20, 5), (0, 0)):
        assert subject.source.read(b"file", offset, length, version) == b"0123456789"[offset : offset + length]


def test_what_comes_piece_by_piece_are_the_same_bytes(subject: Subject) -> None:
    content = patterned(0, (2 << 20) + 5)
    old = subject.tree.add(b"file", b"old").version
    version = subject.tree.change(b"file", content).version
    listed = ListedSource(subject.source, ListedFiles(b"file\t5\t7\n"))
    for source in (subject.source, RangeSource(subject.source), listed):
        assert b"".join(streamed(source, b"file", 3, 2 << 20, version)) == content[3 : (2 << 20) + 3]
        with pytest.raises(SourceChanged):
            b"".join(streamed(source, b"file", 0, 3, old))


def test_an_empty_file_reads_as_nothing(subject: Subject) -> None:
    assert subject.source.read(b"file", 0, 100, subject.tree.add(b"file").version) == b""


def test_another_version_is_not_read(subject: Subject) -> None:
    old = subject.tree.add(b"file", b"old").version
    new = subject.tree.change(b"file", b"new").version
    assert old != new
    with pytest.raises(SourceChanged):
        subject.source.read(b"file", 0, 3, old)
    assert subject.source.read(b"file", 0, 3, new) == b"new"
    with pytest.raises(SourceChanged):
        subject.source.read(b"file", 0, 0, old)


def test_the_present_version_is_read_whatever_it_is(subject: Subject) -> None:
    subject.tree.add(b"file", b"old")
    new = subject.tree.change(b"file", b"newer")
    assert subject.source.read_present(b"file", 5) == (new, b"newer")
    with pytest.raises(SourceChanged):
        subject.source.read_present(b"file", 4)
    subject.tree.add(b"directory/file")
    with pytest.raises(SourceChanged):
        subject.source.read_present(b"directory", 1 << 20)
    if LINKS in subject.has:
        subject.tree.add_symlink(b"link", b"file")
        with pytest.raises(SourceChanged):
            subject.source.read_present(b"link", 1 << 20)
    with pytest.raises(SourceNotFound):
        subject.source.read_present(b"nothing", 5)


def test_a_removed_file_is_gone(subject: Subject) -> None:
    version = subject.tree.add(b"d/file", b"x").version
    subject.tree.remove(b"d/file")
    with pytest.raises(SourceNotFound):
        subject.source.read(b"d/file", 0, 1, version)
    if EMPTY_DIRECTORIES in subject.has:
        assert [name for name, _ in subject.source.scan(b"d")] == [b"."]
        subject.tree.remove(b"d")
    with pytest.raises(SourceNotFound):
        list(subject.source.scan(b"d"))


def test_a_file_replaced_by_a_directory_is_another_version(subject: Subject) -> None:
    version = subject.tree.add(b"name", b"x").version
    subject.tree.remove(b"name")
    subject.tree.add(b"name/file", b"x")
    with pytest.raises(SourceChanged if WAYS in subject.has else (SourceChanged, SourceNotFound)):
        subject.source.read(b"name", 0, 1, version)


def test_extended_attributes(subject: Subject) -> None:
    subject.needs(LINKS, XATTRS)
    subject.tree.add(b"file", b"x")
    subject.tree.add_symlink(b"link", b"file")
    subject.tree.set_xattr(b"file", "user.label", b"\x00cat")
    assert "user.label" in subject.source.listxattr(b"file")
    assert subject.source.getxattr(b"file", "user.label") == b"\x00cat"
    assert subject.source.getxattr(b"file", "user.none") is None
    assert subject.source.getxattr(b"link", "user.label") is None
    assert "user.label" not in subject.source.listxattr(b"link")


def test_statvfs_knows_the_size(subject: Subject) -> None:
    assert subject.source.statvfs().f_blocks > 0


def test_directories_say_when_they_have_changed_or_say_nothing(subject: Subject) -> None:
    subject.tree.add(b"d/file", b"x")
    before = subject.source.stat(b"d")
    subject.tree.add(b"d/another", b"x")
    assert (subject.source.stat(b"d").mtime_ns == before.mtime_ns) is subject.source.undated_directories
