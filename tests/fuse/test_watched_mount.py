"""What a person sees of a real mount: `spiderfs top` on a terminal, and that files just written are not cached yet."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from pathlib import Path

import mounting
import pytest
from mounting import eventually, mounted
from reading import write_files


@pytest.mark.opened_and_immutable
def test_files_just_written_are_said_not_to_be_cached_yet(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_files(source, {"old": 1000})
    with mounted(source, tmp_path / "m", capacity="10MiB", dir_ttl=0) as mount:
        assert "too new" not in mount.control("stats").read_text()
        for number in range(5):
            (source / f"{number}").write_bytes(b"young")
            assert (mount.point / f"{number}").read_bytes() == b"young"
        assert mount.metric("opens_young") == 5
        assert "too new          5 of the opens, of files younger than 2 s: not cached yet\n" in (
            mount.control("stats").read_text()
        )
        eventually(lambda: len(mount.logged("may still change: they are served, but not cached yet")) == 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_top_draws_a_page_that_fits_the_terminal_and_leaves_it_as_it_was(tmp_path: Path, number: int) -> None:
    source = tmp_path / "source"
    write_files(source, {f"{number}": 1000 for number in range(20)})
    with mounted(source, tmp_path / "m", capacity="10MiB") as mount:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {**os.environ, "TERM": "xterm"}
        command = [mounting.SPIDERFS, "top", mount.point]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        drawn = b""

        def sees() -> bool:
            nonlocal drawn
            for path in source.iterdir():
                (mount.point / path.name).read_bytes()
            with contextlib.suppress(OSError):  # EIO once it has ended
                drawn += os.read(ours, 1 << 16)
            return b"of 10.0 MiB, 20 records" in drawn and "█".encode() in drawn

        eventually(sees)
        process.send_signal(number)
        assert process.wait(30) == 0
        assert b"\x1b[?1049l" in os.read(ours, 1 << 16)
        os.close(ours)
