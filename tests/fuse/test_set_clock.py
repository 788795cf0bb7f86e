"""Mounts whose system's clock is set while they last: nothing is trusted longer or shorter, or waits, for that."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from mounting import Mounted, eventually, mounted

from spiderfs.client import Client

HOUR_S = 3600


class SystemClock:
    """The system's clock as the daemons see it that run the Python `first`: ahead by what was set last."""

    def __init__(self, place: Path) -> None:
        self._file, self._new = place / "ahead", place / "new"
        self.set(0)
        self.first = f"""
import time
real = time.time
def shown():
    with open({os.fspath(self._file)!r}) as ahead:
        return real() + float(ahead.read())
time.time = shown
"""

    def set(self, ahead_s: float) -> None:
        self._new.write_text(str(ahead_s))
        os.rename(self._new, self._file)


@pytest.fixture
def clock(tmp_path: Path) -> SystemClock:
    return SystemClock(tmp_path)


def _made(source: Path) -> list[str]:
    source.mkdir()
    names = [f"file {number}" for number in range(8)]
    for name in names:
        (source / name).write_bytes(name.encode())
        os.utime(source / name, (1e9, 1e9))
    return names


def _asked(mount: Mounted, names: list[str]) -> float:
    """How often the source is asked for names while each of these files is read three times."""
    before = mount.metric("lookups_source")
    for name in names * 3:
        assert (mount.point / name).read_bytes() == name.encode()
    return mount.metric("lookups_source") - before


@pytest.mark.parametrize("options", [{"immutable": "on"}, pytest.param({"ttl": "10m"}, marks=pytest.mark.thorough)])
def test_each_name_is_asked_for_once(tmp_path: Path, clock: SystemClock, options: dict[str, object]) -> None:
    names = _made(tmp_path / "source")
    with mounted(tmp_path / "source", tmp_path / "place", first=clock.first, **options) as mount:  # type: ignore[arg-type]
        assert _asked(mount, names[:2]) == 2
        for known, ahead_s in ((2, -HOUR_S), (4, HOUR_S), (6, -30 * 365 * 24 * HOUR_S)):
            clock.set(ahead_s)
            assert _asked(mount, names[: known + 2]) == 2
            assert mount.stats()["uptime_s"] < 600
            clock.set(0)
            assert _asked(mount, names[: known + 2]) == 0


def test_a_name_is_trusted_for_its_ttl_and_no_longer(tmp_path: Path, clock: SystemClock) -> None:
    names = _made(source := tmp_path / "source")
    with mounted(source, tmp_path / "place", first=clock.first, ttl="1s", dir_ttl="1s", negative_ttl="1s") as mount:
        for ahead_s in (0, -HOUR_S, HOUR_S):
            assert sorted(os.listdir(mount.point)) == names
            assert not (mount.point / "new").exists()
            (source / names[0]).write_text(f"at {ahead_s}")
            (source / "new").touch()
            clock.set(ahead_s)
            eventually(lambda: (mount.point / names[0]).read_text() == f"at {ahead_s}")  # noqa: B023
            eventually(lambda: (mount.point / "new").exists() and "new" in os.listdir(mount.point))
            (source / "new").unlink()
            eventually(lambda: "new" not in os.listdir(mount.point))
            eventually(lambda: not (mount.point / "new").exists())


@pytest.mark.parametrize("ahead_s", [-HOUR_S, pytest.param(HOUR_S, marks=pytest.mark.thorough)])
def test_young_files_are_warmed(tmp_path: Path, clock: SystemClock, ahead_s: float) -> None:
    _made(source := tmp_path / "source")
    with mounted(source, tmp_path / "place", first=clock.first) as mount:
        # One is named, the other found by a glob.
        for name in ("young", "fresh"):
            (source / name).write_text(name)
        began = time.monotonic()
        assert [(mount.point / name).read_text() for name in ("young", "fresh")] == ["young", "fresh"]
        clock.set(ahead_s)
        mount.control("warm").write_text("young\nfre?h\n")
        for path in (mount.point / "young", mount.point / "fresh"):
            eventually(lambda path=path: os.getxattr(path, "user.spiderfs.state") == b"cached")  # type: ignore[misc]
            assert time.monotonic() - began > 2.0


def test_a_reader_around_fuse_has_the_clock_of_the_mount(tmp_path: Path, clock: SystemClock) -> None:
    """The mount was made while the system's clock was an hour behind, and the reader came after it was set."""
    names = _made(tmp_path / "source")
    clock.set(-HOUR_S)
    with mounted(tmp_path / "source", tmp_path / "place", first=clock.first, ttl="10m") as mount:
        for name in names:
            (mount.point / name).read_bytes()
        clock.set(0)
        for name in names:
            path = mount.point / name
            eventually(lambda path=path: os.getxattr(path, "user.spiderfs.state") == b"cached")  # type: ignore[misc]
        client = Client(mount.point)
        assert [client.read_bytes(name) for name in names] == [name.encode() for name in names]
        for name in names:
            # The client asks the mount too, now and then, where other programs mount and unmount all the time.
            path = os.fsencode(mount.point / name)
            eventually(lambda path=path, name=name: client.cached(path) == name.encode())  # type: ignore[misc]
        eventually(lambda: mount.metric("client_opens") >= len(names))
