"""`spiderfs warm`: what it writes to the daemon, what it shows, and how it ends; the daemon is a list of lines."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from commands import looks_mounted, refusal, spiderfs
from reading import write_contents

from spiderfs.cli import warm
from spiderfs.errors import SpiderfsError
from spiderfs.linux.mounts import Mount
from spiderfs.shared.warming import Warming


class Daemon:
    """What the command reads, one after the other and the last for good, and what it has written."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.says: list[Warming | BaseException] = [Warming()]
        self.restarts = [0]
        self.acted = 3
        self.capacity_bytes = 1 << 30

    def read(self, mount: Mount, name: str) -> str:
        if name in ("unpin", "evict"):
            return f"{self.acted} by the last request\n"
        assert name == "warm"
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(said, BaseException):
            raise said
        return said.line()

    def stats(self, mount: Mount) -> dict[str, Any]:
        restarts = self.restarts.pop(0) if len(self.restarts) > 1 else self.restarts[0]
        pins = {"files": 1234, "bytes": 1 << 20, "limit_bytes": 5 << 20}
        return {"metrics": {"manager_restarts": restarts}, "capacity_bytes": self.capacity_bytes, "pins": pins}

    def write(self, mount: Mount, name: str, text: str, timeout_s: float = 0.0) -> None:
        self.written.append(text if name == "warm" else f"{name}: {text}")


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = looks_mounted(monkeypatch, tmp_path)
    write_contents(here, dict.fromkeys(("train/cat/1", "train/cat/2", "train/dog/1", "val/1"), b"x"))
    return here


