"""Large files that are cached as a whole: the kernel reads them from the cache by itself, and no reader notices."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from mounting import PATIENCE_S, Mounted, detach, ending, eventually, mounted
from ordinary_user import UID, let_everybody_in, run_as_ordinary_user
from reading import cached_pages, source_of, write_files

from spiderfs.shared.layout import BLOCKS_DIRECTORY, CacheLayout

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 9),
    reason="only Linux 6.9 and later lets root do this",
)

BYTES = (12 << 20) + 4099
# How long a file stays registered without a handle, and how often the worker looks for such files; else 2 s and 1 s.
TIDY_SOON = "from spiderfs.fuse import passthrough; passthrough.LINGER_S = 1.0;"
TIDY_SOON += "from spiderfs.daemon import worker; worker.TIDY_INTERVAL_S = 0.2"


source = source_of({"large": BYTES})


@pytest.fixture
def mount(source: Path, tmp_path: Path) -> Iterator[Mounted]:
    with mounted(source, tmp_path / "m", ttl=0.2, dir_ttl=0, first=TIDY_SOON) as mount:
        yield mount


@contextlib.contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def passed(mount: Mounted) -> int:
    return int(mount.metric("passthrough_opens"))


def figures(mount: Mounted) -> dict[str, int]:
    metrics = mount.stats()["metrics"]
    return {name: metrics[name] for name in ("reads", "origin_reads", "opens", "opens_hit", "passthrough_opens")}


def made_whole(mount: Mounted, name: str = "large") -> bytes:
    """Read a file once, so that all of it is cached and the next open passes through."""
    content = (mount.point / name).read_bytes()
    assert content == (mount.source / name).read_bytes()
    eventually(lambda: os.getxattr(mount.point / name, "user.spiderfs.state") == b"cached")
    # The last blocks of the file may have been on their way into the store when they were read.
    eventually(lambda: _passes(mount, name), what="an open that passes through")
    return content


def _passes(mount: Mounted, name: str) -> bool:
    before = passed(mount)
    with opened(mount.point / name):
        return passed(mount) > before


def kernel_holds(mount: Mounted) -> bool:
    """Whether the worker has noted that the kernel reads some inode by itself."""
    return any(CacheLayout(mount.cache).run.backing_files())


def plain_files(mount: Mounted) -> list[Path]:
    return list((CacheLayout(mount.cache).content / BLOCKS_DIRECTORY).iterdir())


def test_a_cached_large_file_is_read_without_the_daemon(mount: Mounted) -> None:
    content = made_whole(mount)
    before = figures(mount)
    path = mount.point / "large"
    assert path.read_bytes() == content
    with opened(path) as one, opened(path) as two, open(path, "rb") as three:
        assert os.pread(two, BYTES + 1, 0) == content
        with mmap.mmap(three.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert mapped[-5:] == content[-5:]
            assert mapped[:] == content
        random = Random(1)
        for _ in range(200):
            offset, size = random.randrange(BYTES + 10), random.randrange(300_000)
            assert os.pread(random.choice((one, two)), size, offset) == content[offset : offset + size]
        assert os.fstat(one).st_size == BYTES
        assert os.lseek(one, 0, os.SEEK_END) == BYTES
    with ThreadPoolExecutor(8) as pool:
        assert all(found == content for found in pool.map(lambda _: path.read_bytes(), range(16)))
    after = figures(mount)
    assert after["reads"] == before["reads"]
    assert after["origin_reads"] == before["origin_reads"]
    assert after["passthrough_opens"] - before["passthrough_opens"] == 4 + 16
    assert after["opens"] - before["opens"] == after["opens_hit"] - before["opens_hit"] == 4 + 16
    eventually(lambda: not kernel_holds(mount), what="the end of the last handle")


def test_a_reader_past_all_pages_needs_no_alignment(mount: Mounted) -> None:
    content = made_whole(mount)
    eventually(lambda: not kernel_holds(mount))
    with opened(mount.point / "large", os.O_DIRECT) as alone:
        assert os.pread(alone, 1000, 77) == content[77:1077]
        assert not kernel_holds(mount), "it is no reason to begin"
    eventually(lambda: _passes(mount, "large"))
    with opened(mount.point / "large") as beside, opened(mount.point / "large", os.O_DIRECT) as direct:
        assert kernel_holds(mount)
        assert os.pread(direct, 1000, 77) == content[77:1077]
        assert os.pread(beside, 1000, 77) == content[77:1077]


def test_handles_of_one_inode_are_of_one_kind(mount: Mounted) -> None:
    path = mount.point / "large"
    with opened(path) as cached:
        content = os.pread(cached, BYTES, 0)
        assert path.read_bytes() == content
        with opened(path) as beside:
            assert os.pread(beside, 500, BYTES - 300) == content[-300:]
        assert passed(mount) == 0
    made_whole(mount)
    with opened(path) as passing:
        mount.control("evict").write_text("large\n")
        eventually(lambda: mount.metric("used_bytes") == 0)
        # The kernel still reads a file that is not cached any more, if another reader has it open.
        with opened(path) as beside:
            assert os.pread(beside, BYTES, 0) == os.pread(passing, BYTES, 0) == content
    assert kernel_holds(mount), "for those who come back soon"
    before = figures(mount)
    assert path.read_bytes() == content
    assert figures(mount)["origin_reads"] > before["origin_reads"]


def test_a_new_version_is_read_and_the_old_handle_keeps_its_own(mount: Mounted) -> None:
    content = made_whole(mount)
    with opened(mount.point / "large") as fd:
        fresh = Random(5).randbytes(BYTES + 10)
        (mount.source / "large.new").write_bytes(fresh)
        os.rename(mount.source / "large.new", mount.source / "large")
        eventually(lambda: (mount.point / "large").stat().st_size == BYTES + 10)
        assert (mount.point / "large").read_bytes() == fresh
        assert os.pread(fd, BYTES + 100, 0) == content


def test_the_pages_of_the_first_reading_are_not_kept_beside_those_of_the_cache(mount: Mounted) -> None:
    path = mount.point / "large"
    with opened(path) as cached:
        content = os.pread(cached, BYTES, 0)
        before = cached_pages(cached)
    made_whole(mount)
    with opened(path) as passing:
        assert os.pread(passing, BYTES, 0) == content
        assert cached_pages(passing) == 0
    assert before * mmap.PAGESIZE >= BYTES


def test_a_killed_worker_is_not_noticed(mount: Mounted) -> None:
    write_files(mount.source, {"other": BYTES}, seed=3)
    content = made_whole(mount)
    path = mount.point / "large"
    mount.expect(r"worker \d+ ended")
    with opened(path) as old, opened(mount.point / "other") as cached:
        other = os.pread(cached, BYTES, 0)
        (worker,) = mount.workers()
        os.kill(worker, signal.SIGKILL)
        assert os.pread(old, BYTES, 0) == content
        eventually(lambda: mount.metric("worker_restarts") == 1)
        # The kernel has handles of both kinds of which the new worker knows nothing.
        for _ in range(3):
            assert path.read_bytes() == content
            assert (mount.point / "other").read_bytes() == other
        mount.control("evict").write_text("large\n")
        eventually(lambda: mount.metric("used_bytes") < 2 * BYTES)
        assert os.pread(old, BYTES, 0) == content
        with opened(path) as beside:
            assert os.pread(beside, BYTES, 0) == content
    assert path.read_bytes() == content
    assert (mount.point / "other").read_bytes() == other
    with opened(mount.point / "other") as fd:
        assert os.pread(fd, BYTES, 0) == other
    assert len(list(CacheLayout(mount.cache).run.backing_files())) == 1, "a successor begins none"


def test_a_killed_daemon_leaves_handles_that_go_on(source: Path, tmp_path: Path) -> None:
    cache, point = tmp_path / "cache", tmp_path / "mnt"
    with mounted(source, tmp_path / "one", cache=cache, point=point) as mount:
        content = made_whole(mount)
        fd = os.open(point / "large", os.O_RDONLY)
        mount.supervisor.signal(signal.SIGKILL)
        assert mount.supervisor.ended(PATIENCE_S)
        detach(point)
        assert os.pread(fd, BYTES, 0) == content
    with mounted(source, tmp_path / "two", cache=cache, point=point) as mount:
        assert (point / "large").read_bytes() == content
        mount.control("evict").write_text("large\n")
        eventually(lambda: mount.metric("used_bytes") == 0)
        assert os.pread(fd, BYTES, 0) == content
        os.close(fd)
        eventually(lambda: plain_files(mount) == [], what="the end of what was evicted")


def test_damage_is_noticed_before_the_kernel_reads_it(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with mounted(source, tmp_path / "one", cache=cache) as mount:
        content = made_whole(mount)
        (plain,) = plain_files(mount)
    with open(plain, "r+b") as file:
        file.seek(5_000_000)
        file.write(b"damage")
    with mounted(source, tmp_path / "two", cache=cache) as mount:
        made_whole(mount)
        assert mount.metric("checksum_failures") > 0
        assert (mount.point / "large").read_bytes() == content
        assert plain.read_bytes() == content


def test_several_workers_answer_reads_themselves(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", workers=2) as mount:
        for _ in range(3):
            assert (mount.point / "large").read_bytes() == (source / "large").read_bytes()
        assert passed(mount) == 0
        assert plain_files(mount)


_AS_USER = """
log = options.partition("log_file=")[2].partition(",")[0]
run("mount", source, point, "-o", options)
try:
    wanted = open(f"{source}/large", "rb").read()
    deadline = time.monotonic() + 30
    # The next open must come after all of the file is in the store.
    while "does not read large files by itself" not in open(log).read():
        assert open(f"{point}/large", "rb").read() == wanted
        assert time.monotonic() < deadline, "it was not tried"
    for _ in range(4):
        assert open(f"{point}/large", "rb").read() == wanted
    print(open(f"{point}/.spiderfs/metrics").read())
finally:
    run("umount", point)
"""


def test_an_ordinary_user_reads_as_before(source: Path, tmp_path: Path) -> None:
    """The kernel registers files for root alone."""
    let_everybody_in(tmp_path)
    for name in ("point", "own"):
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, UID, UID)
    point, cache = tmp_path / "point", tmp_path / "own/cache"
    options = f"cache_dir={cache},log_file={tmp_path}/own/log,log_level=info"
    with ending(tmp_path / "own", point, cache):
        said = run_as_ordinary_user(_AS_USER, source, point, options)
    assert "\nspiderfs_passthrough_opens_total 0" in said
    log = (tmp_path / "own/log").read_text()
    assert log.count("the kernel does not read large files by itself") == 1
