"""The mount table and what is done with it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from spiderfs.errors import MountError
from spiderfs.linux import mounts

SAMPLE = (
    rb"""22 27 0:21 / /proc rw,relatime shared:5 - proc proc rw
90 27 8:1 / / rw,relatime shared:1 master:2 - ext4 /dev/sda1 rw
101 27 0:50 / /mnt/image\040net ro,nosuid,nodev - fuse.spiderfs /nfs/image\040net ro,user_id=0,group_id=0,allow_other
102 27 0:51 / /mnt/tab\011new\012line\134end ro - fuse.spiderfs nas:/export\043x ro
103 27 0:52 / /mnt/caf"""
    + b"\xe9"
    + rb""" ro - fuse.sshfs host: rw
104 27 0:53 / /mnt/covered ro - fuse.spiderfs /nfs/a ro
105 104 0:54 / /mnt/covered rw - tmpfs tmpfs rw
broken line
"""
)


@pytest.fixture
def sample_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_bytes(SAMPLE)
    monkeypatch.setattr(mounts, "MOUNT_TABLE", table)


def test_escapes_and_odd_names_are_read() -> None:
    table = mounts.parse_mount_table(SAMPLE)
    assert len(table) == 7
    assert table[2][:3] == ("/nfs/image net", Path("/mnt/image net"), "fuse.spiderfs")
    assert table[3][:3] == ("nas:/export#x", Path("/mnt/tab\tnew\nline\\end"), "fuse.spiderfs")
    assert os.fsencode(table[4].mountpoint) == b"/mnt/caf\xe9"


@pytest.mark.usefixtures("sample_table")
def test_only_the_topmost_mount_counts() -> None:
    found = mounts.mounted_at("/mnt/image net")
    assert found is not None
    assert found.source == "/nfs/image net"
    assert mounts.mounted_at("/mnt/../mnt/image net/") == found
    assert mounts.mounted_at("/mnt/covered") is None
    assert mounts.mounted_at("/mnt") is None
    assert len(mounts.spiderfs_mounts()) == 3


def test_a_path_is_resolved_without_its_last_step(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "far").symlink_to(tmp_path / "link")
    (tmp_path / "up").symlink_to("real/..")
    (tmp_path / "loop").symlink_to("loop")
    assert mounts.canonical(tmp_path / "far") == tmp_path / "real"
    assert mounts.canonical(tmp_path / "up") == tmp_path
    assert mounts.canonical(tmp_path / "link" / "missing") == tmp_path / "real" / "missing"
    assert mounts.canonical(tmp_path / "loop")
    assert mounts.canonical("/") == Path("/")


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory that the mount table calls a spiderfs mount."""
    here = tmp_path / "mnt"
    here.mkdir()
    table = tmp_path / "mountinfo"
    table.write_text(f"101 27 0:50 / {here} ro - fuse.spiderfs /nfs/a ro\n")
    monkeypatch.setattr(mounts, "MOUNT_TABLE", table)
    return here


def test_a_live_mount_is_not_mounted_over(mounted: Path) -> None:
    assert not mounts.is_stale(mounted)
    assert not mounts.clean_stale(mounted)
    with pytest.raises(MountError, match=r"already shows /nfs/a .* 'spiderfs umount"):
        mounts.check_mountable(mounted)


def test_a_dead_mount_is_cleaned(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unmounted = []

    def gone(path: Path, name: str) -> bytes:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    def unmount(path: Path, lazy: bool) -> None:
        unmounted.append((path, lazy))
        mounts.MOUNT_TABLE.write_text("")

    monkeypatch.setattr(mounts.os, "getxattr", gone)
    monkeypatch.setattr(mounts, "unmount", unmount)
    mounts.check_mountable(mounted)
    assert mounts.clean_stale(mounted)
    assert unmounted == [(mounted, True)]


def test_a_hung_mount_hangs_no_one(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(mounts.os, "getxattr", lambda path, name: released.wait(30))
    monkeypatch.setattr(mounts, "PROBE_TIMEOUT_S", 0.01)
    try:
        with pytest.raises(MountError, match="already shows"):
            mounts.check_mountable(mounted)
    finally:
        released.set()


def test_within_hands_on_results_and_errors() -> None:
    assert mounts.within(5, lambda: 7) == 7
    with pytest.raises(KeyError):
        mounts.within(5, lambda: {"here": 7}["missing"])


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (errno.EBUSY, r"fuser -vm .*--lazy"),
        (errno.EINVAL, "nothing is mounted"),
        (errno.EPERM, "as root"),
        (errno.EIO, "cannot unmount"),
    ],
)
@pytest.mark.parametrize("user", [0, 1000])
def test_a_failure_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int, said: str, user: int
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(mounts, "_umount2", lambda path, lazy: failure)
    monkeypatch.setattr(mounts, "_fusermount", lambda path, lazy: failure)
    with pytest.raises(MountError, match=said) as caught:
        mounts.unmount(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_an_unmount_waits_a_moment_for_files_that_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [errno.EBUSY, errno.EBUSY, 0]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(mounts, "_umount2", lambda path, lazy: answers.pop(0))
    mounts.unmount(tmp_path)
    assert answers == []


def test_messages_of_fusermount_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fusermount3"
    script.write_text('#!/bin/sh\necho "fusermount3: failed to unmount $4: Device or resource busy" >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MountError, match="in use"):
        mounts.unmount(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MountError, match="install the package fuse3"):
        mounts.unmount(tmp_path)


def test_a_machine_without_fuse_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "FUSE_DEVICE", tmp_path / "fuse")
    with pytest.raises(MountError, match="modprobe fuse"):
        mounts.check_fuse_available()
    (tmp_path / "fuse").touch()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MountError, match="install the package fuse3"):
        mounts.check_fuse_available()
    (tmp_path / "fusermount3").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mounts, "FUSE_CONF", tmp_path / "fuse.conf")
    with pytest.raises(MountError, match="user_allow_other"):
        mounts.check_fuse_available(allow_other=True)
    (tmp_path / "fuse.conf").write_text("#mount_max = 3\nuser_allow_other # loaders\n")
    mounts.check_fuse_available(allow_other=True)
