"""What only a local directory can do: vanish, be replaced, hold odd files, change under a read."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spiderfs.errors import ConfigError, SourceChanged, SourceDenied, SourceError, SourceNotFound, SourceUnavailable
from spiderfs.sources.local import LocalSource


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/file").write_bytes(b"content")
    return tmp_path / "root"


@pytest.fixture
def source(root: Path) -> Iterator[LocalSource]:
    source = LocalSource(os.fsencode(root))
    yield source
    source.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_root_that_cannot_be_used_says_what_to_do(tmp_path: Path, root: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; check the path, or mount it first"):
        LocalSource(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="is not a directory"):
        LocalSource(str(root / "file"))


def test_a_root_without_permission_says_so(root: Path) -> None:
    root.chmod(0)
    code = f"""if True:
        import os
        from spiderfs.errors import ConfigError
        from spiderfs.sources.local import LocalSource
        os.chmod({str(root.parents[1])!r}, 0o755); os.chmod({str(root.parents[0])!r}, 0o755)
        os.chmod({str(root.parents[2])!r}, 0o755)
        if os.getuid() == 0: os.setresuid(65534, 65534, 65534)
        try: LocalSource({str(root)!r})
        except ConfigError as exc: print(exc)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot be read by this user" in result.stdout


def test_a_file_replaced_by_a_fifo_does_not_hold_the_reader(root: Path, source: LocalSource) -> None:
    version = source.stat(b"file").version
    (root / "file").unlink()
    os.mkfifo(root / "file")
    with pytest.raises(SourceChanged):
        source.read(b"file", 0, 7, version)


def test_a_directory_replaced_by_a_link_does_not_lead_out(root: Path, source: LocalSource, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"s")
    (root / "way").symlink_to(tmp_path / "outside")
    for path in (b"way/secret", b"../outside/secret"):
        with pytest.raises(SourceError):
            source.stat(path)


def test_entries_that_vanish_during_a_scan_are_left_out(root: Path, source: LocalSource) -> None:
    for number in range(10):
        (root / f"more{number}").touch()
    scan = source.scan(b"")
    seen = {next(scan)[0]}
    for path in root.iterdir():
        if os.fsencode(path.name) not in seen:
            path.unlink()
    assert list(scan) == []


def test_a_scan_given_up_leaves_no_descriptor_open(root: Path, source: LocalSource) -> None:
    (root / "more").touch()
    before = open_descriptors()
    scan = source.scan(b"")
    next(scan)
    assert open_descriptors() > before
    del scan
    assert open_descriptors() == before


def test_no_call_leaves_a_descriptor_open(root: Path, source: LocalSource) -> None:
    (root / "a/b").mkdir(parents=True)
    before = open_descriptors()
    for path in (b"a/b", b"a/b/missing", b"file/below", b"a/../file"):
        for ask in (source.stat, source.readlink, source.listxattr, lambda path: list(source.scan(path))):
            with contextlib.suppress(SourceError):
                ask(path)
    assert open_descriptors() == before


def test_a_change_during_the_read_is_noticed(root: Path, source: LocalSource, monkeypatch: pytest.MonkeyPatch) -> None:
    version = source.stat(b"file").version
    pread = os.pread

    def pread_then_write(fd: int, length: int, offset: int) -> bytes:
        data = pread(fd, length, offset)
        (root / "file").write_bytes(b"CONTENT")
        return data

    monkeypatch.setattr(os, "pread", pread_then_write)
    with pytest.raises(SourceChanged):
        source.read(b"file", 0, 7, version)


def test_a_file_cut_during_the_read_is_noticed(
    root: Path, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = source.stat(b"file")
    pread = os.pread

    def truncate_then_pread(fd: int, length: int, offset: int) -> bytes:
        os.truncate(root / "file", 3)
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", truncate_then_pread)
    with pytest.raises(SourceChanged, match="shorter"):
        source.read(b"file", 0, 7, found.version)


def test_short_reads_of_the_kernel_are_continued(source: LocalSource, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, min(length, 2), offset))
    assert source.read(b"file", 0, 7, source.stat(b"file").version) == b"content"


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (13, SourceDenied),  # EACCES
        (5, SourceUnavailable),  # EIO
        (24, SourceUnavailable),  # EMFILE
        (110, SourceUnavailable),  # ETIMEDOUT
        (116, SourceUnavailable),  # ESTALE
    ],
)
def test_errnos(source: LocalSource, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "getxattr", fail)
    with pytest.raises(expected):
        source.getxattr(b"file", "user.x")


def test_who_refuses_the_root_too_is_unavailable(source: LocalSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS server says so of everything in an export that it has withdrawn."""

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(os, "getxattr", refuse)
    with pytest.raises(SourceDenied):
        source.getxattr(b"file", "user.x")
    monkeypatch.setattr(os, "statvfs", refuse)
    with pytest.raises(SourceUnavailable):
        source.getxattr(b"file", "user.x")
    with pytest.raises(SourceUnavailable):
        source.statvfs()


def test_a_removed_root_is_unavailable_and_nothing_in_it_is_gone(root: Path, source: LocalSource) -> None:
    shutil.rmtree(root)
    for path in (b"file", b"", b"d/e"):
        with pytest.raises(SourceUnavailable):
            source.stat(path)
    with pytest.raises(SourceUnavailable):
        list(source.scan(b""))


def test_a_root_made_again_is_found_again(root: Path, source: LocalSource) -> None:
    shutil.rmtree(root)
    root.mkdir()
    (root / "new").write_bytes(b"n")
    with pytest.raises(SourceUnavailable):
        source.stat(b"file")
    assert source.stat(b"new").size == 1
    with pytest.raises(SourceNotFound):
        source.stat(b"file")


def test_another_file_system_is_not_the_source(
    root: Path, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(root)
    root.mkdir()
    monkeypatch.setattr(source, "_file_system", "nfs4")
    for _ in range(3):
        with pytest.raises(SourceUnavailable):
            source.stat(b"anything")


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_an_unmounted_source_is_unavailable_until_it_is_mounted_again(tmp_path: Path) -> None:
    def mount() -> None:
        result = subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"cannot mount here: {result.stderr.strip()}")

    mount()
    source = LocalSource(str(tmp_path))
    (tmp_path / "file").touch()
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    # The detached file system lives on while it is held; a server that has gone away with it answers EIO.
    assert source.stat(b"file").size == 0
    with pytest.raises(SourceUnavailable), source._translated(b"file"):
        raise OSError(5, "Input/output error")
    assert source.stat(b"file").size == 0
    mount()
    try:
        with pytest.raises(SourceUnavailable), source._translated(b"file"):
            raise OSError(5, "Input/output error")
        with pytest.raises(SourceNotFound):
            source.stat(b"file")
    finally:
        source.close()
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_path_longer_than_path_max(root: Path, source: LocalSource) -> None:
    name = "d" * 250
    fd = os.open(root, os.O_RDONLY)
    for _ in range(20):
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    assert [name for name, _ in source.scan("/".join([name] * 20).encode())] == [b"."]


def test_a_root_moved_away_still_serves_but_loses_nothing(root: Path, source: LocalSource) -> None:
    root.rename(root.with_name("remote"))
    assert source.stat(b"file").size == 7
    with pytest.raises(SourceUnavailable):
        source.stat(b"missing")
