"""What other users of the machine get of a mount, and cannot do to it; the page of security names these tests."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from mounting import Mounted, ending, eventually, mounted, options_text, run_spiderfs
from ordinary_user import UID, let_everybody_in

from benchmarks.fakes.faulty_source import GONE
from spiderfs import client

SIZE = 3000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(bytes(SIZE))
    (source / "large").write_bytes(os.urandom(9 << 20))
    return source


def open_places(cache: Path) -> list[str]:
    """What in a cache directory has a mode that says anything to others; sockets and FIFOs too."""
    places = (cache, *cache.rglob("*"))
    return [f"{place}: {place.lstat().st_mode:o}" for place in places if place.lstat().st_mode & 0o077]


def use(mount: Mounted) -> None:
    """Have every kind of file made that a mount makes in its cache directory."""
    for name in ("file", "large"):
        (mount.point / name).read_bytes()
    client.read_bytes(mount.point / "file")
    with open(mount.control("log"), "rb") as log:
        log.read()
        os.listdir(mount.point)
        with open(mount.control("stats.json"), "rb"):
            assert open_places(mount.cache) == []


def test_nothing_in_the_cache_is_open_to_others_whatever_the_umask(source: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        with mounted(source, tmp_path / "m", trace=tmp_path / "trace") as mount:
            use(mount)
        assert open_places(mount.cache) == []
        assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o600
        assert stat.S_IMODE(mount.log.stat().st_mode) == 0o600
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("immutable", ["on", "off"])
def test_modes_say_that_nothing_can_be_written(source: Path, tmp_path: Path, immutable: str) -> None:
    """Programs ask access(2) whether they may write beside the data; root, who may override modes, is told yes."""
    (source / "labels").mkdir()
    for place in (source, source / "labels", source / "file"):
        place.chmod(0o777)
    let_everybody_in(tmp_path)
    with mounted(source, tmp_path / "m", allow_other="on", immutable=immutable) as mount:
        let_everybody_in(mount.point.parent)
        for name in (".", "labels", "file"):
            assert _test_of_another_user("-r", mount.point / name)
            assert not _test_of_another_user("-w", mount.point / name)
        mount.control("config").write_text("policy=lru\n")


def _test_of_another_user(question: str, path: Path) -> bool:
    """What test(1) answers another user."""
    asked = ["test", question, path]
    return subprocess.run(asked, user=UID, group=UID, extra_groups=[], check=False, timeout=60).returncode == 0


def test_a_cache_of_an_earlier_version_is_closed_and_kept(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m") as mount:
        (mount.point / "file").read_bytes()
    for place in (mount.cache, *mount.cache.rglob("*")):
        place.chmod(0o755 if place.is_dir() else 0o644)
    with mounted(source, tmp_path / "m", **{GONE: "on"}) as mount:
        assert (mount.point / "file").read_bytes() == bytes(SIZE)
        assert open_places(mount.cache) == []


def test_a_cache_directory_that_is_a_link_is_one_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with ending(tmp_path, tmp_path / "mnt", tmp_path / "real"):
        done = run_spiderfs("mount", source, tmp_path / "mnt", "-o", options_text({"cache_dir": tmp_path / "link"}))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"symbolic link: name the directory that it leads to (-o cache_dir={tmp_path}/real)" in done.stderr


def test_a_link_on_the_way_is_followed_once(source: Path, tmp_path: Path) -> None:
    """Who may turn it somewhere else while the mount lasts does not turn the mount somewhere else."""
    for name in ("real", "other"):
        (tmp_path / name).mkdir(mode=0o755)
    way = tmp_path / "way"
    way.symlink_to("real")
    with mounted(source, tmp_path / "m", cache=way / "cache") as mount:
        way.unlink()
        way.symlink_to("other")
        os.kill(mount.manager(), signal.SIGKILL)
        eventually(lambda: mount.metric("manager_restarts") == 1, what="another manager")
        assert (mount.point / "file").read_bytes() == bytes(SIZE)
        assert os.listdir(tmp_path / "other") == []
        mount.expect("the manager ended")
        mount.cache = tmp_path / "real/cache"
