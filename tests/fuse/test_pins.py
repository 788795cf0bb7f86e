"""`spiderfs pin` of real mounts: what is pinned stays, whatever is read and however often the source is mounted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import mounting
import pytest
from mounting import Mounted, eventually, mounted, run_spiderfs
from programs import program
from reading import lasting_source, write_files

from spiderfs.options.units import round_size

SMALL = {f"{kind}/{number:02d}": 4_000 for kind in ("rare", "often") for number in range(20)}
SIZES = {**SMALL, "large": 5 << 19}


source = lasting_source(SIZES)


def pinned(mount: Mounted) -> set[str]:
    lines = (line.split(maxsplit=3) for line in mount.control("cache").read_text().splitlines())
    return {path for section, _, _, path in lines if section == "user-pinned"}


def read_all(mount: Mounted, below: str) -> None:
    for name in SIZES:
        if name.startswith(below):
            assert len((mount.point / name).read_bytes()) == SIZES[name]


@pytest.mark.opened_and_immutable
def test_pinned_files_stay_over_reads_and_mounts(source: Path, tmp_path: Path) -> None:
    rare = {name for name in SMALL if name.startswith("rare/")}
    with mounted(source, tmp_path / "m", capacity="200kB", policy="lru") as mount:
        read_all(mount, "often")
        done = run_spiderfs("pin", mount.point, "rare", "often/00")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("20 files fetched (78.1 KiB) in ")
        assert "\n21 files pinned, 82.0 KiB of at most " in done.stdout
        eventually(lambda: pinned(mount) == rare | {"often/00"})
        for _ in range(3):
            read_all(mount, "often")
        assert pinned(mount) == rare | {"often/00"}
        stats = mount.status()
        assert "pinned           21 files, 82.0 KiB of at most " in stats
        # What no longer fits is named, and nothing of it is fetched.
        full = run_spiderfs("pin", mount.point, "often")
        assert full.returncode == 1
        assert "files are not pinned: pinned files may take half of the cache" in full.stderr
        eventually(lambda: len(pinned(mount)) == 23)
    with mounted(source, tmp_path / "m", capacity="200kB", policy="minio") as mount:
        assert rare <= pinned(mount)
        fetched = mount.metric("origin_bytes")
        read_all(mount, "rare")
        assert mount.metric("origin_bytes") == fetched
        done = run_spiderfs("unpin", mount.point, "rare", "--json")
        assert json.loads(done.stdout) == {"unpinned": 20}
        assert not rare & pinned(mount)
        assert run_spiderfs("evict", mount.point, "often").returncode == 0
        assert pinned(mount) == set()
        assert json.loads(run_spiderfs("pin", mount.point, "--json").stdout)["pinned"]["files"] == 0


def test_blocks_of_a_large_file_stay_too(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", capacity="8MiB", sample_max_bytes="1MiB", policy="lru") as mount:
        assert run_spiderfs("pin", mount.point, "large").returncode == 0
        eventually(lambda: pinned(mount) == {"large block 1", "large block 2", "large block 3"})
        assert run_spiderfs("unpin", mount.point, "large").stdout == "1 file unpinned\n"
        assert pinned(mount) == set()


def test_a_link_means_what_it_leads_to_when_it_is_unpinned_too(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_files(source, {"a/0": 1000, "a/1": 1000})
    (source / "link").symlink_to("a")
    with mounted(source, tmp_path / "m", capacity="1MiB") as mount:
        assert run_spiderfs("pin", mount.point, "link").returncode == 0
        eventually(lambda: pinned(mount) == {"a/0", "a/1"})
        assert run_spiderfs("unpin", mount.point, "link/0").stdout == "1 file unpinned\n"
        assert run_spiderfs("evict", mount.point, "link").stdout == "2 records evicted\n"


def test_a_mistyped_path_is_reported_and_one_of_a_file_that_is_gone_is_not(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_files(source, {"a": 1000, "b": 1000})
    with mounted(source, tmp_path / "m", capacity="1MiB", ttl=0, dir_ttl=0) as mount:
        assert run_spiderfs("pin", mount.point, "a", "b").returncode == 0
        # Half of what is printed as the room for kept files: 1 MiB less the 5 % in which files land.
        pinned = run_spiderfs("pin", mount.point).stdout
        assert pinned.startswith("2 files pinned, 2.0 KiB of at most "), pinned
        limit = mount.stats()["pins"]["limit_bytes"]
        assert f"of at most {round_size(limit)}, half of the room for kept files" in pinned
        assert 0.45 * (1 << 20) < limit < 0.5 * (1 << 20)
        for command in ("unpin", "evict"):
            done = run_spiderfs(command, mount.point, "typo", "other")
            assert (done.returncode, done.stdout) == (1, "")
            assert f"{mount.point} has no file or directory for 2 of these paths, for example typo" in done.stderr
            assert run_spiderfs(command, mount.point, "typo*").returncode == 1, "as of `pin` and `warm`"
        (source / "a").unlink()
        done = run_spiderfs("unpin", mount.point, "a", "b")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "2 files unpinned\n"


SOON = (
    "from spiderfs.daemon.caching import cache_control; cache_control.INTERVAL_S = cache_control.IDLE_INTERVAL_S = 0.1"
)


def test_a_version_that_is_gone_is_pinned_no_longer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_files(source, {"a": 1000, "b": 1000})
    with mounted(source, tmp_path / "m", capacity="1MiB", ttl=0, dir_ttl=0, first=SOON) as mount:
        assert run_spiderfs("pin", mount.point, "a", "b").returncode == 0
        eventually(lambda: pinned(mount) == {"a", "b"})
        (source / "new").write_bytes(b"x" * 500)
        os.utime(source / "new", (1e9, 1e9))
        (source / "new").rename(source / "a")
        assert (mount.point / "a").read_bytes() == b"x" * 500
        eventually(lambda: json.loads(run_spiderfs("pin", mount.point, "--json").stdout)["pinned"]["files"] == 1)
        assert run_spiderfs("pin", mount.point, "a").returncode == 0
        eventually(lambda: mount.stats()["pins"]["files"] == 2)


def test_ctrl_c_ends_the_fetching_and_leaves_the_mount_well(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", capacity="10MiB", fetches=2, source__latency_ms=500) as mount:
        command = [mounting.SPIDERFS, "pin", mount.point]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with program(*command, "rare", text=True, **pipes) as process:
            eventually(lambda: "20 files found" in mount.control("warm").read_text())
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (1, "")
        assert err.startswith("spiderfs: ended after ")
        mount.change("source.latency_ms", 0)
        # Whose standard output is closed says nothing, and does not hang.
        closed = subprocess.run(
            ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command, "rare"], capture_output=True, text=True, timeout=60
        )
        assert "Traceback" not in closed.stderr
        full = subprocess.run(
            ["/bin/sh", "-c", 'exec "$@" >/dev/full', "sh", *command], capture_output=True, text=True, timeout=60
        )
        assert full.returncode == 1
        assert full.stderr.count("\n") == 1
        assert "Traceback" not in full.stderr
        eventually(lambda: len(pinned(mount)) == 20)
