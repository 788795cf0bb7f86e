"""Packages as files: what is in them comes out again or not at all, and nothing of them is seen in a mount."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiderfs.errors import SourceNotFound, StoreDamaged
from spiderfs.packages import format as packages
from spiderfs.packages.format import (
    DIRECTORY,
    HEADER_BYTES,
    SUFFIX,
    PackageDirectory,
    WithoutPackages,
    index_bytes,
    pack,
    package_key,
    read_index,
)
from spiderfs.sources.local import LocalSource
from spiderfs.sources.source import Version

FILES = st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.binary(max_size=50)), max_size=8)


KEY = bytes(range(32))


def packed(*files: tuple[bytes, bytes], key: bytes = KEY) -> bytes:
    _, package = pack([(path, Version(len(payload), 7), payload) for path, payload in files], key)
    return package


@given(FILES)
def test_what_is_packed_comes_out(files: list[tuple[bytes, bytes]]) -> None:
    package = packed(*files)
    index = read_index(package, len(package), KEY)
    assert [(file.path, index.payload(file, package)) for file in index.files] == files
    # The index can be read without the rest.
    head = package[: HEADER_BYTES + index_bytes(package)]
    assert read_index(head, len(package), KEY) == index


@given(st.data())
def test_a_changed_byte_is_noticed(data: st.DataObject) -> None:
    files = [(b"a", b"one"), (b"b/c", b"four")]
    package = bytearray(packed(*files))
    place = data.draw(st.integers(0, len(package) - 1))
    package[place] ^= data.draw(st.integers(1, 255))
    try:
        index = read_index(bytes(package), len(package), KEY)
    except StoreDamaged:
        return
    found = [(file.path, index.payload(file, bytes(package))) for file in index.files]
    assert place >= HEADER_BYTES + index_bytes(bytes(package)), "header and index are sealed"
    assert None in [payload for _, payload in found]


@given(FILES)
def test_one_of_another_key_is_not_believed(files: list[tuple[bytes, bytes]]) -> None:
    package = packed(*files, key=bytes(32))
    with pytest.raises(StoreDamaged):
        read_index(package, len(package), KEY)


def test_bytes_of_another_package_of_ours_are_not_taken_for_a_files() -> None:
    one, other = packed((b"a", b"one")), packed((b"a", b"two"))
    index = read_index(one, len(one), KEY)
    assert index.payload(index.files[0], one[:-3] + other[-3:]) is None


def test_the_key_is_made_once_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "packages.key"
    before = os.umask(0)
    try:
        key = package_key(path)
    finally:
        os.umask(before)
    assert (len(key), stat.S_IMODE(path.stat().st_mode)) == (32, 0o600)
    assert package_key(path) == key
    path.write_bytes(key[:5])
    other = package_key(path)
    assert len(other) == 32
    assert other != key
    assert package_key(path) == other


@pytest.mark.parametrize("length", [0, 5, HEADER_BYTES, HEADER_BYTES + 3, -1])
def test_one_that_is_cut_short_is_damaged(length: int) -> None:
    package = packed((b"a", b"one"))[:length]
    with pytest.raises(StoreDamaged):
        read_index(package, len(package), KEY)


def test_a_claimed_length_is_not_believed() -> None:
    header = bytearray(packed((b"a", b"one"))[:HEADER_BYTES])
    header[16:20] = b"\xff\xff\xff\xff"
    with pytest.raises(StoreDamaged, match="no header"):
        index_bytes(bytes(header))


@pytest.mark.parametrize("index", [b"\xc1", msgpack.packb(7), msgpack.packb([7]), msgpack.packb([[b"a", "x", 1, 1]])])
def test_an_index_that_makes_no_sense_is_damaged(index: bytes) -> None:
    header = struct.pack("<8sIIII16s", b"SPIDERPK", 2, 1, len(index), 0, b"")
    seal = hashlib.blake2b(header + index, key=KEY, person=b"spiderfs head", digest_size=16).digest()
    package = header[:-16] + seal + index
    with pytest.raises(StoreDamaged, match="no sense"):
        read_index(package, len(package), KEY)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[LocalSource]:
    source = LocalSource(os.fspath(tmp_path))
    yield source
    source.close()


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / os.fsdecode(DIRECTORY)).iterdir())


def test_is_written_whole_and_removed(root: LocalSource, tmp_path: Path) -> None:
    directory = PackageDirectory(root.root_fd, tmp_path / "key")
    directory.remove(b"nothing.package")
    assert directory.clean() == 0
    directory.write(b"one.package", b"bytes")
    directory.write(b"one.package", b"others")
    assert names(tmp_path) == ["one.package"]
    place = tmp_path / os.fsdecode(DIRECTORY)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (place, place / "one.package")] == [0o700, 0o600]
    path = DIRECTORY + b"/one.package"
    assert root.read(path, 0, 6, root.stat(path).version) == b"others"
    directory.remove(b"one.package")
    assert names(tmp_path) == []


def test_a_crash_between_write_and_rename_leaves_no_package(
    root: LocalSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = PackageDirectory(root.root_fd, tmp_path / "key")

    class Killed(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(packages.os, "rename", killed)
        with pytest.raises(Killed):
            directory.write(b"one.package", b"bytes")
    (left,) = names(tmp_path)
    assert not left.endswith(os.fsdecode(SUFFIX)) or left.startswith(".new-")
    # It may still be somebody's.
    assert directory.clean() == 0
    os.utime(tmp_path / os.fsdecode(DIRECTORY) / left, (0, 0))
    directory.write(b"two.package", b"bytes")
    assert directory.clean() == 1
    assert names(tmp_path) == ["two.package"]


def test_a_failed_write_leaves_nothing(root: LocalSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packages.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        PackageDirectory(root.root_fd, tmp_path / "key").write(b"one.package", b"bytes")
    assert names(tmp_path) == []


def test_a_link_in_its_place_is_not_followed(root: LocalSource, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / os.fsdecode(DIRECTORY)).symlink_to(elsewhere)
    with pytest.raises(OSError, match="Not a directory"):
        PackageDirectory(root.root_fd, tmp_path / "key").write(b"one.package", b"bytes")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o1777])
def test_a_directory_that_others_may_write_to_is_not_used(root: LocalSource, tmp_path: Path, mode: int) -> None:
    directory = tmp_path / os.fsdecode(DIRECTORY)
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(PermissionError, match="another user's"):
        PackageDirectory(root.root_fd, tmp_path / "key").write(b"one.package", b"bytes")
    with pytest.raises(PermissionError, match="another user's"):
        PackageDirectory(root.root_fd, tmp_path / "key").clean()
    assert list(directory.iterdir()) == []


def test_a_mount_shows_nothing_of_it(root: LocalSource, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / os.fsdecode(DIRECTORY)).touch()
    PackageDirectory(root.root_fd, tmp_path / "key").write(b"one.package", b"bytes")
    shown = WithoutPackages(root)
    assert [name for name, _ in shown.scan(b"")] == [b"below"]
    assert [name for name, _ in shown.scan(b"below")] == [DIRECTORY], "another's file of that name"
    with pytest.raises(SourceNotFound):
        shown.stat(DIRECTORY)
    assert stat.S_ISDIR(shown.stat(b"").mode)
