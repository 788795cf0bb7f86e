"""Archives as directories of a source: when an index is made, what it costs, versions, and what fails."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from archive_files import Link, patient_indexers, tar_of, zip_of
from mounting import eventually

from benchmarks.fakes import MemorySource
from spiderfs.archives import indexer_process
from spiderfs.archives.indexer_process import Indexers
from spiderfs.archives.source import ArchiveSource, forget_gone
from spiderfs.errors import (
    ArchiveDamaged,
    ArchiveFailed,
    SourceChanged,
    SourceNotADirectory,
    SourceNotFound,
    SourceThrottled,
    SourceUnavailable,
)
from spiderfs.sources.client import SourceLimits
from spiderfs.sources.local import LocalSource
from spiderfs.sources.source import Source, SourceStat, Version, streamed

TREE = {b"n01/a.jpg": b"first", b"n01/b.jpg": b"second", b"n02/c.cls": b"7", b"link": Link(b"n01")}


@pytest.fixture(scope="module")
def indexers() -> Iterator[Indexers]:
    with patient_indexers() as made:
        yield made


Show = Callable[..., ArchiveSource]


@pytest.fixture
def show(indexers: Indexers, tmp_path: Path) -> Show:
    """Makes a source over another one; all that one test makes have the same indices, as after another mount."""

    def made(inner: Source, longest_bytes: int = 1 << 20, name: str = "0") -> ArchiveSource:
        return ArchiveSource(inner, ["tar", "zip"], tmp_path / "archives" / name, longest_bytes, indexers)

    return made


def read(source: Source, path: bytes) -> bytes:
    found = source.stat(path)
    return source.read(path, 0, found.size, found.version)


def names(source: Source, path: bytes) -> set[bytes]:
    return {name for name, _ in source.scan(path)} - {b"."}


def test_an_archive_is_read_once_and_its_members_with_one_request_each(show: Show) -> None:
    memory = MemorySource()
    memory.add(b"train/s.tar", tar_of(TREE))
    source = show(memory)
    assert names(source, b"train") == {b"s.tar"}
    assert memory.calls["read"] == 0, "no one has entered the archive"
    assert names(source, b"train/s.tar") == {b"n01", b"n02", b"link"}
    assert memory.calls["read"] == 1
    found = source.stat(b"train/s.tar/n01/a.jpg")
    memory.calls.clear()
    assert source.read(b"train/s.tar/n01/a.jpg", 1, 3, found.version) == b"irs"
    assert memory.calls == {"read": 1}
    assert read(source, b"train/s.tar/n02/c.cls") == b"7"
    assert memory.calls == {"read": 1, "stat": 1}, "a label lies in the index"
    again = show(memory)
    memory.calls.clear()
    assert names(again, b"train/s.tar") == {b"n01", b"n02", b"link"}
    assert memory.calls["read"] == 0, "the index was kept"


@pytest.mark.parametrize("tagged", [False, True])
def test_a_replaced_archive_is_another_version_whatever_its_time(show: Show, tagged: bool) -> None:
    memory = MemorySource(tagged)
    memory.add(b"s.tar", tar_of({b"a": b"old", b"b": b"same"}), mtime_ns=10**18)
    source, other = show(memory), show(memory)
    before, listed = source.stat(b"s.tar/a"), source.stat(b"s.tar")
    assert read(other, b"s.tar/a") == b"old"
    memory.add(b"s.tar", tar_of({b"a": b"new", b"b": b"same", b"c": bytes(20_000)}), mtime_ns=10**18)
    with pytest.raises(SourceChanged):
        source.read(b"s.tar/a", 0, 3, before.version)
    after = source.stat(b"s.tar/a")
    assert after.version != before.version
    assert source.read(b"s.tar/a", 0, 3, after.version) == b"new"
    assert other.read(b"s.tar/a", 0, 3, after.version) == b"new", "another process has read the new index"
    assert source.stat(b"s.tar").mtime_ns != listed.mtime_ns or tagged, "so that its names are listed again"
    memory.remove(b"s.tar")
    with pytest.raises(SourceNotFound):
        source.read(b"s.tar/a", 0, 3, after.version)


def test_an_archive_that_has_just_changed_is_shown_when_it_has_settled(show: Show) -> None:
    memory = MemorySource()
    memory.add(b"s.tar", tar_of(TREE), mtime_ns=time.time_ns())
    source = show(memory)
    assert names(source, b"") == {b"s.tar"}
    with pytest.raises(SourceThrottled, match="just changed"):
        source.stat(b"s.tar/n01")
    with pytest.raises(SourceThrottled, match="just changed"):
        list(source.scan(b"s.tar"))


def test_a_damaged_archive_fails_with_one_line(show: Show, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    memory = MemorySource()
    memory.add(b"s.tar", tar_of(TREE)[:3000])
    for source in (show(memory), show(memory)):
        for path in (b"s.tar/n01", b"s.tar/n01/a.jpg", b"s.tar/nothing"):
            with pytest.raises(ArchiveDamaged, match=r"cut short|ends within"):
                source.stat(path)
        with pytest.raises(ArchiveFailed):
            list(source.scan(b"s.tar"))
        assert names(source, b"") == {b"s.tar"}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "s.tar cannot be shown as a directory: it " in caplog.text
    assert memory.calls["read"] == 1
    source.indices.forget_failures()
    with pytest.raises(ArchiveFailed):
        show(memory).stat(b"s.tar/n01")
    assert memory.calls["read"] == 2, "after the next mount it is looked at again"
    memory.add(b"s.tar", tar_of(TREE))
    assert read(show(memory), b"s.tar/n01/a.jpg") == b"first"


def test_what_is_left_out_is_counted_in_the_log(show: Show, caplog: pytest.LogCaptureFixture) -> None:
    memory = MemorySource()
    memory.add(b"s.tar", tar_of({b"../a": b"", b"/b": b"", b"c": b""}))
    assert names(show(memory), b"s.tar") == {b"c"}
    assert [record.getMessage() for record in caplog.records] == [
        "s.tar: 2 members are not shown, such as devices or names that lead out of it"
    ]


def test_only_regular_files_of_that_name_are_archives(show: Show) -> None:
    memory = MemorySource()
    memory.add(b"d.tar/s.tar", tar_of(TREE))
    memory.add(b"d.tar/file.tar.gz", b"packed")
    memory.add_symlink(b"link.tar", b"d.tar/s.tar")
    source = show(memory)
    assert names(source, b"d.tar") == {b"s.tar", b"file.tar.gz"}
    assert read(source, b"d.tar/s.tar/n01/a.jpg") == b"first"
    assert read(source, b"d.tar/file.tar.gz") == b"packed"
    assert source.readlink(b"link.tar") == b"d.tar/s.tar"
    with pytest.raises(SourceNotADirectory):
        source.stat(b"d.tar/s.tar/n01/a.jpg/below")
    with pytest.raises(SourceChanged):
        source.read(b"d.tar/s.tar", 0, 1, Version(1, 1))
    assert source.listxattr(b"d.tar/s.tar/n01") == []
    assert source.getxattr(b"d.tar/s.tar/n01", "user.label") is None
    with pytest.raises(SourceNotFound):
        source.listxattr(b"d.tar/s.tar/none")


def test_who_may_read_the_archive_may_read_its_members(show: Show, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    path = tmp_path / "root" / "s.zip"
    path.write_bytes(zip_of({b"tool": b"#!"}))
    path.chmod(0o640)
    os.utime(path, (10**9, 10**9))
    source = show(LocalSource(str(tmp_path / "root")))
    assert [source.stat(each).mode & 0o7777 for each in (b"s.zip", b"s.zip/tool")] == [0o550, 0o550]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_of_a_zip_are_one_request(show: Show, method: int) -> None:
    memory = MemorySource()
    content = b"0123456789" * 1000
    memory.add(b"s.zip", zip_of({b"d/a": content, b"link": Link(b"d/a")}, method))
    source = show(memory)
    found = source.stat(b"s.zip/d/a")
    memory.calls.clear()
    assert source.read(b"s.zip/d/a", 0, found.size, found.version) == content
    assert memory.calls["read"] == 1
    assert [source.read(b"s.zip/d/a", at, 15, found.version) for at in (5, 9990)] == [content[5:20], content[-10:]]
    assert memory.calls["read"] == (4 if method == zipfile.ZIP_STORED else 3), "the header of a stored one is read once"
    assert source.readlink(b"s.zip/link") == b"d/a"


def test_a_packed_member_is_unpacked_only_up_to_a_limit(show: Show) -> None:
    memory = MemorySource()
    memory.add(b"s.zip", zip_of({b"bomb": bytes(300_000)}, zipfile.ZIP_DEFLATED))
    source = show(memory, longest_bytes=200_000)
    with pytest.raises(ArchiveFailed, match=r"s.zip/bomb: .*sample_max_bytes"):
        read(source, b"s.zip/bomb")
    assert len(read(show(memory, longest_bytes=300_000), b"s.zip/bomb")) == 300_000


def test_a_member_with_wrong_bytes_is_an_error(show: Show) -> None:
    memory = MemorySource()
    memory.add(b"s.zip", zip_of({b"a": b"right" * 10}).replace(b"right", b"wrong", 1))
    with pytest.raises(ArchiveFailed, match=r"s.zip/a: it differs from its archive's directory"):
        read(show(memory), b"s.zip/a")


def test_a_tar_that_was_replaced_and_has_the_same_size_and_time_gives_no_bytes_of_other_members(show: Show) -> None:
    memory = MemorySource()
    first, second = b"1" * 700, b"2" * 700
    memory.add(b"s.tar", tar_of({b"a": first, b"b": second}), mtime_ns=10**18)
    assert read(show(memory), b"s.tar/a") == first
    memory.add(b"s.tar", tar_of({b"b": second, b"a": first}), mtime_ns=10**18)
    again = show(memory)
    for name in (b"s.tar/a", b"s.tar/b"):
        with pytest.raises(ArchiveFailed, match="other bytes than when its members were looked for"):
            read(again, name)


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_piece_is_never_that_of_another_member(show: Show, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    made = {"tar": tar_of, "zip": zip_of}[kind]
    path = f"s.{kind}/a".encode()
    memory = MemorySource()
    first, second = b"1" * 300_000, b"2" * 300_000
    memory.add(b"s." + kind.encode(), made({b"a": first, b"b": second}), mtime_ns=10**18)
    source = show(memory)
    found = source.stat(path)
    memory.calls.clear()
    assert source.read(path, 200_000, 10, found.version) == b"1" * 10
    assert memory.calls["read"] == 2, "its header was looked at first"
    assert source.read(path, 250_000, 10, found.version) == b"1" * 10
    assert memory.calls["read"] == 3, "and is trusted for a while"
    memory.add(b"s." + kind.encode(), made({b"b": second, b"a": first}), mtime_ns=10**18)
    monkeypatch.setattr("spiderfs.archives.source._TRUSTED_S", 0.0)
    for asked in (source, show(memory)):
        with pytest.raises(ArchiveFailed, match=r"s\.(tar|zip)/a: "):
            asked.read(path, 200_000, 10, found.version)


def test_who_reads_a_large_member_from_its_beginning_looks_at_its_header_once(show: Show) -> None:
    memory = MemorySource()
    content = os.urandom(400_000)
    memory.add(b"s.tar", tar_of({b"a": content}))
    source = show(memory)
    found = source.stat(b"s.tar/a")
    memory.calls.clear()
    pieces = [source.read(b"s.tar/a", at, 100_000, found.version) for at in range(0, 400_000, 100_000)]
    assert b"".join(pieces) == content
    assert memory.calls["read"] == 4


class Streaming(MemorySource):
    def stream(self, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
        for at in range(offset, offset + length, 100_000):
            yield self.read(path, at, min(100_000, offset + length - at), version)


@pytest.mark.parametrize("made", [tar_of, zip_of])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_part_of_a_member_comes_piece_by_piece(show: Show, made: Callable[..., bytes], depth: int) -> None:
    memory, content = Streaming(), os.urandom(400_000)
    inner, path = made({b"a": content}), b"s.%s/a" % made.__name__[:3].encode()
    if depth == 2:
        inner, path = tar_of({path[:-2]: inner}), b"t.tar/" + path
    memory.add(path.partition(b"/")[0], inner)
    source: Source = memory
    for name in range(depth):
        source = show(source, name=str(name))
    found = source.stat(path)
    pieces = list(streamed(source, path, 150_000, 220_000, found.version))
    assert b"".join(pieces) == content[150_000:370_000]
    assert [len(piece) for piece in pieces] == [100_000, 100_000, 20_000]
    assert b"".join(streamed(source, path, 380_000, 100_000, found.version)) == content[380_000:]
    assert b"".join(streamed(source, path, 0, 100_000, found.version)) == content[:100_000]
    with pytest.raises(SourceChanged):
        b"".join(streamed(source, path, 150_000, 10, found.version._replace(tag=1)))


def test_indices_of_archives_that_are_gone_are_deleted(show: Show, tmp_path: Path) -> None:
    memory = MemorySource()
    memory.add(b"set/gone.tar", tar_of(TREE))
    memory.add(b"set/kept.tar", tar_of(TREE))
    source = show(memory)
    for name in (b"gone", b"kept"):
        assert names(source, b"set/" + name + b".tar") == {b"n01", b"n02", b"link"}
    directory = tmp_path / "archives" / "0"
    (directory / "other.index").write_bytes(b"spidera2 of an earlier version")
    assert len(list(directory.glob("*.index"))) == 3
    memory.remove(b"set/gone.tar")
    trio.run(forget_gone, source)
    assert len(list(directory.glob("*.index"))) == 1
    again = show(memory)
    memory.calls.clear()
    assert names(again, b"set/kept.tar") == {b"n01", b"n02", b"link"}
    assert memory.calls["read"] == 0


class Away(MemorySource):
    """A source that does not answer questions about names."""

    def stat(self, path: bytes) -> SourceStat:
        raise SourceUnavailable("away")


def test_no_index_is_deleted_while_the_source_is_away(show: Show, tmp_path: Path) -> None:
    memory = MemorySource()
    memory.add(b"s.tar", tar_of(TREE))
    show(memory).stat(b"s.tar/n01")
    trio.run(forget_gone, show(Away()))
    assert len(list((tmp_path / "archives" / "0").glob("*.index"))) == 1


class Gate(MemorySource):
    """A source whose reads wait until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        assert self.gate.wait(30)
        return super().read(path, offset, length, version)


