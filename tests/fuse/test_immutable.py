"""Mounts with `-o immutable`: what reaches the daemon, and that no one can spoil what others read."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mounting import Mounted, ending, eventually, mounted
from ordinary_user import UID, let_everybody_in, run_as_ordinary_user
from reading import error_of, source_of, write_files

SIZES = {f"{part}/{number:03d}": 1000 + 997 * number for part in ("one", "two") for number in range(40)}
LARGE_BYTES = (9 << 20) + 5


source = source_of(SIZES | {"large": LARGE_BYTES})


@pytest.fixture(params=[1, 2])
def mount(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Iterator[Mounted]:
    with mounted(source, tmp_path / "m", workers=request.param, immutable="on") as found:
        yield found


def content(mount: Mounted, name: str) -> bytes:
    return (mount.source / name).read_bytes()


def test_what_the_kernel_has_is_read_without_a_word_to_the_daemon(mount: Mounted) -> None:
    for name in SIZES:
        assert (mount.point / name).read_bytes() == content(mount, name)
    # A worker whose reading process has answered hears of it later.
    eventually(lambda: mount.metric("opens") == len(SIZES))
    before = mount.stats()["metrics"]
    assert before["origin_reads"] == len(SIZES)
    for _ in range(3):
        for name in SIZES:
            assert (mount.point / name).read_bytes() == content(mount, name)
            assert (mount.point / name).stat().st_size == SIZES[name]
    after = mount.stats()["metrics"]
    for metric in ("opens", "reads", "origin_reads"):
        assert after[metric] == before[metric], metric
    # The control file alone has been looked up since.
    assert after["lookups"] - before["lookups"] < 10


@pytest.mark.parametrize("mode", ["on", "off"])
def test_several_workers_fetch_a_file_once_that_the_kernel_asks_for_in_pieces(tmp_path: Path, mode: str) -> None:
    """The record of a file that is not kept has left the store again before the last piece is asked for."""
    sizes = {f"{number:02d}": 900_000 for number in range(40)}
    write_files(tmp_path / "source", sizes)
    options = {"capacity": sum(sizes.values()) // 5, "source__latency_ms": 2, "immutable": mode}
    with mounted(tmp_path / "source", tmp_path / "m", workers=3, **options) as mount:

        def read(name: str) -> bool:
            return (mount.point / name).read_bytes() == content(mount, name)

        with ThreadPoolExecutor(8) as readers:
            assert all(readers.map(read, sizes))
        assert mount.metric("origin_bytes") == sum(sizes.values())


def test_a_file_that_changes_all_the_same_is_named_in_the_log(mount: Mounted) -> None:
    mount.expect("has changed at the source, but the mount is `immutable`")
    (mount.point / "one/001").stat()
    (mount.source / "one/001").write_bytes(b"another content")
    with open(mount.point / "one/001", "rb", buffering=0) as early:
        with pytest.raises(OSError, match="Stale"):
            early.read()
        assert (mount.point / "one/001").read_bytes() == b"another content"
        with pytest.raises(OSError, match="Stale"):
            os.pread(early.fileno(), 10, 0)
    assert len(mount.logged(r"one/001 has changed at the source, but the mount is `immutable`")) >= 1
    assert mount.logged("one/002") == []
    for name in SIZES:
        assert (mount.point / name).read_bytes() == content(mount, name), "no other name has suffered"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can open a file to write")
def test_what_root_stores_through_a_mapping_does_not_stay(mount: Mounted) -> None:
    for name in ("one/001", "large"):
        path, expected = mount.point / name, content(mount, name)
        assert path.read_bytes() == expected
        fd = os.open(path, os.O_RDWR)
        try:
            with mmap.mmap(fd, 0) as mapped:
                mapped[:7] = b"spoilt!"
            eventually(lambda path=path, expected=expected: path.read_bytes() == expected)
            assert os.pread(fd, 100, 0) == expected[:100]
        finally:
            os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can open a file to write")
def test_what_root_stores_does_not_stay_though_a_read_of_the_file_hangs(source: Path, tmp_path: Path) -> None:
    """The kernel drops pages when READs of them have been answered, and such a call cannot be killed."""
    far, found = 4 << 20, []
    with mounted(
        source, tmp_path / "m", allowed=[r"worker 0 ended \(signal 9\)"], immutable="on", read_ahead=0
    ) as mount:
        expected = content(mount, "large")
        fd = os.open(mount.point / "large", os.O_RDWR)
        reader = threading.Thread(target=lambda: found.append(os.pread(fd, 4096, far)))
        try:
            assert os.pread(fd, 4096, 0) == expected[:4096]
            mount.change("source.hang", "on")
            asked = mount.metric("source_requests")
            reader.start()
            eventually(lambda: mount.metric("source_requests") > asked, what="a read that hangs")
            with mmap.mmap(fd, 4096) as mapped:
                mapped[:7] = b"spoilt!"
            eventually(lambda: os.pread(fd, 4096, 0) == expected[:4096])
            assert found == []
            (killed,) = mount.workers()
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: mount.workers() != [killed], what="another worker")
        finally:
            mount.change("source.hang", "off")
            reader.join(30)
            os.close(fd)
        assert found == [expected[far : far + 4096]]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can open a file to write")
@pytest.mark.parametrize("at", [0, 10, 4096])
def test_what_root_writes_is_refused_and_seen_by_no_one(mount: Mounted, at: int) -> None:
    path, expected = mount.point / "one/030", content(mount, "one/030")
    assert path.read_bytes() == expected
    fd = os.open(path, os.O_RDWR)
    wrong, reads, done = [], 0, threading.Event()

    def read() -> None:
        nonlocal reads
        while not done.is_set():
            found = path.read_bytes()
            reads += 1
            if found != expected:
                wrong.append(found)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        # If writes went into the pages, 6 to 20 of 100 reads saw that.
        while reads < 300 and reader.is_alive():
            assert error_of(os.pwrite, fd, b"spoilt!" * 1000, at) == errno.EROFS
            assert os.pread(fd, 1 << 20, 0) == expected
    finally:
        done.set()
        reader.join()
    assert (reads >= 300, wrong) == (True, [])
    try:
        assert error_of(os.getxattr, path, "security.capability") == errno.ENODATA
    finally:
        os.close(fd)
    for flags in (os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC, os.O_WRONLY | os.O_TRUNC | os.O_CREAT):
        assert error_of(os.open, path, flags) == errno.EROFS
    assert path.read_bytes() == expected
    assert path.stat().st_size == len(expected)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_cannot_open_a_file_to_write(source: Path, tmp_path: Path) -> None:
    for name in SIZES:
        (source / name).chmod(0o666)
    let_everybody_in(tmp_path)
    let_everybody_in(source / "one")
    with mounted(source, tmp_path / "m", immutable="on", allow_other="on") as mount:
        (tmp_path / "m").chmod(0o755)
        other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c"]
        for command in (": > one/001", "echo x >> one/001", ": <> one/001"):
            done = subprocess.run([*other, command], cwd=mount.point, capture_output=True, text=True, check=False)
            assert "Permission denied" in done.stderr, (command, done.stderr)
        done = subprocess.run([*other, "cat one/001"], cwd=mount.point, capture_output=True, check=True)
        assert done.stdout == content(mount, "one/001")


def test_what_has_changed_between_two_mounts_is_noticed(source: Path, tmp_path: Path) -> None:
    for cached in (b"another content", b"the third content"):
        with mounted(source, tmp_path / "m", immutable="on") as mount:
            for name in SIZES:
                assert (mount.point / name).read_bytes() == content(mount, name)
            fetched = mount.metric("origin_reads")
            assert os.listdir(mount.point / "one")
        (source / "one/001").write_bytes(cached)
    with mounted(source, tmp_path / "m", immutable="on") as mount:
        for name in SIZES:
            assert (mount.point / name).read_bytes() == content(mount, name)
        assert mount.metric("origin_reads") <= 2 < fetched + 2, "what has not changed is still cached"


def test_each_mode_uses_what_the_other_has_cached(source: Path, tmp_path: Path) -> None:
    for number, immutable in enumerate(("on", "off", "on")):
        with mounted(source, tmp_path / "m", immutable=immutable, capacity="100MiB") as mount:
            for name in (*SIZES, "large"):
                assert (mount.point / name).read_bytes() == content(mount, name)
            assert (mount.metric("origin_bytes") == 0) == (number > 0)
            eventually(lambda mount=mount: mount.stats()["used_bytes"] == sum(SIZES.values()) + LARGE_BYTES)  # type: ignore[misc]


def test_a_late_reader_of_a_changed_file_spoils_nothing_for_those_of_the_new_one(mount: Mounted, source: Path) -> None:
    def opened_and_read() -> int:
        fd = os.open(mount.point / "large", os.O_RDONLY)
        try:
            return len(os.pread(fd, 5000, os.fstat(fd).st_size - 5000))
        finally:
            os.close(fd)

    mount.expect("large has changed at the source")
    olds = [os.open(mount.point / "large", os.O_RDONLY) for _ in range(2)]
    try:
        write_files(source, {"large": LARGE_BYTES + 7})
        os.utime(source / "large", (1e9, 1e9))
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            os.pread(olds[0], 5000, 0)
        assert opened_and_read() == 5000
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            os.pread(olds[1], 5000, 5 << 20)
        assert opened_and_read() == 5000
    finally:
        for fd in olds:
            os.close(fd)


_AS_USER = """
def read(name):
    return open(f"{point}/{name}", "rb").read()

