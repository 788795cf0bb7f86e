"""Which version of a file a reader of a real mount gets, and that no bytes stay that are not those of a version."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from pathlib import Path

import pytest
from mounting import eventually, mounted

from spiderfs.client import Client

YEAR_2400_S = 13_569_465_600
# What a version needs to settle (`vfs/rules.py`), and some time for a busy machine.
SETTLED_WITHIN_S = 20.0


def in_place(path: Path, content: bytes, mtime_ns: int) -> None:
    """Write over a file as a writer does whose mtime was set before: by a write that goes on, or through mmap."""
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(mtime_ns, mtime_ns))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_file_of_any_time_is_shown(source: Path, tmp_path: Path) -> None:
    names = []
    for seconds in (YEAR_2400_S, -1, -6_000_000_000, (1 << 33) + 5):
        file, directory, link = (source / f"{kind} {seconds}" for kind in ("file", "directory", "link"))
        file.write_bytes(b"odd")
        os.chmod(file, 0o6001)
        os.chown(file, (1 << 32) - 2, (1 << 32) - 2)
        directory.mkdir()
        (directory / "huge").touch()
        os.truncate(directory / "huge", 8 << 40)
        link.symlink_to("x")
        for path in (file, directory, link):
            os.utime(path, (seconds, seconds), follow_symlinks=False)
            names.append(path.name)
    with mounted(source, tmp_path / "place", capacity="50%") as mount:
        assert sorted(os.listdir(mount.point)) == sorted(names)
        for name in names:
            shown, there = os.lstat(mount.point / name), os.lstat(source / name)
            assert (shown.st_mtime_ns, shown.st_mode, shown.st_uid) == (there.st_mtime_ns, there.st_mode, there.st_uid)
            assert name[:4] != "file" or (mount.point / name).read_bytes() == b"odd"
        eventually(lambda: mount.stats()["capacity_bytes"] > 0 and mount.metric("known_files") >= 16)
        assert mount.metric("manager_restarts") == 0


@pytest.mark.parametrize("options", [{"ttl": "0s", "workers": 2}, {"sample_max_bytes": 4}, {"immutable": "on"}])
def test_bytes_read_while_written_do_not_stay(source: Path, tmp_path: Path, options: dict[str, object]) -> None:
    with mounted(source, tmp_path / "place", **options) as mount:  # type: ignore[arg-type]
        (source / "file").write_bytes(b"half of it")
        mtime_ns = os.stat(source / "file").st_mtime_ns
        assert (mount.point / "file").read_bytes() == b"half of it"
        in_place(source / "file", b"all of it!", mtime_ns)
        seen = os.stat(mount.point / "file").st_ino
        eventually(lambda: (mount.point / "file").read_bytes() == b"all of it!", SETTLED_WITHIN_S)
        eventually(lambda: os.stat(mount.point / "file").st_ino != seen, SETTLED_WITHIN_S)
        # From here on it is a version like any other.
        (mount.point / "file").read_bytes()
        fetched = mount.metric("origin_reads")
        assert (mount.point / "file").read_bytes() == b"all of it!"
        assert mount.metric("origin_reads") == fetched
        assert os.getxattr(mount.point / "file", "user.spiderfs.state") == b"cached"


def test_the_state_of_a_file_of_terabytes_is_known_without_a_walk(source: Path, tmp_path: Path) -> None:
    (source / "huge").touch()
    os.truncate(source / "huge", 8 << 40)
    with mounted(source, tmp_path / "place", read_ahead=0) as mount:
        with open(mount.point / "huge", "rb") as file:
            # A block is fetched by the READ after pieces of half of it.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for piece in (0, 2, 4, 6, 1):
                assert os.pread(file.fileno(), 1 << 17, (4 << 40) + (piece << 17)) == bytes(1 << 17)

        def took_s() -> float:
            began = time.monotonic()
            assert os.getxattr(mount.point / "huge", "user.spiderfs.state") == b"partial 1/8388608"
            return time.monotonic() - began

        # Each walk would take seconds.
        assert min(took_s() for _ in range(5)) < 1


@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_that_a_look_up_has_read_serve_only_the_next_open(source: Path, tmp_path: Path, workers: int) -> None:
    """Names are trusted for an hour: each open finds out that there is another version, and looks it up again."""
    with mounted(source, tmp_path / "place", workers=workers) as mount:
        for number in range(200):
            content = b"version %3d" % number
            (source / "file").write_bytes(content)
            assert (mount.point / "file").read_bytes() == content


def test_a_file_that_has_not_settled_is_warmed_when_it_has(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "place", ttl="0s") as mount:
        # One is named, the other found by a glob.
        for name in ("file", "other"):
            (source / name).write_bytes(b"half of it")
        times_ns = {name: os.stat(source / name).st_mtime_ns for name in ("file", "other")}
        mount.control("warm").write_text("file\nothe?\n")
        # As long as they can be young at all.
        while time.time_ns() < times_ns["file"] + 10**9:
            assert mount.stats()["used_bytes"] == 0 or time.time_ns() > times_ns["file"] + 2 * 10**9
        for name, mtime_ns in times_ns.items():
            in_place(source / name, b"all of it!", mtime_ns)
        for path in (mount.point / "file", mount.point / "other"):
            eventually(lambda path=path: os.getxattr(path, "user.spiderfs.state") == b"cached")  # type: ignore[misc]
            assert path.read_bytes() == b"all of it!"


def test_a_file_that_was_read_too_early_is_complete_when_settled(source: Path, tmp_path: Path) -> None:
    """Names are trusted for an hour, but not that of a file that someone is just writing."""
    whole = {"empty": b"all of it", "half": b"all of it", "large": b"all of the large one"}
    with mounted(source, tmp_path / "place", sample_max_bytes=10) as mount:
        (source / "empty").touch()
        (source / "half").write_bytes(b"all")
        (source / "large").write_bytes(b"all of the large")
        for name in whole:
            assert (mount.point / name).read_bytes() == (source / name).read_bytes()
        for name, content in whole.items():
            (source / name).write_bytes(content)
        sizes = {name: len(content) for name, content in whole.items()}
        eventually(lambda: {name: (mount.point / name).stat().st_size for name in whole} == sizes, SETTLED_WITHIN_S)
        assert {name: (mount.point / name).read_bytes() for name in whole} == whole


def test_a_provisional_version_is_kept_for_who_has_it_open(source: Path, tmp_path: Path) -> None:
    (source / "gone").touch()
    os.utime(source / "gone", (1, 1))
    with mounted(source, tmp_path / "place", ttl="0s") as mount:
        (source / "file").write_bytes(b"first")
        with open(mount.point / "file", "rb") as young, open(mount.point / "gone", "rb") as gone:
            (source / "new").write_bytes(b"second")
            os.rename(source / "new", source / "file")
            assert (mount.point / "file").read_bytes() == b"second"
            os.unlink(source / "gone")
            assert not (mount.point / "gone").exists()
            # The manager has been through what is gone, the young version too.
            eventually(lambda: is_forgotten(gone.fileno()))
            assert young.read() == b"first"
            os.posix_fadvise(young.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(young.fileno(), 10, 0) == b"first"
            assert os.fstat(young.fileno()).st_size == 5


def is_forgotten(fd: int) -> bool:
    """Whether the mount knows no more of what is open."""
    try:
        os.getxattr(fd, "user.spiderfs.state")
    except OSError as exc:
        return exc.errno == errno.ESTALE
    return False


def test_an_open_file_that_has_not_settled_can_be_mapped_and_read_on(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "place", ttl="0s", sample_max_bytes=1 << 20) as mount:
        content = os.urandom(3 << 20)
        (source / "large").write_bytes(content)
        (source / "small").write_bytes(content[:300_000])
        for name in ("large", "small"):
            expected = (source / name).read_bytes()
            assert subprocess.run(["cp", mount.point / name, tmp_path / name], check=False).returncode == 0
            assert (tmp_path / name).read_bytes() == expected
            with open(mount.point / name, "rb") as early, open(mount.point / name, "rb") as late:
                assert early.read(1000) + late.read()[1000:] == expected
                assert early.read() == expected[1000:]


def test_a_reader_around_fuse_gets_what_the_mount_gives(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "place") as mount:
        read = Client(mount.point).read_bytes
        (source / "file").write_bytes(b"half of it")
        mtime_ns = os.stat(source / "file").st_mtime_ns
        assert read("file") == b"half of it"
        in_place(source / "file", b"all of it!", mtime_ns)
        assert read("file") == b"all of it!"
        eventually(lambda: os.getxattr(mount.point / "file", "user.spiderfs.state") == b"cached" or not read("file"))
        assert read("file") == b"all of it!"


def test_versions_that_were_superseded_do_not_fill_the_cache(source: Path, tmp_path: Path) -> None:
    size = 100_000
    (source / "others").mkdir()
    for number in range(8):
        (source / "others" / f"{number}").write_bytes(os.urandom(size))
    with mounted(source, tmp_path / "place", ttl="0s", dir_ttl="0s", capacity=12 * size) as mount:
        for number in range(30):
            content = os.urandom(size)
            (source / "new").write_bytes(content)
            os.utime(source / "new", (number, number))
            os.rename(source / "new", source / "file")
            assert (mount.point / "file").read_bytes() == content
        kept = open(mount.point / "file", "rb")  # noqa: SIM115
        with kept:
            os.remove(source / "file")
            assert sorted(os.listdir(mount.point)) == ["others"]
            names = sorted(os.listdir(mount.point / "others"))

            def all_are_cached() -> bool:
                for name in names:
                    (mount.point / "others" / name).read_bytes()
                states = [os.getxattr(mount.point / "others" / name, "user.spiderfs.state") for name in names]
                return states == [b"cached"] * len(names)

            eventually(all_are_cached)
            assert kept.read() == content, "who has it open reads on, from the kernel's pages at least"
        assert mount.stats()["used_bytes"] <= 12 * size


@pytest.mark.parametrize("options", [{"dir_ttl": "0s"}, {}], ids=["listed again", "not settled"])
def test_an_empty_listing_is_kept_as_long_as_others(source: Path, tmp_path: Path, options: dict[str, object]) -> None:
    with mounted(source, tmp_path / "place", **options) as mount:
        (source / "directory").mkdir()
        made = os.stat(source / "directory")
        assert os.listdir(mount.point / "directory") == []
        (source / "directory" / "new").touch()
        os.utime(source / "directory", ns=(made.st_atime_ns, made.st_mtime_ns))
        eventually(lambda: os.listdir(mount.point / "directory") == ["new"], 5, "the new name")


def test_a_listing_again_has_the_types_of_then(source: Path, tmp_path: Path) -> None:
    (source / "directory").mkdir()
    (source / "directory" / "changed").touch()
    (source / "directory" / "same").touch()
    os.utime(source / "directory", (1e9, 1e9))
    with mounted(source, tmp_path / "place", dir_ttl="0s", ttl="0s") as mount:
        assert os.listdir(mount.point / "directory")
        (source / "directory" / "changed").unlink()
        (source / "directory" / "changed").mkdir()
        os.utime(source / "directory", (1e9, 1e9))
        with os.scandir(mount.point / "directory") as entries:
            assert {entry.name: entry.is_dir() for entry in entries} == {"changed": True, "same": False}
