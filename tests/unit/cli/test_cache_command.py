"""`spiderfs cache`: what it finds, and what it refuses to delete."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest
from commands import spiderfs

from spiderfs.cli import cache
from spiderfs.shared.layout import CacheLayout


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user whose caches lie below this directory, on a machine without mounts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "spiderfs_mounts", dict)
    return tmp_path


def make_cache(directory: Path, source: str = "/nfs/a") -> CacheLayout:
    layout = CacheLayout(directory)
    for place in (*layout.environments, layout.run.directory, layout.archives):
        place.mkdir(parents=True)
    (layout.content / "data.mdb").write_bytes(bytes(3 << 20))
    layout.source.write_text(f"{source}\n")
    layout.lock.touch()
    os.utime(layout.lock, (1_600_000_000, 1_600_000_000))
    return layout


def test_it_lists_each_with_source_size_and_use(home: Path) -> None:
    first = make_cache(home / "spiderfs/0a")
    make_cache(home / "spiderfs/0b", "s3://bucket")
    with open(first.lock, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = [line for line in spiderfs("cache", "list").output.splitlines() if str(home) in line]
    assert found == [
        f"{home}/spiderfs/0a: 3.0 MiB of /nfs/a, mounted",
        f"{home}/spiderfs/0b: 3.0 MiB of s3://bucket, last mounted 2020-09-13",
    ]
    (row,) = json.loads(spiderfs("cache", "list", home / "spiderfs/0b", "--json").output)
    assert (row["source"], row["mounted"]) == ("s3://bucket", False)
    assert 3 << 20 <= row["bytes_on_disk"] < 4 << 20


def test_a_cache_on_several_disks_is_listed_with_all_of_them(home: Path, tmp_path: Path) -> None:
    first = make_cache(home / "spiderfs/0a")
    other = CacheLayout(tmp_path / "nvme1")
    (other.content / "blocks").mkdir(parents=True)
    other.source.write_text("/nfs/a\n")
    other.lock.touch()
    table = {"store": "ab", "disks": {"1": str(other.content), "2": str(tmp_path / "gone/store/content")}}
    (first.store / "disks").write_text(json.dumps(table))
    result = spiderfs("cache", "list")
    assert f"{first.cache}: 3.0 MiB of /nfs/a" in result.stdout
    assert f"{other.cache}: " in result.stdout
    assert f"{tmp_path}/gone cannot be used" in result.stderr
    assert spiderfs("cache", "remove", other.cache).exit_code == 0
    assert not other.cache.exists()


def test_what_is_no_cache_hides_no_other(home: Path) -> None:
    make_cache(home / "spiderfs/0a")
    (make_cache(home / "spiderfs/0b").cache / "notes.txt").touch()
    result = spiderfs("cache", "list")
    assert f"{home}/spiderfs/0a: 3.0 MiB" in result.stdout
    assert f"warning: {home}/spiderfs/0b is no cache directory" in result.stderr


def test_it_removes_a_cache_and_nothing_beside_it(home: Path) -> None:
    layout, beside = make_cache(home / "spiderfs/0a"), make_cache(home / "spiderfs/0b")
    result = spiderfs("cache", "remove", layout.cache)
    assert (result.exit_code, result.output) == (0, f"removed {layout.cache}: 3.0 MiB\n")
    assert not layout.cache.exists()
    assert beside.lock.exists()


def test_it_removes_nothing_that_is_in_use_or_no_cache(home: Path) -> None:
    layout = make_cache(home / "spiderfs/0a")
    with open(layout.lock, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert "is in use: unmount it first" in spiderfs("cache", "remove", layout.cache).output
    (layout.cache / "notes.txt").touch()
    for place in (layout.cache, home, home / "missing"):
        result = spiderfs("cache", "remove", place)
        assert (result.exit_code, len(result.output.splitlines())) == (1, 1)
    assert "name each DIRECTORY" in spiderfs("cache", "remove").output
    assert (layout.content / "data.mdb").exists()
    assert layout.lock.exists()


def test_a_link_in_a_cache_leads_nowhere(home: Path) -> None:
    layout = make_cache(home / "spiderfs/0a")
    layout.archives.rmdir()
    layout.archives.symlink_to(home / "outside")
    (home / "outside").mkdir()
    (home / "outside/file").touch()
    assert spiderfs("cache", "remove", layout.cache).exit_code == 0
    assert (home / "outside/file").exists()
