"""Every way that a program can read a file: the bytes are those of the source."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from mounting import Mounted, eventually, mounted
from reading import digest, lasting_source, read_through, write_files

from benchmarks.common.sources import write_patterned

pytestmark = pytest.mark.opened_and_immutable

SMALL_BYTES, LARGE_BYTES = 700_003, (21 << 20) + 4099
SPARSE_BYTES = 64 << 30
NAMES = ("small", "large")


source = lasting_source({"small": SMALL_BYTES, "large": LARGE_BYTES})


@pytest.fixture(scope="module", params=[1, 2])
def mount(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory, binding: str
) -> Iterator[Mounted]:
    with mounted(source, tmp_path_factory.mktemp("m"), workers=request.param, capacity="40MiB", policy="lru") as found:
        yield found


def _forget_pages(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("name", NAMES)
def test_mmap(mount: Mounted, source: Path, name: str) -> None:
    content = (source / name).read_bytes()
    with open(mount.point / name, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(mapped) == len(content)
        assert mapped[-5:] == content[-5:]
        assert mapped[4090:4100] == content[4090:4100]
        assert hashlib.sha256(mapped).digest() == hashlib.sha256(content).digest()


@pytest.mark.parametrize("name", NAMES)
def test_pread_anywhere(mount: Mounted, source: Path, name: str) -> None:
    content = (source / name).read_bytes()
    random = Random(0)
    fd = os.open(mount.point / name, os.O_RDONLY)
    try:
        for _ in range(200):
            offset, size = random.randrange(len(content) + 1000), random.choice([1, 511, 4096, 70_001, 1 << 20])
            assert os.pread(fd, size, offset) == content[offset : offset + size]
            if random.random() < 0.3:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", NAMES)
def test_direct_io(mount: Mounted, source: Path, name: str) -> None:
    content = (source / name).read_bytes()
    fd = os.open(mount.point / name, os.O_RDONLY | os.O_DIRECT)
    try:
        for offset in (0, 4096, len(content) // 8192 * 4096, len(content) // 4096 * 4096):
            # An anonymous map begins on a page, as O_DIRECT wants it.
            with mmap.mmap(-1, 1 << 20) as buffer:
                count = os.preadv(fd, [buffer], offset)
                assert buffer[:count] == content[offset : offset + (1 << 20)]
    finally:
        os.close(fd)


def test_seek_and_splice_by_ordinary_programs(mount: Mounted, source: Path, tmp_path: Path) -> None:
    for name in NAMES:
        assert subprocess.run(["cmp", source / name, mount.point / name], check=False).returncode == 0
        subprocess.run(["cp", "--sparse=never", mount.point / name, tmp_path / name], check=True)
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes()
        tail = subprocess.run(["tail", "-c", "1000", mount.point / name], capture_output=True, check=True)
        assert tail.stdout == (source / name).read_bytes()[-1000:]


@pytest.mark.parametrize("name", NAMES)
def test_many_threads_of_one_file_share_one_fetch(source: Path, tmp_path: Path, name: str) -> None:
    content = (source / name).read_bytes()
    wanted = hashlib.sha256(content).digest()
    # Slow, so that all of them wait for the same bytes.
    with mounted(source, tmp_path / "m", workers=2, **{"source.latency_ms": 50}) as mount:

        def read(_: int) -> bytes:
            with open(mount.point / name, "rb") as file:
                return hashlib.sha256(file.read()).digest()

        threads = 64 if name == "small" else 16
        with ThreadPoolExecutor(threads) as pool:
            assert set(pool.map(read, range(threads))) == {wanted}
        assert mount.metric("origin_bytes") == len(content)


@pytest.mark.both_bindings
@pytest.mark.not_immutable("a READ brings them")
def test_bytes_that_an_open_has_fetched_need_no_read(tmp_path: Path) -> None:
    """The kernel has been given it; but not while another handle's READ may have locked its pages."""
    (tmp_path / "source").mkdir()
    sizes = {"a": 100_001, "b": 4096, "c": 1}
    write_files(tmp_path / "source", sizes)
    with mounted(tmp_path / "source", tmp_path / "m") as mount:
        for name in sizes:
            assert (mount.point / name).read_bytes() == (tmp_path / "source" / name).read_bytes()
        assert mount.metric("reads") == 0
        with open(mount.point / "a", "rb") as first:
            _forget_bytes(mount, "a")
            with open(mount.point / "a", "rb") as second:
                assert mount.metric("origin_reads") == len(sizes) + 1
                assert second.read() == first.read() == (tmp_path / "source" / "a").read_bytes()
        reads = mount.metric("reads")
        assert reads > 0
        # Both are closed now.
        _forget_bytes(mount, "a")
        assert (mount.point / "a").read_bytes() == (tmp_path / "source" / "a").read_bytes()
        assert mount.metric("origin_reads") == len(sizes) + 2
        assert mount.metric("reads") == reads


