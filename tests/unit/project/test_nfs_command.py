"""What scripts/nfs refuses before it begins; its machine ends however it is left, and its cases run in it alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import program

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import nfs  # noqa: E402

# A substitute for the emulator: it says that it runs, and runs until it is killed.
EMULATOR = "#!/bin/sh\necho $$ > {ready}.new\nmv {ready}.new {ready}\nexec sleep 1000\n"
# A program that runs the machine until it is ended from outside.
RUNNER = """
import signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import nfs, nfs_machine
signal.signal(signal.SIGTERM, nfs._interrupt)
place = Path(sys.argv[2])
with nfs_machine.machine(nfs_machine.Parts(place, place, place), place, "exit"):
    time.sleep(1000)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the parts of a machine, whose emulator is EMULATOR."""
    for name in ("bin", "boot", "lib/modules/6.1/kernel"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "bin/busybox").touch()
    (tmp_path / "boot/vmlinuz-6.1").touch()
    emulator = tmp_path / "bin/qemu-system-x86_64"
    emulator.write_text(EMULATOR.format(ready=tmp_path / "ready"))
    emulator.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_machine_ends_with_the_command(place: Path, number: signal.Signals) -> None:
    with program(sys.executable, "-c", RUNNER, ROOT / "scripts", place, stderr=subprocess.DEVNULL) as runner:
        until = time.monotonic() + 60
        while not (place / "ready").exists():
            assert time.monotonic() < until, "the emulator has not started"
            assert runner.poll() is None
            time.sleep(0.02)
        emulator = os.pidfd_open(int((place / "ready").read_text()))
        runner.send_signal(number)
        assert runner.wait(30) != 0
        # A pid file descriptor can be read when its process has ended.
        assert select.select([emulator], [], [], 30)[0], "the emulator still runs"
    os.close(emulator)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--case", "nonsense"], "there is no case nonsense; choose from "),
        (
            ["--json", "/missing/results.json"],
            "/missing/results.json cannot be written: choose another",
        ),
        (["--way", "v2"], "invalid choice: 'v2'"),
        (["--kernel", "mine"], "invalid choice: 'mine'"),
    ],
)
def test_what_is_unknown_is_refused_in_one_line(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["nfs", *options])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    try:
        status = nfs.main()
    except SystemExit as exc:
        status = int(str(exc.code))
    assert status == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
