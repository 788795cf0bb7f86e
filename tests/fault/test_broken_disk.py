"""A cache disk that turns read-only or full: readers get the source's bytes, and new processes still start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from archive_files import tar_of, zip_of
from mounting import Mounted, as_root, detach, eventually, mounted, run_spiderfs
from test_damaged_store import FULL, fill, small_disk

from spiderfs.shared.layout import DATA_FILE, CacheLayout

pytestmark = [
    pytest.mark.opened_and_immutable,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk"),
]


class Disk:
    """An ext4 file system in a file, which the kernel makes read-only after an error."""

    def __init__(self, directory: Path) -> None:
        image, self.point = directory / "image", directory / "disk"
        self.point.mkdir()
        with open(image, "wb") as file:
            file.truncate(96 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
        as_root("mount", "-o", "loop,errors=remount-ro", image, self.point)
        (line,) = (line for line in Path("/proc/self/mounts").read_text().splitlines() if f" {self.point} " in line)
        self._device = Path(line.split()[0]).name

    def break_down(self) -> None:
        Path(f"/sys/fs/ext4/{self._device}/trigger_fs_error").write_text("a test\n")
        with pytest.raises(OSError, match="Read-only file system"):
            (self.point / "probe").touch()


@contextlib.contextmanager
def made_disk(directory: Path) -> Iterator[Disk]:
    """A disk below a directory; skips the test where none can be made."""
    try:
        made = Disk(directory)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"no disk can be made here: {exc}")
    try:
        yield made
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            as_root("umount", made.point)
        detach(made.point)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with made_disk(tmp_path) as made:
        yield made


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_turns_read_only_costs_no_read(binding: str, disk: Disk, tmp_path: Path, workers: int) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    for number in range(20):
        (source / "sub" / f"{number}").write_bytes(b"%d" % number * 1000)
        (source / f"unseen {number}").write_bytes(b"%d" % number * 500)
    (source / "large").write_bytes(os.urandom(3 << 20))
    options = {"ttl": "0s", "dir_ttl": "0s", "sample_max_bytes": 1 << 20, "capacity": "20MiB", "workers": workers}
    with mounted(source, tmp_path / "m", cache=disk.point / "cache", allowed=["WARNING", "ERROR"], **options) as mount:  # type: ignore[arg-type]

        def everything_is_right() -> None:
            for directory, _, names in os.walk(source):
                below = mount.point / Path(directory).relative_to(source)
                assert sorted(set(os.listdir(below)) - {".spiderfs"}) == sorted(os.listdir(directory))
                for name in names:
                    assert (below / name).read_bytes() == (Path(directory) / name).read_bytes()
                    assert (below / name).stat().st_size == (Path(directory) / name).stat().st_size

        for number in range(20):
            (mount.point / "sub" / f"{number}").read_bytes()
        disk.break_down()
        everything_is_right()
        (source / "new").write_bytes(b"came later")
        everything_is_right()
        if binding != "immutable":  # where names are trusted for good
            (source / "unseen 3").unlink()
            (source / "unseen 4").write_bytes(b"changed")
            everything_is_right()
            with pytest.raises(FileNotFoundError):
                (mount.point / "unseen 3").stat()
        os.getxattr(mount.point / "sub" / "1", "user.spiderfs.section")
        # The processes that replace them have to start with such a disk.
        for pid in mount.workers():
            os.kill(pid, signal.SIGKILL)
        everything_is_right()
        before = mount.manager()
        os.kill(before, signal.SIGKILL)
        everything_is_right()
        eventually(lambda: mount.manager() != before)
        everything_is_right()
        assert mount.is_mounted()
        assert mount.logged("Read-only file system")


@pytest.mark.not_immutable("takes long")
def test_a_large_file_is_opened_at_a_worker_without_its_name(disk: Disk, source: Path, tmp_path: Path) -> None:
    """While the disk takes no names each worker has its own, and look-up and open may come to different ones."""
    content = os.urandom(1 << 20)
    for number in range(60):
        (source / f"large {number}").write_bytes(content)
    options = {"sample_max_bytes": 4096, "workers": 2}
    with mounted(source, tmp_path / "m", cache=disk.point / "cache", allowed=["WARNING", "ERROR"], **options) as mount:  # type: ignore[arg-type]
        disk.break_down()

        def first_bytes(name: str) -> bytes:
            fd = os.open(mount.point / name, os.O_RDONLY)
            try:
                return os.pread(fd, 100, 0)
            finally:
                os.close(fd)

        names = [f"large {number}" for number in range(60) for _ in range(4)]
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(first_bytes, names)) == {content[:100]}


SHARDS = {
    f"{shard}.tar": {b"%d/%02d" % (shard, number): b"%d" % shard * 3000 for number in range(40)} for shard in (0, 1)
}


def put_archives(source: Path) -> dict[str, bytes]:
    """Two tars, one of them cut short, and a zip; returns the members of the whole ones by their paths."""
    source.mkdir()
    for name, members in SHARDS.items():
        (source / name).write_bytes(tar_of(members))
    (source / "2.zip").write_bytes(zip_of(SHARDS["0.tar"]))
    (source / "cut.tar").write_bytes(tar_of(SHARDS["0.tar"])[:70_000])
    shards = {**SHARDS, "2.zip": SHARDS["0.tar"]}
    return {f"{name}/{member.decode()}": content for name, shard in shards.items() for member, content in shard.items()}


def everything_is_right(mount: Mounted, wanted: dict[str, bytes]) -> None:
    for name in ("0.tar", "1.tar", "2.zip"):
        assert len([file for _, _, files in os.walk(mount.point / name, onerror=_raise) for file in files]) == 40
    for path, content in wanted.items():
        assert (mount.point / path).read_bytes() == content
    with pytest.raises(OSError, match="Input/output"):
        os.listdir(mount.point / "cut.tar")


def _raise(exc: OSError) -> None:
    raise exc


@pytest.mark.parametrize("workers", [1, 2])
def test_archives_are_entered_while_the_disk_is_full(tmp_path: Path, workers: int) -> None:
    wanted = put_archives(tmp_path / "source")
    allowed = [*FULL, "takes (no )?indices", "cut.tar cannot be shown"]
    with (
        small_disk(tmp_path / "disk", "80M") as disk,
        mounted(
            tmp_path / "source",
            tmp_path / "m",
            cache=disk / "cache",
            allowed=allowed,
            archives="tar+zip",
            workers=workers,
        ) as mount,
    ):
        names = CacheLayout(disk / "cache").names / DATA_FILE
        eventually(lambda: names.stat().st_size > 32 << 20, what="the reserve")
        fill(disk)
        everything_is_right(mount, wanted)
        kept = disk / "cache" / "archives"
        assert list(kept.rglob("*.index")) == []
        (disk / "filler").unlink()
        member = mount.point / "0.tar" / "0" / "00"

        def written() -> bool:
            run_spiderfs("evict", mount.point, "0.tar", "1.tar", "2.zip")
            everything_is_right(mount, wanted)
            return len(list(kept.rglob("*.index"))) == 3

        eventually(written, what="the disk takes the indices")
        assert member.read_bytes() == wanted["0.tar/0/00"]
