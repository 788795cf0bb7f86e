"""Mounts whose system's clock is set while they last: nothing is trusted longer or shorter, or waits, for that."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mounting import Mounted, eventually, mounted

from spiderfs.client import Client

HOUR_S = 3600
# The program, for which the system's clock is ahead by what a file says.
PROGRAM = """#!{python}
import time
real, file = time.time, {file!r}
def shown():
    with open(file) as ahead:
        return real() + float(ahead.read())
time.time = shown
from spiderfs.__main__ import main
main()
"""


@pytest.fixture
def set_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    program, file = tmp_path / "spiderfs", tmp_path / "ahead"

    def set_by(ahead_s: float) -> None:
        (tmp_path / "new").write_text(str(ahead_s))
        os.rename(tmp_path / "new", file)

    set_by(0)
    program.write_text(PROGRAM.format(python=sys.executable, file=os.fspath(file)))
    program.chmod(0o755)
    monkeypatch.setattr("mounting.SPIDERFS", program)
    return set_by


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


@pytest.mark.parametrize("options", [{"immutable": "on"}, {"ttl": "10m"}])
def test_each_name_is_asked_for_once(
    tmp_path: Path, set_clock: Callable[[float], None], options: dict[str, object]
) -> None:
    names = _made(tmp_path / "source")
    with mounted(tmp_path / "source", tmp_path / "place", **options) as mount:  # type: ignore[arg-type]
        assert _asked(mount, names[:2]) == 2
        for known, ahead_s in ((2, -HOUR_S), (4, HOUR_S), (6, -30 * 365 * 24 * HOUR_S)):
            set_clock(ahead_s)
            assert _asked(mount, names[: known + 2]) == 2
            assert mount.stats()["uptime_s"] < 600
            set_clock(0)
            assert _asked(mount, names[: known + 2]) == 0


def test_a_name_is_trusted_for_its_ttl_and_no_longer(tmp_path: Path, set_clock: Callable[[float], None]) -> None:
    names = _made(source := tmp_path / "source")
    with mounted(source, tmp_path / "place", ttl="1s", dir_ttl="1s", negative_ttl="1s") as mount:
        for ahead_s in (0, -HOUR_S, HOUR_S):
            assert sorted(os.listdir(mount.point)) == names
            assert not (mount.point / "new").exists()
            (source / names[0]).write_text(f"at {ahead_s}")
            (source / "new").touch()
            set_clock(ahead_s)
            eventually(lambda: (mount.point / names[0]).read_text() == f"at {ahead_s}")  # noqa: B023
            eventually(lambda: (mount.point / "new").exists() and "new" in os.listdir(mount.point))
            (source / "new").unlink()
            eventually(lambda: "new" not in os.listdir(mount.point))
            eventually(lambda: not (mount.point / "new").exists())


@pytest.mark.parametrize("ahead_s", [-HOUR_S, HOUR_S])
def test_young_files_are_warmed(tmp_path: Path, set_clock: Callable[[float], None], ahead_s: float) -> None:
    _made(source := tmp_path / "source")
    with mounted(source, tmp_path / "place") as mount:
        # One is named, the other found by a glob.
        for name in ("young", "fresh"):
            (source / name).write_text(name)
        began = time.monotonic()
        assert [(mount.point / name).read_text() for name in ("young", "fresh")] == ["young", "fresh"]
        set_clock(ahead_s)
        mount.control("warm").write_text("young\nfre?h\n")
        for path in (mount.point / "young", mount.point / "fresh"):
            eventually(lambda path=path: os.getxattr(path, "user.spiderfs.state") == b"cached")  # type: ignore[misc]
            assert time.monotonic() - began > 2.0


def test_a_reader_around_fuse_has_the_clock_of_the_mount(tmp_path: Path, set_clock: Callable[[float], None]) -> None:
    """The mount was made while the system's clock was an hour behind, and the reader came after it was set."""
    names = _made(tmp_path / "source")
    set_clock(-HOUR_S)
    with mounted(tmp_path / "source", tmp_path / "place", ttl="10m") as mount:
        for name in names:
            (mount.point / name).read_bytes()
        set_clock(0)
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
