"""The wheel on Pythons that this machine has: installed, mounted, read, told by a hook, unmounted.

With --all they are all of those that are supported, each with all that the wheel asks for, which has wheels, so that
nothing may be compiled. Such a virtual environment is made once for each lock, below .venv-dev, which scripts/setup
makes again with a new lock.

Without --all the wheel is tried on the interpreter of the tests, beside the packages of the tests.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from mounting import ending, eventually, mounts_at
from PIL import Image
from programs import not_ignoring_interrupts, program

ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / "docs" / "examples" / "hook_numpy.py"
TRAINING = ROOT / "docs" / "examples" / "train" / "loop_pytorch.py"
LOCK = ROOT / "requirements.lock"
VENVS = Path(sys.prefix) / "interpreters"
MINORS = (11, 12, 13, 14)  # those of requires-python
INSTALL_S = 300.0  # the first time
COMMAND_S = 60.0

# What a call of a compiler comes to.
_NO_COMPILER = {"CC": "false", "CXX": "false"}


def run(*command: str | Path, within_s: float = COMMAND_S, **variables: str) -> str:
    """What a command prints; an AssertionError with all of it if it fails."""
    # Away from the checkout, for what is tried is the wheel.
    done = subprocess.run(
        command, cwd="/", env={**os.environ, **variables}, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def find_interpreter(minor: int) -> Path | None:
    if minor == sys.version_info.minor:
        return Path(sys.executable).resolve()
    name = f"python3.{minor}"
    places = [Path(place) for place in os.get_exec_path()] + sorted(Path.home().glob(".pyenv/versions/*/bin"))
    for candidate in (place / name for place in places):
        # A version manager's wrapper that has nothing behind it exists and fails.
        if (
            os.access(candidate, os.X_OK)
            and not subprocess.run([candidate, "-c", "import ensurepip"], stderr=subprocess.DEVNULL).returncode
        ):
            return candidate
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build in the checkout would find files of earlier ones."""
    tree, place = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("spiderfs", "trainer_hook"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", place, tree, within_s=INSTALL_S)
    return next(place.glob("*.whl"))


def environment_with(wheel: Path, interpreter: Path, minor: int) -> Path:
    """The directory of commands of a virtual environment with spiderfs, in the versions of the lock."""
    VENVS.mkdir(exist_ok=True)
    venv, stamp = VENVS / f"3.{minor}", VENVS / f"3.{minor}.stamp"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = (os.fspath(interpreter), project["dependencies"])
    wanted = hashlib.sha256(repr(asked).encode()).hexdigest()
    # What is imported compiles itself; most of what is installed is not.
    pip = (venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    with open(VENVS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            run(*pip, "--no-deps", "--force-reinstall", wheel, within_s=INSTALL_S)
        else:
            run(interpreter, "-m", "venv", "--clear", venv, within_s=INSTALL_S)
            # As a user installs it, but for the versions.
            pins = VENVS / "constraints"
            pins.write_text("".join(f"{pin}\n" for pin in pins_of(LOCK)))
            run(*pip, "--constraint", pins, wheel, within_s=INSTALL_S, **_NO_COMPILER)
            stamp.write_text(wanted)
    return venv / "bin"


def environment_beside_ours(wheel: Path, place: Path) -> Path:
    """The directory of commands of a virtual environment with the wheel, which finds all else where the tests do."""
    run(sys.executable, "-m", "venv", "--without-pip", place, within_s=INSTALL_S)
    commands = place / "bin"
    run(sys.executable, "-m", "pip", "--python", commands / "python", "install", "--quiet", "--no-deps", wheel)
    paths = {"base": os.fspath(place), "platbase": os.fspath(place)}
    # Of the packages there, those that lie somewhere else are not found, among them the checkout's spiderfs.
    Path(sysconfig.get_path("purelib", vars=paths), "ours.pth").write_text(sysconfig.get_path("purelib"))
    return commands


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_beside_ours(wheel, tmp_path_factory.mktemp("ours") / "venv")


def pins_of(lock: Path) -> list[str]:
    return [line.rstrip(" \\") for line in lock.read_text().splitlines() if not line.startswith((" ", "#"))]


def write_samples(source: Path) -> dict[Path, bytes]:
    rng = np.random.default_rng(1)
    for label in range(2):
        (source / str(label)).mkdir(parents=True)
        for number in range(24):
            np.save(source / str(label) / f"{number}.npy", rng.normal(3 * label, 1, 80))
    return {path.relative_to(source): path.read_bytes() for path in source.rglob("*.npy")}


def minors_to_try() -> list[int]:
    own = sys.version_info.minor
    others = [minor for minor in reversed(MINORS) if minor != own and find_interpreter(minor)]
    return [own, *others]


def test_the_wheel_mounts_and_learns(commands: Path, tmp_path: Path) -> None:
    mounts_and_learns(commands, sys.version_info.minor, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("minor", minors_to_try(), ids=lambda minor: f"3.{minor}")
def test_the_wheel_mounts_and_learns_on(minor: int, wheel: Path, tmp_path: Path) -> None:
    interpreter = find_interpreter(minor)
    assert interpreter is not None
    commands = environment_with(wheel, interpreter, minor)
    run(commands / "python", "-m", "pip", "check")
    mounts_and_learns(commands, minor, tmp_path)


@pytest.mark.thorough
def test_the_wheel_trains_planned_epochs(commands: Path, tmp_path: Path) -> None:
    source, point, cache = tmp_path / "source", tmp_path / "point", tmp_path / "cache"
    point.mkdir()
    for number in range(24):
        path = source / "train" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(path)
    with ending(cache, point, cache):
        run(commands / "spiderfs", "mount", source, point, "-o", f"cache_dir={cache}")
        # Without what the tests set: the checkout's modules would come first.
        assert "epoch 2" in run(commands / "python", TRAINING, point / "train", PYTHONPATH="", OMP_NUM_THREADS="1")
        shown = point / ".spiderfs" / "epochs"
        epochs = eventually(lambda: (rows := [*map(json.loads, shown.read_text().splitlines())])[1:] and rows)
        assert [row["samples"] for row in epochs] == [24, 24]
        assert epochs[1]["planned"] > 0
        run(commands / "spiderfs", "umount", point)


# Without torch, and with few images, for a whole demo takes a minute.
_DEMO = (
    "import sys; sys.modules['torch'] = None; from spiderfs.profiling import bench; bench.IMAGES = 60;"
    "from spiderfs.cli.main import main; main(['demo', '--epochs', '2'], prog_name='spiderfs')"
)


def demo_process(commands: Path, scratch: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    scratch.mkdir()
    variables = {**os.environ, "PYTHONPATH": "", "TMPDIR": str(scratch)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": "/", "env": variables}
    return program(commands / "python", "-c", _DEMO, **pipes)


@pytest.mark.thorough
def test_the_wheel_shows_what_a_plan_gains_without_torch(commands: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    with demo_process(commands, scratch) as process:
        told, errors = process.communicate(timeout=COMMAND_S)
    assert (process.returncode, errors) == (0, "")
    rows = {line[:26].strip(): line[26:].split() for line in told.splitlines() if " s " in line}
    assert [*rows] == ["directly from the source", "mount, LRU cache", "mount, plan"]
    # Of each: first epoch, s, later epochs, s, hits, fetched, unit.
    assert float(rows["mount, plan"][2]) < 0.8 * float(rows["directly from the source"][2])
    assert int(rows["mount, plan"][4].rstrip("%")) > int(rows["mount, LRU cache"][4].rstrip("%"))
    assert os.listdir(scratch) == []
    assert str(scratch) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_ended_leaves_nothing(commands: Path, tmp_path: Path, end: int) -> None:
    scratch = tmp_path / "scratch"
    not_ignoring_interrupts()
    with demo_process(commands, scratch) as process:
        assert process.stdout is not None
        while "directly" not in process.stdout.readline():
            assert process.poll() is None
        eventually(lambda: str(scratch) in Path("/proc/self/mountinfo").read_text())
        process.send_signal(end)
        assert process.communicate(timeout=COMMAND_S)[1] == "\nAborted!\n"
    assert process.returncode == 1
    assert os.listdir(scratch) == []
    assert str(scratch) not in Path("/proc/self/mountinfo").read_text()


def mounts_and_learns(commands: Path, minor: int, tmp_path: Path) -> None:
    source, point, cache = tmp_path / "source", tmp_path / "point", tmp_path / "cache"
    wanted = write_samples(source)
    point.mkdir()

    assert run(commands / "python", "-c", "import sys; print(sys.version_info[:2])") == f"(3, {minor})\n"
    with ending(cache, point, cache):
        run(commands / "spiderfs", "mount", source, point, "-o", f"cache_dir={cache},log_file={cache}/daemon.log")
        assert {path: (point / path).read_bytes() for path in wanted} == wanted
        assert "accuracy" in run(commands / "python", HOOK, point)
        assert len((point / ".spiderfs" / "scores").read_text().splitlines()) >= len(wanted)
        assert str(point) in run(commands / "spiderfs", "status")
        run(commands / "spiderfs", "umount", point)
        assert not mounts_at(point)
    log = (cache / "daemon.log").read_text()
    assert not any(word in log for word in ("WARNING", "ERROR", "Traceback")), log