@pytest.fixture
def daemon(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    daemon = Daemon()
    monkeypatch.setattr(warm, "read_control", daemon.read)
    monkeypatch.setattr(warm, "read_stats", daemon.stats)
    monkeypatch.setattr(warm, "write_control", daemon.write)
    monkeypatch.setattr(warm, "_LOOK_INTERVAL_S", 0.0)
    return daemon


def test_paths_are_below_the_mount(mounted: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    (mounted.parent / "link").symlink_to(mounted)
    monkeypatch.chdir(mounted.parent)
    for point in (mounted, "mnt", mounted.parent / "link"):
        daemon.written.clear()
        paths = ["train/cat", f"{mounted}/val/1", "./train/../train/dog/", "*/[1", "val"]
        assert spiderfs("warm", point, *paths).exit_code == 0
        assert daemon.written == ["train/cat\nval/1\ntrain/dog\n*/[1\nval\n"]
    daemon.written.clear()
    assert spiderfs("warm", "link", mounted.parent / "link/val").exit_code == 0
    assert daemon.written == ["val\n"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/nfs/a/train", "/nfs/a/train lies outside of the mount at {}: write a path below it"),
        ("../mnt2", "../mnt2 lies outside of the mount at {}: write a path below it"),
        ("{}2", "{}2 lies outside of the mount at {}: write a path below it"),
        ("tarin", "{} has no file or directory tarin: check the path"),
        ("train/cat/1/x", "{} has no file or directory train/cat/1/x: check the path"),
        ("a\nb", "a b has a newline, and a list has one path a line: write ? in its place"),
    ],
)
def test_a_path_that_cannot_be_meant_is_refused_first(mounted: Path, daemon: Daemon, path: str, said: str) -> None:
    expected = f"spiderfs: {said.replace('{}', str(mounted))}\n"
    assert refusal("warm", mounted, "train", path.replace("{}", str(mounted))) == expected
    assert daemon.written == []


def test_a_link_means_what_it_leads_to(mounted: Path, daemon: Daemon, tmp_path: Path) -> None:
    (mounted / "latest").symlink_to("train")
    (mounted / "away").symlink_to(tmp_path)
    (mounted / "round").symlink_to("round")
    assert spiderfs("warm", mounted, "latest/cat").exit_code == 0
    assert spiderfs("warm", mounted, "round").exit_code == 0, "the daemon says what is wrong"
    assert daemon.written == ["train/cat\n", "round\n"]
    assert refusal("warm", mounted, "away") == (
        f"spiderfs: {tmp_path} lies outside of the mount at {mounted}: write a path below it\n"
    )


def test_a_list_on_stdin_comes_in_pieces(mounted: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_PIECE_BYTES", 20)
    lines = [b"train/cat/1", b"", b" odd \xff name", os.fsencode(mounted) + b"/val", b"not/checked/here"]
    assert spiderfs("warm", mounted, "-", stdin=b"\n".join(lines)).exit_code == 0
    assert daemon.written == ["train/cat/1\n odd \udcff name\n", "val\nnot/checked/here\n"]
    daemon.written.clear()
    assert "/etc lies outside of the mount" in refusal("warm", mounted, "-", stdin=b"train/cat/1\ntrain/cat/2\n/etc")
    assert daemon.written == ["train/cat/1\ntrain/cat/2\n", "\n"], "what was begun is ended"
    assert refusal("warm", mounted, "-") == "spiderfs: there is no path on the standard input: write one a line\n"


@pytest.mark.parametrize(
    ("ended_by", "said"),
    [
        (KeyboardInterrupt(), "ended after 2 of 7 files found so far: run it again to resume"),
        (TimeoutError(), "the daemon of {} does not answer: detach it with 'spiderfs umount --lazy {}'"),
        (OSError(107, "gone"), "the daemon of {} is dead: unmount with 'spiderfs umount {}', or mount again"),
    ],
)
def test_the_daemons_work_ends_with_it(mounted: Path, daemon: Daemon, ended_by: BaseException, said: str) -> None:
    ended = Warming(searching=True, ended=True, found=7, fetched=2, left=5)
    daemon.says = [Warming(), Warming(searching=True), ended_by, ended]
    assert refusal("warm", mounted) == f"spiderfs: {said.replace('{}', str(mounted))}\n"
    assert daemon.written == [".\n", "\n"]


def test_it_fails_where_files_are_not_there(mounted: Path, daemon: Daemon) -> None:
    daemon.says = [Warming(), Warming(found=5, fetched=3, failed=1200, missing=2, unknown="tarin\x1b")]
    result = spiderfs("warm", mounted, "-", stdin=b"tarin")
    assert (result.exit_code, result.stderr) == (
        1,
        "spiderfs: 1,200 files or directories could not be read (see the daemon's log);"
        f" {mounted} has no file or directory for 2 of these paths, for example tarin\\x1b\n",
    )
    daemon.says = [Warming(), Warming(ended=True, found=5, fetched=3, left=2)]
    assert "ended after 3 of 5 files" in refusal("warm", mounted)


@pytest.mark.parametrize("found", [0, 5], ids=["before any file was found", "later"])
def test_a_manager_that_was_started_again_has_forgotten_all(mounted: Path, daemon: Daemon, found: int) -> None:
    daemon.says = [Warming(), Warming(searching=True, found=found, left=found), Warming()]
    daemon.restarts = [1, 2]
    assert f"the manager of {mounted} was restarted" in refusal("warm", mounted)


def test_it_says_that_the_cache_is_smaller_than_what_was_fetched(mounted: Path, daemon: Daemon) -> None:
    daemon.says = [Warming(), Warming(found=5, fetched=5, fetched_bytes=5 << 20)]
    daemon.capacity_bytes = 2 << 20
    result = spiderfs("warm", mounted)
    assert (result.exit_code, result.stdout) == (0, "5 files fetched (5.0 MiB) in 0:00, 0 were cached before\n")
    assert result.stderr == ("spiderfs: warning: the cache holds 2.0 MiB, so it does not have all of these files\n")


def test_pinning_fails_where_pins_have_no_room(mounted: Path, daemon: Daemon) -> None:
    daemon.says = [Warming(), Warming(), Warming(found=1005, fetched=5, roomless=1000)]
    result = spiderfs("pin", mounted, "train")
    assert (result.exit_code, result.stderr) == (
        1,
        "spiderfs: 1,000 files are not pinned: pinned files may take half of the cache, so give it more with 'spiderfs"
        f" config {mounted} capacity=SIZE', or unpin others\n",
    )


@pytest.mark.parametrize("command", ["evict", "unpin"])
def test_globs_and_lists_that_mean_nothing_are_an_error(mounted: Path, daemon: Daemon, command: str) -> None:
    absent, listed = ["x*", "train/**/3"], b"x*\nval/2\n"
    # What is gone from the source may be cached.
    assert spiderfs(command, mounted, *absent).exit_code == 0
    daemon.acted = 0
    for arguments, stdin in ((absent, b""), (["-"], listed)):
        said = f"spiderfs: {mounted} has no file or directory for 2 of these paths, for example x*\n"
        assert refusal(command, mounted, *arguments, stdin=stdin) == said
    # Files that the mount has, and the cache has not.
    for arguments, stdin in (([*absent, "train/**/2"], b""), (["-"], listed + b"val/1\n")):
        assert spiderfs(command, mounted, *arguments, stdin=stdin).exit_code == 0


def test_a_broken_terminal_is_not_the_mounts(mounted: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(click, "echo", full)
    with pytest.raises(SpiderfsError, match="the progress cannot be shown: No space left on device"):
        warm.warm.callback(str(mounted), (), False, False)  # type: ignore[misc]


def test_without_a_terminal_it_prints_lines(mounted: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_LINE_INTERVAL_S", 0.0)
    daemon.says = [
        Warming(),
        Warming(searching=True, found=1500, fetched=500, left=1000, fetched_bytes=1 << 20, left_bytes=3 << 20),
        Warming(found=1500, fetched=1500, fetched_bytes=4 << 20),
    ]
    assert spiderfs("warm", mounted).stdout.splitlines() == [
        "500 of 1,500 files found so far, 1.0 MiB, 3.0 MiB left",
        "1,500 files fetched (4.0 MiB) in 0:00, 0 were cached before",
    ]


def test_the_rate_and_the_time_that_is_left() -> None:
    warming = Warming(found=10, left=5, fetched_bytes=1 << 20, left_bytes=90 << 20)
    assert warm._said(warming, 1 << 20) == "5 of 10 files, 1.0 MiB, 90.0 MiB left, 1.0 MiB/s, 1:30 to go"
    assert warm._said(warming, 1 << 12).endswith("4.0 KiB/s, 6:24:00 to go")


def test_on_a_terminal_a_bar_says_how_far_it_is(mounted: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, int, int | None]] = []
    bar = warm._bar

    class Bar:
        def __enter__(self) -> Callable[[str, int, int | None], None]:
            self.bar = bar()
            show = self.bar.__enter__()
            return lambda *shown: (lines.append(shown), show(*shown))[1]  # type: ignore[func-returns-value]

        def __exit__(self, *exc: object) -> None:
            self.bar.__exit__(*exc)  # type: ignore[arg-type]

    monkeypatch.setattr(warm, "_shown", Bar)
    daemon.says = [
        Warming(),
        Warming(searching=True, found=4, left=4),
        Warming(found=4, left=1, fetched=3),
        Warming(found=4, fetched=4),
    ]
    assert spiderfs("warm", mounted).exit_code == 0
    assert [shown[1:] for shown in lines] == [(0, None), (3, 4)]


def test_no_one_waits_long_for_a_silent_daemon(mounted: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_: Mount) -> dict[str, Any]:
        raise TimeoutError

    monkeypatch.setattr(warm, "read_stats", silent)
    assert "does not answer: detach it with" in refusal("warm", mounted, "--names")
    for command in ("pin", "unpin", "evict"):
        assert "does not answer: detach it with" in refusal(command, mounted, "train")
    assert daemon.written == []
