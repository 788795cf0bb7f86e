"""What the scripts refuse before they begin, what they leave alone, and that scripts/nfs ends its machine."""

from __future__ import annotations

import os
import re
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


def test_the_machine_ends_with_the_command(place: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        (place / "ready").unlink(missing_ok=True)
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


def test_what_cannot_be_done_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "missing" / "plot.png"
    command = [sys.executable, ROOT / "scripts/demo.py", "--plot", plot]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"{plot} cannot be written: choose another file with --plot" in " ".join(done.stderr.split())
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for options, said in (
        (["--case", "nonsense"], "there is no case nonsense; choose from "),
        (["--json", "/missing/results.json"], "/missing/results.json cannot be written: choose another"),
    ):
        monkeypatch.setattr(sys, "argv", ["nfs", *options])
        assert nfs.main() == 2
        assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_environments_of_others_are_left_alone(tmp_path: Path) -> None:
    """Others may use it: making it again would empty it under them."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/package").write_text("in use")
    (tmp_path / "link").symlink_to("shared")
    (tmp_path / "lock").touch()
    done = subprocess.run(
        [ROOT / "scripts/setup", tmp_path / "link", tmp_path / "lock"], capture_output=True, text=True, timeout=60
    )
    assert (tmp_path / "shared/package").read_text() == "in use"
    assert done.returncode == 1
    assert f"{tmp_path / 'link'} is a link: delete the link, then run this again" in done.stderr
    # It is not the one that users are told to make.
    made = re.findall(r"^python3 -m venv (\S+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert made == [".venv"]
    for script in (ROOT / "scripts").iterdir():
        named = re.findall(r"(?<![\w.])\.venv\S*", script.read_text()) if script.is_file() else []
        used = {re.match(r"\.venv[\w-]*", name)[0] for name in named}  # type: ignore[index]
        assert used <= {".venv-dev"} or script.name == "install-mount-helper", script


def test_clocks_have_just_begun_for_the_tests_of_clocks_where_the_kernel_allows_it() -> None:
    shows = "import time; print(time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))"
    script = """
        python=$0
        eval "$(sed -n '/^just_booted() {/,/^}/p' scripts/test)"
        words=$(just_booted)
        [ -z "$words" ] || $words "$0" -c "$1"
    """
    done = subprocess.run(
        ["bash", "-euc", script, sys.executable, shows],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(0 <= float(seconds) < 30 for seconds in done.stdout.split())