def test_who_waits_for_an_index_is_told_to_ask_again(tmp_path: Path) -> None:
    inner = Gate()
    inner.add(b"s.tar", tar_of(TREE))
    with contextlib.closing(Indexers(SourceLimits(timeout_s=0.04, max_concurrent=1))) as indexers:
        source = ArchiveSource(inner, ["tar"], tmp_path, 1 << 20, indexers)
        for _ in range(2):
            with pytest.raises(SourceThrottled, match="being looked for"):
                source.stat(b"s.tar/n01")
        inner.gate.set()
        deadline = time.monotonic() + 30
        found: SourceStat | None = None
        while found is None and time.monotonic() < deadline:
            with contextlib.suppress(SourceThrottled):
                found = source.stat(b"s.tar/n01")
        assert found is not None
        assert inner.calls["read"] == 1, "one reads for all"


class Changing(MemorySource):
    """A source whose `stat` lags behind until it is told to catch up, and whose next reads may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.known: SourceStat | None = None
        self.failures: list[SourceUnavailable] = []

    def stat(self, path: bytes) -> SourceStat:
        return self.known or super().stat(path)

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        if self.failures:
            raise self.failures.pop()
        return super().read(path, offset, length, version)


def test_who_asks_for_an_archive_that_changes_while_it_is_read_is_told_to_ask_again(show: Show) -> None:
    inner = Changing()
    inner.known = inner.add(b"s.tar", tar_of(TREE))
    inner.add(b"s.tar", tar_of({b"other": b"x" * 9000}))
    source = show(inner)
    with pytest.raises(SourceThrottled, match="changes while it is read"):
        source.stat(b"s.tar/n01")
    inner.known = None
    assert names(source, b"s.tar") == {b"other"}


@pytest.mark.parametrize("tagged", [False, True])
def test_a_link_has_the_version_of_its_archive(show: Show, tagged: bool) -> None:
    inner = MemorySource(tagged)
    found = []
    for blocks, text in ((1, b"n01"), (30, b"n02")):
        inner.add(b"s.tar", tar_of({b"link": Link(text), b"more": bytes(512 * blocks)}), mtime_ns=10**18)
        source = show(inner)
        assert source.readlink(b"s.tar/link") == text
        found.append(source.stat(b"s.tar/link").version)
    assert found[0] != found[1], "by the time alone they would be the same"


def test_a_source_that_does_not_answer_says_nothing_of_the_archive(show: Show) -> None:
    inner = Changing()
    inner.add(b"s.tar", tar_of(TREE))
    inner.failures = [SourceUnavailable("away")] * 4
    source = show(inner)
    with pytest.raises(SourceUnavailable, match="away"):
        source.stat(b"s.tar/n01")
    assert read(source, b"s.tar/n01/a.jpg") == b"first"


def test_a_read_that_fails_now_and_then_is_repeated_alone(show: Show) -> None:
    inner = Changing()
    inner.add(b"s.tar", tar_of(TREE))
    inner.failures = [*[SourceThrottled("busy")] * 2, *[SourceUnavailable("a moment")] * 3]
    assert names(show(inner), b"s.tar") == {b"n01", b"n02", b"link"}


def test_a_process_that_dies_is_an_answer_that_did_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemorySource()
    memory.add(b"s.tar", tar_of(TREE))
    real = subprocess.Popen

    def dying(command: list[str], **pipes: object) -> subprocess.Popen[bytes]:
        return real(["false"], **pipes)  # type: ignore[call-overload, no-any-return]

    with patient_indexers() as indexers:
        source = ArchiveSource(memory, ["tar"], tmp_path, 1 << 20, indexers)
        monkeypatch.setattr(indexer_process.subprocess, "Popen", dying)
        with pytest.raises(SourceUnavailable, match="died"):
            source.stat(b"s.tar/n01")
        monkeypatch.setattr(indexer_process.subprocess, "Popen", real)
        assert read(source, b"s.tar/n01/a.jpg") == b"first"


def test_a_process_that_cannot_be_started_is_not_taken_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemorySource()
    memory.add(b"s.tar", tar_of(TREE))

    def refused(command: list[str], **pipes: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with patient_indexers() as indexers:
        source = ArchiveSource(memory, ["tar"], tmp_path, 1 << 20, indexers)
        with monkeypatch.context() as patch:
            patch.setattr(indexer_process.subprocess, "Popen", refused)
            with pytest.raises(SourceUnavailable, match="no process can be started"):
                source.stat(b"s.tar/n01")
        assert read(source, b"s.tar/n01/a.jpg") == b"first"


def test_a_process_that_has_work_when_all_is_over_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, started, real = Gate(), [], subprocess.Popen
    inner.add(b"s.tar", tar_of(TREE))

    def noted(command: list[str], **pipes: object) -> subprocess.Popen[bytes]:
        started.append(real(command, **pipes))  # type: ignore[call-overload]
        return started[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(indexer_process.subprocess, "Popen", noted)
    with contextlib.closing(Indexers(SourceLimits(timeout_s=0.04, max_concurrent=1))) as indexers:
        source = ArchiveSource(inner, ["tar"], tmp_path, 1 << 20, indexers)
        with pytest.raises(SourceThrottled, match="being looked for"):
            source.stat(b"s.tar/n01")
        eventually(lambda: started)
    inner.gate.set()
    eventually(lambda: started[0].returncode is not None)


def test_an_index_has_as_many_attempts_as_any_read(tmp_path: Path) -> None:
    for attempts, shown in ((2, False), (3, True)):
        inner = Changing()
        inner.add(b"s.tar", tar_of(TREE))
        inner.failures = [SourceUnavailable("away"), SourceUnavailable("away")]
        with contextlib.closing(Indexers(SourceLimits(attempts=attempts, backoff_s=0.001))) as indexers:
            indexers.moment_s = 30.0
            source = ArchiveSource(inner, ["tar"], tmp_path / str(attempts), 1 << 20, indexers)
            with contextlib.nullcontext() if shown else pytest.raises(SourceUnavailable, match="away"):
                assert names(source, b"s.tar/n01")


@pytest.fixture
def no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for indices where nothing can be written, until it is removed; it is tried again at once."""
    monkeypatch.setattr("spiderfs.archives.source._SAVE_EVERY_S", 0.0)
    (tmp_path / "archives").touch()
    return tmp_path / "archives"