def error(call, *arguments):
    try:
        call(*arguments)
    except OSError as exc:
        return exc.errno

run("mount", source, point, "-o", options)
try:
    for _ in range(3):
        assert read("file") == b"content"
    os.stat(f"{point}/changing")
    with open(f"{source}/changing", "wb") as changing:
        changing.write(b"another version")
    print(error(read, "changing"), read("changing"))
    file = f"{point}/file"
    print(error(open, file, "r+b"), error(open, file, "wb"), error(os.chmod, file, 0o600))
    print(os.access(file, os.W_OK), os.access(point, os.W_OK), os.access(point, os.R_OK | os.X_OK))
    print(error(read, "secret"), len(read(".spiderfs/stats.json")) > 0)
    with open(f"{point}/.spiderfs/config", "w") as config:
        config.write("policy=lru\\n")
    print(b"\\npolicy=lru" in read(".spiderfs/config"))
finally:
    run("umount", point)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("workers", [1, 2])
def test_an_ordinary_user_mounts(tmp_path: Path, workers: int) -> None:
    """Through fusermount3, whose mount has no privileges to tell the kernel anything."""
    source, point, own = tmp_path / "source", tmp_path / "point", tmp_path / "own"
    for path in (source, point, own):
        path.mkdir()
    let_everybody_in(tmp_path)
    for name, content in (("file", b"content"), ("changing", b"changing"), ("secret", b"secret")):
        (source / name).write_bytes(content)
        os.utime(source / name, (1e9, 1e9))
    (source / "secret").chmod(0o600)
    for path in (source, point, own, source / "file", source / "changing"):
        os.chown(path, UID, UID)
    cache = own / "cache"
    options = f"immutable,workers={workers},cache_dir={cache},log_file={own}/log"
    with ending(own, point, cache):
        said = run_as_ordinary_user(_AS_USER, source, point, options)
    assert said.splitlines() == [
        f"{errno.ESTALE} b'another version'",
        f"{errno.EACCES} {errno.EACCES} {errno.EROFS}",
        "False False True",
        f"{errno.EACCES} True",
        "True",
    ]
