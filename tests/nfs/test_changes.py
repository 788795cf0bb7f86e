"""Files that change at the server, or by another client: readers get the old bytes or the new, and soon the new."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from mounting import mounted
from nfs_files import content_of, read, write
from nfs_server import Server, Way, client, clock_off
from replacing import read_on, replaced

NAMES = ["replaced", "spare", "deleted", "renamed", "rewritten"]


def changed(place: Path) -> dict[str, bytes | None]:
    """Change files in all ways; what each name must have then."""
    os.replace(place / "spare", place / "replaced")
    os.unlink(place / "deleted")
    os.rename(place / "renamed", place / "other name")
    with (place / "rewritten").open("r+b") as file:
        file.write(content_of("rewritten", 2))
    (place / "new").write_bytes(content_of("new", 0))
    return {
        "replaced": content_of("spare", 0),
        "deleted": None,
        "renamed": None,
        "other name": content_of("renamed", 0),
        "rewritten": content_of("rewritten", 2),
        "new": content_of("new", 0),
    }


def follow(point: Path, before: dict[str, bytes | None], after: dict[str, bytes | None], within_s: float) -> float:
    """Read until all is as it must be; whatever is read before must be right too. The seconds that it took."""
    began = time.monotonic()
    while True:
        late = []
        for name, new in after.items():
            found = read(point / name)
            assert found in (before.get(name), new), f"{name}: {(found or b'')[:40]!r}"
            late += [name] if found != new else []
        took_s = time.monotonic() - began
        if not late:
            return took_s
        assert took_s < within_s, f"after {took_s:.0f} s still old: {late}"
        time.sleep(0.3)


@pytest.mark.parametrize("by", ["server", "other client"])
def test_changes(way: Way, at_server: Path, source: Path, tmp_path: Path, note: list[str], by: str) -> None:
    write(at_server, NAMES)
    before = {name: content_of(name, 0) for name in NAMES}
    with mounted(source, tmp_path / "m", ttl="1s", negative_ttl="1s") as mount:
        for name in NAMES:
            assert read(mount.point / name) == before[name]
        if by == "server":
            after = changed(at_server)
        else:
            with client(way, Path("/mnt/other"), "other") as other:
                after = changed(other / at_server.name)
        # Names in spiderfs, those of the client's cache; an emulated processor needs some seconds for a round.
        took_s = follow(mount.point, before, after, way.stale_s + 30)
        note.append(f"{by}: all new after {took_s:.1f} s")


@pytest.mark.parametrize("off_s", [3600, -3600])
def test_a_server_whose_clock_is_off(
    way: Way, at_server: Path, source: Path, tmp_path: Path, note: list[str], off_s: int
) -> None:
    """All times of the files are by a clock that is an hour ahead or behind."""
    with clock_off(off_s):
        for name in NAMES:
            (at_server / name).write_bytes(content_of(name, 0))
            # Files of one size and one mtime would be one version to the mount, and a server's times are some ms apart.
            time.sleep(0.02)
    before = {name: content_of(name, 0) for name in NAMES}
    with mounted(source, tmp_path / "m", ttl="1s", negative_ttl="1s") as mount:
        for name in NAMES:
            assert read(mount.point / name) == before[name]
        with clock_off(off_s):
            after = changed(at_server)
        took_s = follow(mount.point, before, after, way.stale_s + 30)
        note.append(f"{off_s:+d} s: all new after {took_s:.1f} s")
        # In place, of the same size, twice within a moment.
        for generation in (3, 4):
            with clock_off(off_s):
                (at_server / "rewritten").write_bytes(content_of("rewritten", generation))
                time.sleep(0.02)
        right = {"rewritten": content_of("rewritten", 4)}
        seen = {content_of("rewritten", generation) for generation in (2, 3, 4)}
        began = time.monotonic()
        while (found := read(mount.point / "rewritten")) != right["rewritten"]:
            assert found in seen
            assert time.monotonic() - began < way.stale_s + 30
            time.sleep(0.3)


def test_files_that_are_replaced_all_the_time(
    way: Way, at_server: Path, source: Path, tmp_path: Path, note: list[str]
) -> None:
    names = [f"sample {number}" for number in range(6)]
    with (
        replaced(at_server, names, most_bytes=60_000, pause_s=0.05),
        mounted(source, tmp_path / "m", workers=2, ttl="1s") as mount,
    ):
        outcome = read_on(mount.point, names, 60_000, readers=3, reads=60)
        note.append(f"{outcome.right} reads right, errors: {dict(outcome.errors)}")
        assert not outcome.mixed, outcome
        assert not outcome.errors, outcome


def test_root_squash(way: Way, server: Server, at_server: Path, source: Path, tmp_path: Path, note: list[str]) -> None:
    """The server takes root for no one: what no one may not read answers EACCES, and no other error."""
    write(at_server, ["open to all", "private"])
    write_below = at_server / "closed"
    write_below.mkdir()
    write(write_below, ["inside"])
    for path, mode in ((at_server / "private", 0o600), (write_below, 0o700)):
        os.chown(path, 1000, 1000)
        path.chmod(mode)
    server.export("root_squash")
    with mounted(source, tmp_path / "m", ttl="1s", negative_ttl="1s") as mount:
        assert read(mount.point / "open to all") == content_of("open to all", 0)
        assert (mount.point / "private").stat().st_uid == 1000
        for call in (
            (mount.point / "private").read_bytes,
            (mount.point / "closed/inside").read_bytes,
            lambda: os.listdir(mount.point / "closed"),
        ):
            with pytest.raises(PermissionError):
                call()
        note.append("EACCES")
        (at_server / "private").chmod(0o644)
        write_below.chmod(0o755)
        began = time.monotonic()
        for path in (mount.point / "private", mount.point / "closed/inside"):
            while not readable(path):
                assert time.monotonic() - began < way.stale_s + 30
                time.sleep(0.3)
            assert read(path) == content_of(path.name, 0)
        note.append(f"{time.monotonic() - began:.1f} s after chmod readable")


def readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except PermissionError:
        return False
    return True
