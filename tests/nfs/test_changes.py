"""Files that change at the server, or by another client: readers get the old bytes or the new, and soon the new."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from mounting import mounted
from nfs_server import Way, client

SIZE = 20_000


def content_of(name: str, generation: int) -> bytes:
    return (f"{name} {generation}|".encode() * SIZE)[:SIZE]


def write(directory: Path, names: list[str], generation: int = 0, age_s: float = 3600.0) -> None:
    """Write files as the server has them for long, so that the mount keeps them."""
    for name in names:
        (directory / name).write_bytes(content_of(name, generation))
        os.utime(directory / name, (time.time() - age_s,) * 2)


def read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


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


NAMES = ["replaced", "spare", "deleted", "renamed", "rewritten"]


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