def test_an_index_without_a_disk_is_kept_in_memory(show: Show, no_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = MemorySource()
    memory.add(b"s.tar", tar_of(TREE))
    memory.add(b"t.tar", tar_of(TREE)[:3000])
    source = show(memory)
    assert names(source, b"s.tar") == {b"n01", b"n02", b"link"}
    found = source.stat(b"s.tar/n01/a.jpg")
    memory.calls.clear()
    assert source.read(b"s.tar/n01/a.jpg", 1, 3, found.version) == b"irs"
    assert source.neighbourhood(b"s.tar/n01/a.jpg", found.version) is not None
    assert memory.calls == {"read": 1}, "the index is at hand"
    for _ in range(2):
        with pytest.raises(ArchiveDamaged, match=r"cut short|ends within"):
            source.stat(b"t.tar/n01")
    no_disk.unlink()
    kinds = {".index", ".failed"}
    eventually(
        lambda: source.stat(b"s.tar/n01") and {path.suffix for path in no_disk.rglob("*.*")} == kinds,
        what="both are written",
    )
    again = show(memory)
    memory.calls.clear()
    assert read(again, b"s.tar/n01/a.jpg") == read(source, b"s.tar/n01/a.jpg") == b"first"
    with pytest.raises(ArchiveDamaged):
        again.stat(b"t.tar/n01")
    assert memory.calls["read"] == 2, "those of the members"
    said = [record.getMessage() for record in caplog.records if "the disk of the cache" in record.getMessage()]
    assert said == [
        "the disk of the cache takes no indices of archives, so they are kept in memory",
        "the disk of the cache takes indices of archives again",
    ]


def test_indices_in_memory_are_bounded(show: Show, no_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who enters more archives than have room has older ones read again."""
    memory = MemorySource()
    for number in range(4):
        memory.add(b"%d.tar" % number, tar_of(TREE))
    source = show(memory)
    index = source.indices.of(b"0.tar", source.inner.stat(b"0.tar").version)
    monkeypatch.setattr("spiderfs.archives.source.MOST_SPARE_BYTES", 3 * len(index.spare))
    for number in range(4):
        assert read(source, b"%d.tar/n01/a.jpg" % number) == b"first"
    memory.calls.clear()
    for number in (3, 2, 1):
        assert read(source, b"%d.tar/n01/a.jpg" % number) == b"first"
    assert memory.calls["read"] == 3
    assert read(source, b"0.tar/n01/a.jpg") == b"first"
    assert memory.calls["read"] == 5, "its index was made again"


def test_an_index_that_neither_disk_nor_memory_takes_is_an_error_until_one_does(
    no_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemorySource()
    memory.add(b"s.tar", tar_of(TREE))
    real, small = (
        subprocess.Popen,
        "from spiderfs.archives import indexer_process as p; p.MOST_SPARE_BYTES = 99; p.main()",
    )

    def forgetful(command: list[str], **pipes: object) -> subprocess.Popen[bytes]:
        return real([command[0], "-c", small], **pipes)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(indexer_process.subprocess, "Popen", forgetful)
    with patient_indexers() as indexers:
        source = ArchiveSource(memory, ["tar"], no_disk, 1 << 20, indexers)
        with pytest.raises(ArchiveFailed, match=r"s\.tar: its index cannot be written .*: free the cache's disk"):
            source.stat(b"s.tar/n01")
        no_disk.unlink()
        assert read(source, b"s.tar/n01/a.jpg") == b"first"


def test_a_damaged_index_is_made_again(show: Show, tmp_path: Path) -> None:
    memory = MemorySource()
    memory.add(b"s.tar", tar_of(TREE))
    assert read(show(memory), b"s.tar/n01/a.jpg") == b"first"
    (index,) = (tmp_path / "archives").rglob("*.index")
    index.write_bytes(index.read_bytes()[:-1] + b"?")
    assert read(show(memory), b"s.tar/n01/a.jpg") == b"first"
    index.unlink()
    assert read(show(memory), b"s.tar/n01/b.jpg") == b"second"


def test_open_indices_leave_descriptors_over(
    indexers: Indexers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a map, and holds a descriptor: a process often may have 1,024."""
    memory = MemorySource()
    names_of_archives = [b"%02d.tar" % number for number in range(40)]
    for name in names_of_archives:
        memory.add(name, tar_of({b"a": name}))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (128, 4096))
    source = ArchiveSource(memory, ["tar"], tmp_path, 1 << 20, indexers)
    held = len(os.listdir("/proc/self/fd"))
    assert [read(source, name + b"/a") for name in names_of_archives * 2] == names_of_archives * 2
    assert len(os.listdir("/proc/self/fd")) < held + 128 // 4
