"""The control files in MOUNTPOINT/.spiderfs, as a user reads and writes them."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import Mounted, eventually, mounted, run_spiderfs
from programs import program
from reading import error_of, lasting_source, read_afresh, write_files

from spiderfs import __version__
from spiderfs.metrics import COUNTERS, GAUGES, HISTOGRAMS

READ_ALONE = ("stats.json", "metrics", "redirects", "scores", "graph", "cache", "epochs", "log", "hook")
FILES = dict.fromkeys(READ_ALONE, 0o444) | dict.fromkeys(("config", "ratio", "warm", "evict", "pin", "unpin"), 0o600)
SIZES = {f"{part}/{kind}/{number}.bin": 4_000 for part in ("train", "val") for kind in "ab" for number in range(5)}


source = lasting_source(SIZES)


@pytest.fixture(params=[1, 2])
def mount(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Iterator[Mounted]:
    with mounted(source, tmp_path / "m", workers=request.param, capacity="10MiB") as found:
        yield found


@pytest.fixture(scope="module", params=[1, 2])
def lasting(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory, binding: str
) -> Iterator[Mounted]:
    """One mount for all tests that leave it as it is."""
    with mounted(source, tmp_path_factory.mktemp("m"), workers=request.param, capacity="10MiB") as found:
        yield found


def test_a_source_with_control_files_of_its_own_hides_none_of_the_mount(tmp_path: Path) -> None:
    """As a mount of spiderfs has: whoever lists the root must not give the kernel that directory for this one."""
    write_files(tmp_path / "source", {".spiderfs/stats.json": 5, ".spiderfs/other": 5, "file": 5, "below/.spiderfs": 5})
    with mounted(tmp_path / "source", tmp_path / "m") as mount:
        for _ in range(2):
            assert b"mountpoint" in mount.control("stats.json").read_bytes()
            assert not mount.control("other").exists()
            assert set(os.listdir(mount.point)) - {".spiderfs"} == {"file", "below"}
            subprocess.run(["ls", "-l", mount.point], check=True, capture_output=True, timeout=60)
        assert len((mount.point / "below/.spiderfs").read_bytes()) == 5
        mount.control("warm").write_text("**\n")
        eventually(lambda: mount.control("warm").read_text().startswith("idle: 2 files found"))


def read_files(mount: Mounted, *names: str) -> None:
    """Read files past the kernel's pages, so that an immutable mount hears of it too."""
    for name in names or SIZES:
        assert len(read_afresh(mount.point / name)) == SIZES[name]


def write(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


@pytest.mark.both_bindings
@pytest.mark.opened_and_immutable
def test_control_files_are_hidden_and_have_their_modes(lasting: Mounted, binding: str) -> None:
    assert sorted(os.listdir(lasting.point)) == ["train", "val"]
    assert [name for _, names, _ in os.walk(lasting.point) for name in names if "spiderfs" in name] == []
    directory = lasting.point / ".spiderfs"
    assert stat.S_ISDIR(directory.stat().st_mode)
    found = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(directory)}
    # Beside the files lies the directory of views (`test_forms_side_by_side.py`), where the binding carries it.
    assert (found.pop("views", None) is None) == (binding == "pyfuse3")
    assert found == FILES
    assert {name: stat.S_IMODE((directory / name).stat().st_mode) for name in FILES} == FILES
    with pytest.raises(FileNotFoundError):
        (directory / "nothing").stat()
    for name in READ_ALONE:
        refused = errno.EROFS if os.geteuid() == 0 or binding != "immutable" else errno.EACCES
        assert error_of((directory / name).write_bytes, b"x") == refused


