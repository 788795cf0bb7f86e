"""What a person sees of a real mount: `spiderfs top` on a terminal, and that files just written are not cached yet."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mounting import eventually, mounted
from programs import program
from reading import write_files


@pytest.mark.opened_and_immutable
def test_files_just_written_are_said_not_to_be_cached_yet(source: Path, tmp_path: Path) -> None:
    write_files(source, {"old": 1000})
    with mounted(source, tmp_path / "m", capacity="10MiB", dir_ttl=0) as mount:
        assert "too new" not in mount.status()
        for number in range(5):
            (source / f"{number}").write_bytes(b"young")
            assert (mount.point / f"{number}").read_bytes() == b"young"
        assert mount.metric("opens_young") == 5
        assert "  too new        5 of the opens, of files younger than 2 s: not cached yet\n" in (mount.status())
        eventually(lambda: len(mount.logged("may still change: they are served, but not cached yet")) == 1)


class Terminal:
    """A terminal of 80 columns and 24 lines on which `spiderfs top` draws; `screen` is what stands there now."""

    def __init__(self, ours: int, theirs: int) -> None:
        self._ours, self._theirs = ours, theirs
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self._theirs)
        self.process: subprocess.Popen[Any]
        self.drawn = ""

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def read(self) -> None:
        """Take what was drawn in the meantime."""
        while select.select([self._ours], [], [], 0.1)[0]:
            self.drawn += os.read(self._ours, 1 << 16).decode(errors="replace")

    def shows(self, *texts: str) -> None:
        """Wait until all of this stands on one page, which fits."""

        def stands() -> bool:
            self.read()
            # Each page is drawn from the upper left corner on.
            pages = self.drawn.split("\x1b[H")[1:]
            lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", pages[-1]).splitlines() if pages else []
            assert len(lines) <= 24
            assert max(map(len, lines), default=0) <= 80
            page = " ".join(" ".join(lines).split())
            return all(" ".join(text.split()) in page for text in texts)

        eventually(stands, what=", ".join(texts))

    def ended(self) -> int:
        """Its exit status; the terminal is as it was."""
        eventually(lambda: (self.read(), self.process.poll() is not None)[1])
        self.read()
        assert "\x1b[?1049l" in self.drawn
        assert termios.tcgetattr(self._theirs) == self.before
        status: int = self.process.returncode
        return status


@contextlib.contextmanager
def top(*mountpoints: Path, timeout_s: float = 5.0) -> Iterator[Terminal]:
    """`timeout_s`: after which a mount counts as one that hangs."""
    runs = f"from spiderfs.cli import control_files, main; control_files.ANSWER_TIMEOUT_S = {timeout_s}; main.main()"
    ours, theirs = pty.openpty()
    try:
        terminal, streams = Terminal(ours, theirs), dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        command = (sys.executable, "-c", runs, "top", *mountpoints)
        with program(*command, env={**os.environ, "TERM": "xterm"}, **streams) as terminal.process:
            yield terminal
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("end", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), "q"])
def test_top_fits_the_terminal_and_leaves_it_as_it_was(source: Path, tmp_path: Path, end: int | str) -> None:
    write_files(source, {f"{number}": 1000 for number in range(20)})
    with mounted(source, tmp_path / "m", capacity="10MiB") as mount, top(mount.point) as terminal:
        terminal.shows("q quit   v view (overview)", "hit rate")
        for path in source.iterdir():
            (mount.point / path.name).read_bytes()
        terminal.shows("of 10.0 MiB, 20 records", "█")
        if isinstance(end, int):
            terminal.process.send_signal(end)
        else:
            terminal.press("v")
            terminal.shows("view (status)   space more", "policy spider", "on disk", "troubles none")
            terminal.press("\x1b[C\x1bOQxv")  # an arrow, F2 and x say nothing
            terminal.shows("view (metrics)   space more", "opens ")
            terminal.press(end)
        assert terminal.ended() == 0


def test_top_goes_from_mount_to_mount_and_leaves_one_that_hangs(source: Path, tmp_path: Path) -> None:
    write_files(source, {"a": 1000})
    with (
        mounted(source, tmp_path / "one") as one,
        mounted(source, tmp_path / "two") as two,
        top(one.point, two.point, timeout_s=0.5) as terminal,
    ):
        terminal.shows("mount", "n next mount (list)", str(one.point)[-20:], str(two.point)[-20:])
        terminal.press("n")
        terminal.shows(f"pid {one.supervisor.pid}", "n next mount (1 of 2)")
        processes = [two.manager(), *two.workers()]
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        try:
            terminal.press("n")
            terminal.shows("does not answer: detach it with", "n next mount (2 of 2)")
            pressed_at = time.monotonic()
            terminal.press("q")
            assert terminal.ended() == 0
            assert time.monotonic() - pressed_at < 15.0
        finally:
            for pid in processes:
                os.kill(pid, signal.SIGCONT)
