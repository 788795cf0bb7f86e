"""Packages as files at the source: each is there as a whole or not at all, and no mount shows them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from spiderfs import packages
from spiderfs.packages import DIRECTORY, SUFFIX, PackageDirectory, package_key
from spiderfs.sources.local import LocalSource


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


def test_a_crash_before_the_rename_leaves_none(
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
    # It may still be someone's.
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
    remote = tmp_path / "remote"
    remote.mkdir()
    (tmp_path / os.fsdecode(DIRECTORY)).symlink_to(remote)
    with pytest.raises(OSError, match="Not a directory"):
        PackageDirectory(root.root_fd, tmp_path / "key").write(b"one.package", b"bytes")
    assert list(remote.iterdir()) == []


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
