"""`spiderfs warm` of real mounts: what is cached at its end, and that the daemon stops when the command does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mounting
import pytest
from mounting import Mounted, eventually, mounted, run_spiderfs
from planning import planned
from programs import program
from reading import lasting_source, write_files

from spiderfs.protocol import Progress

SIZES = {f"{part}/{kind}/{number:02d}": 4_000 for part in ("train", "val") for kind in "ab" for number in range(25)}


source = lasting_source(SIZES)


@pytest.fixture
def slow(source: Path, tmp_path: Path) -> Iterator[Mounted]:
    """A mount of a source that takes a long time for all of its files."""
    with mounted(source, tmp_path / "m", capacity="10MiB", fetches=2, source__latency_ms=500) as mount:
        yield mount


def progress(mount: Mounted) -> str:
    return mount.control("warm").read_text()


def begin(*arguments: str | Path) -> contextlib.AbstractContextManager[subprocess.Popen[Any]]:
    """The program itself, which is sent signals."""
    return program(mounting.SPIDERFS, "warm", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.opened_and_immutable
def test_what_is_named_is_cached_at_the_end(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", workers=2, capacity="10MiB") as mount:
        done = run_spiderfs("warm", mount.point, "train/a", f"{mount.point}/val/b/07", "val/a/*")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("51 files fetched (199.2 KiB) in ")
        assert done.stdout.endswith(", 0 were cached before\n")
        wanted = {name for name in SIZES if name.startswith(("train/a/", "val/a/"))} | {"val/b/07"}
        eventually(lambda: mount.cached() == wanted)
        done = run_spiderfs("warm", mount.point)
        assert done.returncode == 0
        assert done.stdout.startswith("49 files fetched ")
        assert done.stdout.endswith(", 51 were cached before\n")
        eventually(lambda: mount.cached() == set(SIZES))
        # The list comes in lines of a pipe.
        listed = subprocess.run(
            [mounting.SPIDERFS, "warm", mount.point, "-"],
            input="\n".join([*SIZES, "train/absent", "nothing/at/all"]),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert listed.returncode == 1
        assert listed.stdout == "0 files fetched (0 B) in 0:00, 100 were cached before\n"
        assert listed.stderr == (
            f"spiderfs: {mount.point} has no file or directory for 2 of these paths, for example train/absent\n"
        )


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_ctrl_c_ends_the_daemons_work(slow: Mounted, number: int) -> None:
    with begin(slow.point) as command:
        eventually(lambda: " 0 fetched" not in progress(slow) and "100 files found" in progress(slow))
        refused = run_spiderfs("warm", slow.point, "val")
        assert refused.returncode == 1
        assert f"{slow.point} is being warmed already, " in refused.stderr
        command.send_signal(number)
        out, err = command.communicate(timeout=30)
    assert (command.returncode, out) == (1, "")
    assert err.startswith("spiderfs: ended after ")
    assert err.endswith(" of 100 files: run it again to resume\n")
    assert progress(slow).startswith("ended: 100 files found, ")
    # Two files may still come: those that the source has been asked for.
    there = len(slow.cached())
    time.sleep(1.5)
    assert len(slow.cached()) <= there + 2 < 50
    slow.change("source.latency_ms", 0)
    done = run_spiderfs("warm", slow.point)
    assert done.returncode == 0, done.stderr
    eventually(lambda: slow.cached() == set(SIZES))


def test_the_daemon_goes_on_by_itself_where_it_is_told_to(slow: Mounted) -> None:
    done = run_spiderfs("warm", slow.point, "train/a", "--detach")
    assert (done.returncode, done.stderr) == (0, "")
    assert progress(slow).startswith("working: ")
    slow.change("source.latency_ms", 0)
    eventually(lambda: progress(slow).startswith("idle: 25 files found, 25 fetched (100000 bytes), "))
    # And an empty line ends it, for those who write to the file themselves.
    slow.change("source.latency_ms", 500)
    assert run_spiderfs("warm", slow.point, "--detach").returncode == 0
    slow.control("warm").write_text("\n")
    eventually(lambda: progress(slow).startswith("ended: "))


def test_ctrl_c_ends_the_look_up_of_names_at_a_source_that_hangs(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", allowed=("not answered", "unanswered"), source__timeout_s=20) as mount:
        mount.change("source.hang", 1)
        with begin(mount.point, "--names") as command:
            eventually(lambda: mount.metric("source_requests") > 1, what="a question that hangs")
            command.send_signal(signal.SIGINT)
            out, err = command.communicate(timeout=15)
        assert (command.returncode, out) == (1, "")
        assert err.startswith("spiderfs: ended after ")
        assert err.endswith(": run it again to resume\n")
        mount.change("source.hang", 0)


def test_names_alone_fetch_nothing(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", capacity="10MiB") as mount:
        done = run_spiderfs("warm", mount.point, "--names")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "106 names in 7 directories\n"
        assert mount.cached() == set()
        asked = mount.metric("source_requests")
        assert {os.stat(mount.point / name).st_size for name in SIZES} == {4_000}
        assert mount.metric("source_requests") == asked
        (mount.point / "train").stat()
        failed = run_spiderfs("warm", mount.point, "--names", "nothing")
        assert (failed.returncode, failed.stderr) == (
            1,
            f"spiderfs: {mount.point} has no file or directory nothing: check the path\n",
        )


# -- spiderfs evict


def test_what_is_named_leaves_the_cache(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_files(source, {f"{kind}/{number}": 1000 for kind in ("a", "b", "c") for number in range(5)})
    with mounted(source, tmp_path / "m", capacity="10MiB") as mount:

        def evicted(*paths: str) -> str:
            done = run_spiderfs("evict", mount.point, *paths)
            assert (done.returncode, done.stderr) == (0, "")
            return done.stdout

        assert run_spiderfs("warm", mount.point).returncode == 0
        eventually(lambda: len(mount.cached()) == 15)
        (source / "a/0").unlink()  # gone from the source, and still cached
        assert evicted("a") == "5 records evicted\n"
        partly = run_spiderfs("evict", mount.point, f"{mount.point}/b/*", "absent")
        assert (partly.returncode, partly.stdout) == (1, "5 records evicted\n")
        assert partly.stderr.endswith("has no file or directory absent: check the path\n")
        assert len(mount.cached()) == 5
        nothing = run_spiderfs("evict", mount.point, "**/x")
        assert (nothing.returncode, nothing.stdout) == (1, "")
        assert nothing.stderr == f"spiderfs: {mount.point} has no file or directory **/x: check the path\n"
        assert evicted("a/*") == "0 records evicted\n"
        assert (mount.point / "b/1").read_bytes() == (source / "b/1").read_bytes()
        assert evicted(str(mount.point)) in ("5 records evicted\n", "6 records evicted\n")
        outside = run_spiderfs("evict", mount.point, "../x")
        assert outside.stderr.startswith("spiderfs: ../x lies outside of the mount")
        assert run_spiderfs("evict", mount.point).returncode == 2


# -- limits on the bytes from the source, of what is fetched before a reader waits for it

SIZE, FILES = 100_000, 40


def fetched(mount: Mounted) -> int:
    return round(mount.metric("origin_bytes") / SIZE)


def test_warming_keeps_to_its_limit_and_readers_do_not_wait_for_it(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {f"{number:02d}": SIZE for number in range(FILES)})
    with mounted(tmp_path / "source", tmp_path / "m", capacity="50MiB", background_bandwidth="100kB") as mount:
        assert run_spiderfs("warm", "--detach", mount.point).returncode == 0
        eventually(lambda: fetched(mount) >= 1)
        begun = time.monotonic()
        for number in range(FILES - 10, FILES):
            (mount.point / f"{number:02d}").read_bytes()
        took_s = time.monotonic() - begun
        # One a second, and those that were read.
        assert fetched(mount) <= 10 + took_s + 3
        assert fetched(mount) < FILES
        assert run_spiderfs("config", mount.point, "background_bandwidth=unlimited").returncode == 0
        eventually(lambda: fetched(mount) == FILES)


def test_a_plan_is_fetched_ahead_at_the_limit(tmp_path: Path) -> None:
    names = [f"{number:02d}" for number in range(FILES)]
    write_files(tmp_path / "source", dict.fromkeys(names, SIZE))
    with (
        mounted(tmp_path / "source", tmp_path / "m", capacity="50MiB", background_bandwidth="100kB") as mount,
        planned(mount, names) as tell,
    ):
        for taken, name in enumerate(names[:12]):
            tell(Progress("train", 0, taken + 1, taken))
            (mount.point / name).read_bytes()
        begun, before = time.monotonic(), fetched(mount)
        eventually(lambda: fetched(mount) >= before + 1)
        assert fetched(mount) <= before + (time.monotonic() - begun) + 3
        mount.change("background_bandwidth", "unlimited")
        eventually(lambda: fetched(mount) == FILES)
