"""The server stops, takes back its export, or its packets are lost: cached files are read on, others answer in time."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mounting import eventually, mounted, run_spiderfs, unmount
from nfs_files import content_of, drop_page_cache, read, write
from nfs_server import NFS, Server, Way, in_namespace, mount_export

TIMEOUT_S = 4.0
# What two emulated processors may add.
SLACK_S = 20.0
# The first line of a client that comes back late: TCP's pauses double, and version 4 waits for the grace period.
BACK_S = 150.0
# What a reader gets of a source that does not answer, or says of everything that it may not be read.
NO_ANSWER = (errno.EIO, errno.ETIMEDOUT)
TROUBLES = (
    "has not answered within",
    "left this unanswered",
    "not answer",
    "was killed while it waited there",
    "Permission denied|Input/output error|Connection timed out",
)
CACHED = [f"cached{number}" for number in range(5)]
OTHERS = [f"other{number}" for number in range(5)]

FAULTS: dict[str, tuple[Callable[[Server], None], Callable[[Server], None]]] = {
    "nfsd stopped": (Server.stop, Server.start),
    "export withdrawn": (Server.withdraw, Server.export),
    "network cut": (Server.cut, Server.join),
}


def refused(path: Path) -> tuple[int, float]:
    """The errno of a read that must fail, and the seconds until it came."""
    began = time.monotonic()
    with pytest.raises(OSError) as caught:  # noqa: PT011
        path.read_bytes()
    return caught.value.errno or 0, time.monotonic() - began


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(
    way: Way, server: Server, at_server: Path, source: Path, tmp_path: Path, note: list[str], fault: str
) -> None:
    begin, end = FAULTS[fault]
    write(at_server, [*CACHED, *OTHERS])
    with mounted(source, tmp_path / "m", allowed=TROUBLES, source__timeout_s=TIMEOUT_S, ttl="2s") as mount:
        assert len(os.listdir(mount.point)) == len([*CACHED, *OTHERS])
        for name in CACHED:
            assert read(mount.point / name) == content_of(name, 0)
        begin(server)
        # All names are so old that the source is asked again.
        time.sleep(2.5)
        slowest_s = 0.0
        for turn in range(2):
            drop_page_cache()
            for name in CACHED:
                began = time.monotonic()
                assert read(mount.point / name) == content_of(name, 0)
                slowest_s = max(slowest_s, time.monotonic() - began)
            error, took_s = refused(mount.point / OTHERS[turn])
            assert error in NO_ANSWER, errno.errorcode[error]
            assert took_s < 2 * TIMEOUT_S + SLACK_S
            note.append(f"{errno.errorcode[error]} after {took_s:.1f} s")
        assert slowest_s < TIMEOUT_S + SLACK_S
        note.append(f"cached files within {slowest_s:.1f} s")
        assert sorted(os.listdir(mount.point)) == sorted([*CACHED, *OTHERS])
        end(server)
        began = time.monotonic()
        eventually(lambda: answers(mount.point / OTHERS[2]), BACK_S, "the source's answer")
        note.append(f"back after {time.monotonic() - began:.1f} s")
        for name in [*CACHED, *OTHERS]:
            assert read(mount.point / name) == content_of(name, 0)


def answers(path: Path) -> bool:
    try:
        return path.read_bytes() == content_of(path.name, 0)
    except OSError as exc:
        if exc.errno not in NO_ANSWER:
            raise
        return False


def test_unmounting_while_the_network_is_cut(
    way: Way, server: Server, at_server: Path, source: Path, tmp_path: Path, note: list[str]
) -> None:
    write(at_server, [*CACHED, *OTHERS])
    with mounted(source, tmp_path / "m", allowed=TROUBLES, source__timeout_s=TIMEOUT_S) as mount:
        os.listdir(mount.point)
        server.cut()
        error, _ = refused(mount.point / OTHERS[0])
        assert error in NO_ANSWER, errno.errorcode[error]
        stuck = sum(_state(path) == "D" for path in Path("/proc").glob("[0-9]*/task/*/stat"))
        began = time.monotonic()
        mount.stop()
        note.append(f"{stuck} threads in state D, unmounted after {time.monotonic() - began:.1f} s")
        assert not mount.is_mounted()
        server.join()


def test_mounting_while_the_network_is_cut(
    way: Way, server: Server, at_server: Path, source: Path, tmp_path: Path, note: list[str]
) -> None:
    write(at_server, OTHERS)
    (point := tmp_path / "mnt").mkdir()
    server.cut()
    began = time.monotonic()
    done = run_spiderfs("mount", source, point, "-o", f"cache_dir={tmp_path / 'cache'}")
    took_s = time.monotonic() - began
    server.join()
    assert done.returncode != 0
    # A soft mount's own error may come before the patience of the command ends.
    assert re.search("has not answered for|cannot be opened", done.stderr), done.stderr
    assert took_s < 30
    note.append(f"refused after {took_s:.1f} s")


def test_the_client_gives_up(
    way: Way, server: Server, at_server: Path, source: Path, tmp_path: Path, note: list[str]
) -> None:
    """A soft mount's own error reaches the reader, if the mount's time limit is the longer one."""
    if way.hard:
        pytest.skip("a hard mount never gives up")
    write(at_server, [*CACHED, *OTHERS])
    with mounted(source, tmp_path / "m", allowed=TROUBLES, source__timeout_s=60, source__attempts=1) as mount:
        for name in CACHED:
            assert read(mount.point / name) == content_of(name, 0)
        server.cut()
        error, took_s = refused(mount.point / OTHERS[0])
        assert error in (errno.EIO, errno.ETIMEDOUT), errno.errorcode[error]
        note.append(f"{errno.errorcode[error]} after {took_s:.1f} s")
        assert took_s < 40
        for name in CACHED:
            assert read(mount.point / name) == content_of(name, 0)
        server.join()
        eventually(lambda: answers(mount.point / OTHERS[1]), BACK_S, "the source's answer")


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_restarts_while_files_are_read(
    way: Way, server: Server, at_server: Path, source: Path, tmp_path: Path, note: list[str]
) -> None:
    """nfsd stops for a moment, again and again: no reader gets an error, since the mount asks again for 30 s."""
    names = [f"{number}" for number in range(60)]
    write(at_server, names)
    with mounted(source, tmp_path / "m", allowed=TROUBLES) as mount:
        began = time.monotonic()
        for number, name in enumerate(names):
            if number % 20 == 10:
                server.stop()
                server.start()
            assert read(mount.point / name) == content_of(name, 0)
        note.append(f"{len(names)} files in {time.monotonic() - began:.1f} s, 3 restarts")


def test_an_export_is_mounted_again(way: Way, at_server: Path, source: Path, tmp_path: Path, note: list[str]) -> None:
    write(at_server, [*CACHED, *OTHERS])
    with mounted(source, tmp_path / "m", allowed=TROUBLES, source__timeout_s=TIMEOUT_S, source__attempts=1) as mount:
        for name in CACHED:
            assert read(mount.point / name) == content_of(name, 0)
        unmount(NFS, "-l")
        try:
            for name in CACHED:
                assert read(mount.point / name) == content_of(name, 0)
        finally:
            mount_export(way, NFS)
        # The mount has the old one open, and may go on with it; what changes now is seen by way of either.
        write(at_server, OTHERS, 1)
        eventually(lambda: read_or_none(mount.point / OTHERS[0]) == content_of(OTHERS[0], 1), way.stale_s + 30)
        note.append("read on")


def read_or_none(path: Path) -> bytes | None:
    try:
        return read(path)
    except OSError as exc:
        if exc.errno not in NO_ANSWER:
            raise
        return None


def test_a_stale_handle_of_the_server(way: Way, at_server: Path, source: Path, tmp_path: Path, note: list[str]) -> None:
    """A large file is read in blocks; the server deletes it, or another takes its name, while it is open."""
    names, size = ["deleted", "replaced"], 3 << 20
    for generation, directory in enumerate((at_server, at_server / "new")):
        directory.mkdir(exist_ok=True)
        for name in names:
            (directory / name).write_bytes(bytes([65 + generation]) * size)
            os.utime(directory / name, (time.time() - 3600,) * 2)
    limits = {"sample_max_bytes": "64KiB", "read_ahead": 0, "ttl": "1s"}
    with mounted(source, tmp_path / "m", **limits) as mount:  # type: ignore[arg-type]
        opened = {name: os.open(mount.point / name, os.O_RDONLY) for name in names}
        assert all(os.pread(fd, 4096, 0) == b"A" * 4096 for fd in opened.values())
        os.unlink(at_server / "deleted")
        os.replace(at_server / "new/replaced", at_server / "replaced")
        time.sleep(way.stale_s + 2)
        for name, fd in opened.items():
            try:
                found = os.pread(fd, 4096, 2 << 20)
            except OSError as exc:
                if exc.errno != errno.ESTALE:
                    raise
                note.append(f"{name}: ESTALE")
            else:
                # Its client may have that block already, by reading ahead.
                assert found == b"A" * 4096
                note.append(f"{name}: old bytes")
            os.close(fd)
        eventually(lambda: read(mount.point / "replaced") == b"B" * size, way.stale_s + 30)
        eventually(lambda: read(mount.point / "deleted") is None, way.stale_s + 30)


def test_silly_renames(way: Way, at_server: Path, source: Path, tmp_path: Path, note: list[str]) -> None:
    """A program on this machine has a file of the export open and deletes it: its client only renames it."""
    write(at_server, ["open", "other"])
    with mounted(source, tmp_path / "m", ttl="1s", dir_ttl="1s", negative_ttl="1s") as mount:
        assert read(mount.point / "open") == content_of("open", 0)
        with (source / "open").open("rb") as file:
            file.read(1)
            os.unlink(source / "open")
            (silly,) = [name for name in os.listdir(at_server) if name.startswith(".nfs")]
            eventually(lambda: read(mount.point / "open") is None, 30)
            eventually(lambda: set(os.listdir(mount.point)) <= {silly, "other"}, 30)
            note.append(f"listed meanwhile: {len(os.listdir(mount.point))} names")
            assert read(mount.point / silly) in (content_of("open", 0), None)
        eventually(lambda: os.listdir(mount.point) == ["other"], way.stale_s + 30)
        assert read(mount.point / silly) is None
        assert read(mount.point / "other") == content_of("other", 0)
    assert in_namespace("", "ls", at_server) == "other\n"