def test_stats_for_people_programs_and_prometheus(mount: Mounted, source: Path) -> None:
    assert re.search(r"^opens +0$", mount.status(), re.MULTILINE), "a share of nothing is none"
    read_files(mount)
    # Readers get their bytes before the store does.
    eventually(lambda: mount.stats()["sections"]["importance"]["entries"] == len(SIZES))
    read_files(mount)
    stats = mount.stats()
    assert stats["source"] == str(source)
    assert stats["mountpoint"] == str(mount.point)
    assert stats["workers"] == mount.workers_wanted
    assert stats["pid"] == mount.supervisor.pid
    assert stats["metrics"]["opens"] == 2 * len(SIZES)
    assert stats["metrics"]["opens_hit"] == len(SIZES)
    assert stats["metrics"]["origin_bytes"] == stats["used_bytes"] == sum(SIZES.values())
    assert json.loads(mount.control("stats.json").read_text())["cache_dir"] == str(mount.cache)
    assert re.search(r"^opens +40, 50\.0% hits$", mount.status(), re.MULTILINE)
    metrics = mount.control("metrics").read_text()
    for definition in (*COUNTERS, *GAUGES, *HISTOGRAMS):
        assert re.search(rf"^spiderfs_{definition.name}(_total|_bucket)?[ {{]", metrics, re.MULTILINE), definition.name
    assert f"spiderfs_opens_total {2 * len(SIZES)}.0" in metrics
    assert stats["version"] == __version__
    assert mount.control("hook").read_text().rstrip("\n").endswith("hook.sock")


def test_config_shows_every_option_and_changes_the_live_ones(mount: Mounted) -> None:
    read_files(mount)
    eventually(lambda: len(mount.cached()) == len(SIZES))
    shown = mount.control("config").read_text()
    assert f"\nworkers={mount.workers_wanted}  #" in shown
    write(mount.control("config"), "capacity=40kB\npolicy=lru\n")
    after = mount.stats()
    assert (after["capacity_bytes"], after["policy"]) == (40_000, "lru")
    assert after["used_bytes"] <= 40_000
    assert "\ncapacity=40kB" in mount.control("config").read_text()
    # The policy is in effect: what was read last is kept, what was read longest ago has gone.
    eventually(lambda: _keeps_the_last_read(mount))
    assert run_spiderfs("config", mount.point, "capacity=1MiB").returncode == 0
    assert mount.stats()["capacity_bytes"] == 1 << 20


def _keeps_the_last_read(mount: Mounted) -> bool:
    names = sorted(SIZES)
    # Each worker reports every 20 ms at its own times, so the order of close accesses is not known.
    read_files(mount, *names)
    read_files(mount, names[-1])
    found = mount.cached()
    return names[-1] in found and names[0] not in found


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("workers=3", "workers cannot be changed while mounted"),
        ("capacity=lots", "capacity"),
        ("polcy=lru", "did you mean policy"),
        ("policy=best", "policy"),
        ("nonsense", "write name=value"),
    ],
)
def test_a_refused_change_says_why(lasting: Mounted, line: str, reason: str) -> None:
    before = lasting.stats()
    fd = os.open(lasting.control("config"), os.O_WRONLY)
    try:
        assert error_of(os.write, fd, f"{line}\n".encode()) == errno.EINVAL
    finally:
        os.close(fd)
    assert reason in lasting.control("config").read_text()
    assert lasting.stats()["capacity_bytes"] == before["capacity_bytes"]
    if "=" in line:
        done = run_spiderfs("config", lasting.point, line)
        assert done.returncode == 1
        assert reason in done.stderr
        assert done.stderr.count("\n") == 1


ODD_NAMES = [
    b"img[1].jpg",
    b" a b ",
    b" ",
    b"*",
    b"what?",
    b"\xff\xfe.bin",
    b"tab\tand\rreturn\x0b\x1c",
    b"[",
    b"d[x]/in",
    b"**",
]


