"""A cache disk that turns read-only under a mount: readers get the source's bytes, and new processes still start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mounting import as_root, detach, eventually, mounted

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


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        made = Disk(tmp_path)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"no disk can be made here: {exc}")
    yield made
    with contextlib.suppress(subprocess.CalledProcessError):
        as_root("umount", made.point)
    detach(made.point)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_turns_read_only_causes_no_error_for_readers(
    binding: str, disk: Disk, tmp_path: Path, workers: int
) -> None:
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
        if binding != "immutable":  # where names are believed for good
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
def test_a_large_file_is_opened_at_a_worker_that_does_not_know_its_name(disk: Disk, tmp_path: Path) -> None:
    """While the disk takes no names each worker has its own, and look-up and open may come to different ones."""
    (source := tmp_path / "source").mkdir()
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