def test_a_program_that_reads_a_small_file_in_pieces_sends_one_read(tmp_path: Path) -> None:
    """As Pillow does: first the head of the file, then the rest, through Python's buffer."""
    (tmp_path / "source").mkdir()
    write_files(tmp_path / "source", {"a": 112_000})
    with mounted(tmp_path / "source", tmp_path / "m") as mount:
        expected = (mount.point / "a").read_bytes()
        _forget_pages(mount.point / "a")
        reads = mount.metric("reads")
        with open(mount.point / "a", "rb") as file:
            head = file.read(16)
            file.seek(0)
            pieces = list(iter(lambda: file.read(1 << 16), b""))
        assert b"".join(pieces) == expected
        assert expected.startswith(head)
        assert mount.metric("reads") == reads + 1


def _forget_bytes(mount: Mounted, name: str) -> None:
    """Neither the store nor the kernel is to have them."""

    def evicted() -> bool:
        # Not before it has landed.
        mount.control("evict").write_text(f"{name}\n")
        return os.getxattr(mount.point / name, "user.spiderfs.state") == b"uncached"

    _forget_pages(mount.point / name)
    eventually(evicted, what="its eviction")


@pytest.mark.both_bindings
def test_state_and_metrics_count_a_file_that_was_just_read(tmp_path: Path, binding: str) -> None:
    """Whoever reads from the source answers the open, or the READ, and the worker hears of it later."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(40):
        (source / f"{number}").write_bytes(os.urandom(3000 * number + 1))
    with mounted(source, tmp_path / "mount", source__latency_ms=2) as mount:
        for number in range(40):
            path = mount.point / f"{number}"
            assert path.read_bytes() == (source / f"{number}").read_bytes()
            assert os.getxattr(path, "user.spiderfs.state") == b"cached"
            assert mount.metric("opens") == number + 1
            assert mount.metric("origin_reads") == number + 1
        assert mount.metric("reads") == (40 if binding == "immutable" else 0)


def test_24_processes_of_one_file(mount: Mounted, source: Path) -> None:
    wanted = write_files(source, {"shared": 300_000}, seed=64)
    read_through(mount.point, wanted, 24, 2)


@pytest.mark.not_immutable("takes long")
def test_a_file_larger_than_memory(mount: Mounted, source: Path) -> None:
    with open(source / "sparse", "wb") as file:
        file.truncate(SPARSE_BYTES)
        for mark in (0, 5 << 30, SPARSE_BYTES - 7):
            file.seek(mark)
            file.write(b"%7d" % (mark >> 20))
    with open(mount.point / "sparse", "rb", buffering=0) as file:
        assert os.fstat(file.fileno()).st_size == SPARSE_BYTES
        for mark in (SPARSE_BYTES - 7, 5 << 30, 0):
            assert os.pread(file.fileno(), 7, mark) == b"%7d" % (mark >> 20)
        assert os.pread(file.fileno(), 3 << 20, 33 << 30) == bytes(3 << 20)
        assert os.pread(file.fileno(), 100, SPARSE_BYTES) == b""
    stats = mount.stats()
    assert stats["used_bytes"] <= stats["capacity_bytes"]


@pytest.mark.not_immutable("takes long")
@pytest.mark.thorough
def test_300_megabytes_read_whole_through_a_small_cache(source: Path, tmp_path: Path) -> None:
    size = 300 << 20
    write_patterned(source / "huge", size)
    wanted = digest((source / "huge").read_bytes())
    with mounted(source, tmp_path / "m", capacity="32MiB", policy="lru") as mount:
        found = hashlib.blake2b()
        with open(mount.point / "huge", "rb", buffering=0) as file:
            while block := file.read(1 << 20):
                found.update(block)
        assert found.hexdigest() == wanted
        stats = mount.stats()
        assert stats["used_bytes"] <= stats["capacity_bytes"] == 32 << 20
        # Each block once: read-ahead must not fetch what was fetched already, nor what no one reads.
        assert stats["metrics"]["origin_bytes"] == size
        assert stats["metrics"]["readahead_blocks"] >= 250
    (source / "huge").unlink()


def test_read_ahead_hides_the_latency_of_a_sequential_reader_only(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", read_ahead=4) as mount:
        fd = os.open(mount.point / "large", os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            assert os.pread(fd, 4096, 15 << 20)
            assert os.pread(fd, 4096, 9 << 20)
            assert mount.metric("readahead_blocks") == 0
            assert os.pread(fd, 4096, 0)
            assert mount.metric("readahead_blocks") == 0
            # All of the block, in order: the four behind it follow by themselves.
            assert os.pread(fd, (1 << 20) - 4096, 4096)
            eventually(lambda: mount.metric("origin_reads") == 7)
            assert mount.metric("readahead_blocks") == 4
        finally:
            os.close(fd)


@pytest.mark.parametrize("workers", [1, 2])
def test_readers_in_order_side_by_side_fetch_each_byte_once(source: Path, tmp_path: Path, workers: int) -> None:
    """A file has one window of read-ahead, which they would tear to and fro; each goes on where it stopped."""
    content = (source / "large").read_bytes()
    places = [(5 << 20) + 4096, 9 << 20, (14 << 20) + 4096]
    found = dict.fromkeys(places, b"")
    with mounted(source, tmp_path / "m", workers=workers, read_ahead=0) as mount:
        with contextlib.ExitStack() as stack:
            files = {place: stack.enter_context(open(mount.point / "large", "rb", buffering=0)) for place in places}
            for part in range(24):
                for place, file in files.items():
                    found[place] += os.pread(file.fileno(), 1 << 17, place + (part << 17))
        assert found == {place: content[place : place + (24 << 17)] for place in places}
        # Each begins with 512 KiB in pieces that are not kept, and the kernel reads ahead of it. To two workers it
        # gives these READs in any order.
        assert mount.metric("origin_bytes") <= (11 + 3 * workers) * (1 << 20)


_SCAN = """
import os, sys
count = size = 0
with os.scandir(sys.argv[1]) as entries:
    for entry in entries:
        count += 1
        size += entry.stat().st_size
print(count, size)
"""


@pytest.mark.not_immutable("takes long")
def test_a_scan_of_8000_files_asks_for_each_once(tmp_path: Path) -> None:
    count = 8000
    directory = tmp_path / "source" / "images"
    directory.mkdir(parents=True)
    (directory / "0").write_bytes(b"xyz")
    for number in range(1, count):
        # Hard links are made faster than files; ext4 allows 65,000 of one.
        os.link(directory / "0", directory / f"{number}")
    with mounted(tmp_path / "source", tmp_path / "m", dir_ttl=60) as mount:
        before = mount.stats()["metrics"]
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SCAN, mount.point / "images"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == [f"{count}", f"{3 * count}"]
        after = mount.stats()["metrics"]
        # The names come with their attributes; what is looked up are the directory and the control file, no file.
        assert after["lookups"] - before["lookups"] < count / 100
        assert after["source_requests"] - before["source_requests"] < 10
        assert after["known_files"] == count + 1
        again = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SCAN, mount.point / "images"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert again.stdout == done.stdout
        assert mount.metric("source_requests") - after["source_requests"] < 5