def test_every_name_can_be_warmed_and_evicted_as_it_is(tmp_path: Path) -> None:
    """Each of these names lies beside other names that it would match as a glob."""
    source = tmp_path / "source"
    for name in (*ODD_NAMES, b"img1.jpg", b"whatX", b"dx/in", b"a b", b"line\nbreak", b"\x1b[2J"):
        path = Path(os.fsdecode(os.fsencode(source) + b"/" + name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")

    def names(mount: Mounted) -> set[bytes]:
        # The columns before the path have 37 letters.
        shown = {line[37:] for line in mount.control("cache").read_bytes().splitlines()}
        return {re.sub(rb"\\x([0-9a-f]{2})", lambda found: bytes([int(found[1], 16)]), name) for name in shown}

    with mounted(source, tmp_path / "m") as mount:
        for name in ODD_NAMES:
            for line in (name, os.fsencode(mount.point) + b"/" + name):
                mount.control("warm").write_bytes(line + b"\n")
                eventually(lambda: names(mount) == {name}, what=repr((line, names(mount))))  # noqa: B023
                mount.control("evict").write_bytes(line + b"\n")
                assert names(mount) == set(), line
        mount.control("warm").write_bytes(b"\n".join(ODD_NAMES))
        eventually(lambda: names(mount) == set(ODD_NAMES))
        # A name with escaped brackets is a glob that matches only itself, and so is a name that does not exist.
        mount.control("evict").write_bytes(b"img[[]1].jpg\nd[x]\nline?break\n")
        assert names(mount) == set(ODD_NAMES) - {b"img[1].jpg", b"d[x]/in"}
        mount.control("warm").write_bytes(b"img[0-9].jpg\nline?break\n\x1b[[]2J\n")
        eventually(lambda: {b"img1.jpg", b"line\nbreak", b"\x1b[2J"} <= names(mount))
        # A file that was deleted at the source but is still cached can be evicted.
        (source / "*").unlink()
        mount.control("evict").write_bytes(b"*\n")
        assert b"*" not in names(mount)
        assert b"[" in names(mount)


def test_the_log_shows_accesses_and_can_be_followed(mount: Mounted) -> None:
    read_files(mount, "train/a/0.bin")
    assert eventually(lambda: re.search(r" fetched +4000 thread=\d+ train/a/0\.bin", mount.control("log").read_text()))
    tail = ("tail", "-n", "+1", "-f", mount.control("log"))
    with program(*tail, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as follower:
        try:
            assert follower.stdout is not None
            pipe = follower.stdout.fileno()
            seen = b""

            def shows(text: bytes) -> bool:
                nonlocal seen
                while select.select([pipe], [], [], 0)[0]:
                    seen += os.read(pipe, 65536)
                return text in seen

            eventually(lambda: shows(b"train/a/0.bin"))
            read_files(mount, "val/b/3.bin")
            eventually(lambda: shows(b"val/b/3.bin"))
            read_files(mount, "val/b/4.bin")
            eventually(lambda: shows(b"val/b/4.bin"))
        finally:
            follower.kill()


def test_ordinary_programs_read_and_write_them(lasting: Mounted, tmp_path: Path) -> None:
    options, hook = lasting.control("config"), lasting.control("hook")
    path = hook.read_text()
    assert os.stat(options).st_ino == os.stat(options).st_ino
    for command in (
        'cat "$1"',
        'cp "$1" copy && cat copy',
        'cp --reflink=auto --sparse=always "$1" other && cat other',
        'dd if="$1" bs=3 status=none',
        'grep "" "$1"',
        'head -n 1 "$1"',
        'tail -c 100 "$1"',
        'sed "" "$1"',
        'exec 3< "$1"; cat <&3',
    ):
        done = subprocess.run(
            ["sh", "-c", command, "sh", hook], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.stdout, done.stderr) == (path, ""), command
    for command in ('echo "$2" > "$1"', 'echo "$2" >> "$1"', 'printf %s "$2" > "$1"', 'echo "$2" | tee "$1" > tee'):
        for ttl in ("7s", "8s"):
            subprocess.run(["sh", "-c", command, "sh", options, f"negative_ttl={ttl}"], cwd=tmp_path, check=True)
            assert f"\nnegative_ttl={ttl}" in options.read_text(), command
