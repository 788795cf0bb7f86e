"""The wheel on Pythons that this machine has: installed, mounted, read, told by a hook, unmounted.

They are that of .venv and the newest other one that is supported; all of them with SPIDERFS_ALL_PYTHONS=1. An
interpreter's virtual environment is made once for each lock, below .venv, which scripts/setup makes anew with a new
lock. Another one than that of .venv is tried only where it can compile hnswlib, which takes most of the time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from mounting import ending, mounts_at

ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / "docs" / "examples" / "hook_numpy.py"
LOCK = ROOT / "requirements.lock"
VENVS = ROOT / ".venv" / "interpreters"
MINORS = (11, 12, 13, 14)  # those of requires-python
INSTALL_S = 300.0  # the first time: most of it compiles hnswlib
COMMAND_S = 60.0

_COMPLETE = """
import ensurepip, os, sysconfig
raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
"""
_NEIGHBOURS = """
import hnswlib, numpy
index = hnswlib.Index("l2", 4)
index.init_index(10)
index.add_items(numpy.eye(4, dtype=numpy.float32))
assert index.knn_query(numpy.eye(4, dtype=numpy.float32), k=1)[0].ravel().tolist() == [0, 1, 2, 3]
"""


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
            and not subprocess.run([candidate, "-c", _COMPLETE], stderr=subprocess.DEVNULL).returncode
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
    """The directory of commands of a virtual environment with spiderfs[mount], in the versions of the lock."""
    VENVS.mkdir(exist_ok=True)
    venv, stamp = VENVS / f"3.{minor}", VENVS / f"3.{minor}.stamp"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = (os.fspath(interpreter), project["dependencies"], project["optional-dependencies"]["mount"])
    wanted = hashlib.sha256(repr(asked).encode()).hexdigest()
    # What is imported compiles itself; most of what is installed is not.
    pip = (venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    with open(VENVS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            run(*pip, "--no-deps", "--force-reinstall", wheel, within_s=INSTALL_S)
        else:
            run(interpreter, "-m", "venv", "--clear", venv, within_s=INSTALL_S)
            # As anybody installs it, but for the versions; pip's own word, so that hnswlib is built with them too.
            pins = VENVS / "constraints"
            pins.write_text("".join(f"{pin}\n" for pin in pins_of(LOCK)))
            run(*pip, f"{wheel}[mount]", within_s=INSTALL_S, PIP_CONSTRAINT=str(pins))
            stamp.write_text(wanted)
    return venv / "bin"


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
    return [own, *(others if os.environ.get("SPIDERFS_ALL_PYTHONS") else others[:1])]


@pytest.mark.parametrize("minor", minors_to_try(), ids=lambda minor: f"3.{minor}")
def test_the_wheel_mounts_and_learns(minor: int, wheel: Path, tmp_path: Path) -> None:
    interpreter = find_interpreter(minor)
    assert interpreter is not None
    commands = environment_with(wheel, interpreter, minor)
    source, point, cache = tmp_path / "source", tmp_path / "point", tmp_path / "cache"
    wanted = write_samples(source)
    point.mkdir()

    assert run(commands / "python", "-c", "import sys; print(sys.version_info[:2])") == f"(3, {minor})\n"
    run(commands / "python", "-m", "pip", "check")
    run(commands / "python", "-c", _NEIGHBOURS)
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
