"""Odd surroundings of a mount: it still mounts and ends, and its messages name what is wrong."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from mounting import SPIDERFS, as_root, ending, eventually, mounted, mounts_at, run_spiderfs, unmount
from reading import source_with

from spiderfs.errors import MountError
from spiderfs.linux import mounts
from spiderfs.shared.layout import IN_USE_FILE, CacheLayout

source = source_with({"file": b"content"})


def test_an_unreachable_systemd_harms_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nowhere"))
    with mounted(source, tmp_path / "m", allowed=["NOTIFY_SOCKET=.*nowhere"]) as mount:
        assert (mount.point / "file").read_bytes() == b"content"
    # The cache was closed, so the next boot finds it clean.
    assert not (CacheLayout(tmp_path / "m/cache").store / IN_USE_FILE).exists()


def test_a_mount_without_standard_descriptors_says_that_it_mounts(source: Path, tmp_path: Path) -> None:
    point, cache = tmp_path / "mnt", tmp_path / "cache"
    point.mkdir()
    with ending(tmp_path, point, cache):
        command = f"{SPIDERFS} mount {source} {point} -o cache_dir={cache},log_file={tmp_path}/daemon.log"
        assert subprocess.run(["sh", "-c", f"exec {command} 0<&- 1>&- 2>&-"], check=False, timeout=60).returncode == 0
        assert (point / "file").read_bytes() == b"content"
        assert run_spiderfs("umount", point).returncode == 0


def test_umount_names_the_other_mount_points_of_a_mount_at_once(source: Path, tmp_path: Path) -> None:
    bound = tmp_path / "bound"
    bound.mkdir()
    with mounted(source, tmp_path / "m") as mount:
        if os.geteuid() != 0:
            pytest.skip("root cannot enter an ordinary user's mount to bind it")
        as_root("mount", "--bind", mount.point, bound)
        try:
            done = run_spiderfs("umount", mount.point)
            assert done.returncode == 1
            assert str(bound) in done.stderr
            assert not mounts_at(mount.point)
        finally:
            unmount(bound)
        eventually(mount.supervisor.ended, what="the end of the daemon")


def test_another_users_mount_is_not_missing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(source, tmp_path / "m") as mount:
        # fusermount3 gives this answer to a user who has not mounted it.
        monkeypatch.setattr("os.geteuid", lambda: 65534)
        monkeypatch.setattr(mounts, "_fusermount", lambda path, lazy: errno.EINVAL)
        with pytest.raises(MountError, match="may not unmount"):
            mounts.unmount(mount.point)
        monkeypatch.undo()


def test_a_mount_outlives_the_directory_of_its_log(source: Path, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "log"
    log.parent.mkdir()
    (source / "damaged.tar").write_bytes(b"no tar")
    with mounted(source, tmp_path / "m", archives="tar", log_file=log) as mount:
        shutil.rmtree(log.parent)
        with pytest.raises(OSError, match="Input/output error"):
            os.listdir(mount.point / "damaged.tar")  # the log would name it
        assert (mount.point / "file").read_bytes() == b"content"
        assert mount.metric("worker_restarts") == 0
