"""The tests: what runs before a commit, that what they start ends with them, and that nothing is forgotten."""

from __future__ import annotations

import ast
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import program

TESTS = Path(__file__).resolve().parents[2]
ROOT = TESTS.parent
COLLECTED = (
    "tests/fault",
    "tests/fuse/test_idle.py",
    "tests/fuse/test_interpreters.py",
    "tests/trainer/test_learned_ranges.py",
    "tests/unit/core/test_engine.py",
)


def collected(*options: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *options, *COLLECTED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"^tests/.*::.*$", done.stdout, re.MULTILINE))


def functions(items: set[str]) -> set[str]:
    return {item.partition("[")[0] for item in items}


@pytest.mark.thorough
def test_each_test_runs_in_some_way_before_a_commit_and_in_every_way_with_all() -> None:
    covering, everything, thorough = collected(), collected("--all"), collected("--all", "-m", "thorough")
    assert collected() == covering, "processes of xdist choose alike"
    assert covering < everything
    assert functions(everything) - functions(covering) == functions(thorough) - functions(covering)
    faults = {item for item in covering if item.startswith("tests/fault/")}
    for way in ("kernel", "pyfuse3", "immutable"):
        assert any(re.search(rf"[\[-]{way}[\]-]", item) for item in faults), way
    assert len(faults) < 0.7 * sum(item.startswith("tests/fault/") for item in everything)


# Reads nothing, has a child, and ends by no signal but SIGKILL.
STUBBORN = (
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print(subprocess.Popen(['sleep', '1000']).pid, flush=True)\n"
    "time.sleep(1000)"
)


def test_what_a_test_starts_can_be_interrupted_where_the_tests_run_in_the_background() -> None:
    interrupted = "import conftest, subprocess; print(subprocess.run(['sh', '-c', 'kill -INT $$; sleep 9']).returncode)"
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, interrupted],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"-{signal.SIGINT:d}\n", "")


def test_what_a_failed_test_has_started_ends_with_it() -> None:
    started = []

    def fail() -> None:
        with program(sys.executable, "-c", STUBBORN, stdout=subprocess.PIPE) as process:
            started.append((process, os.pidfd_open(int(process.stdout.readline()))))
            raise AssertionError

    with pytest.raises(AssertionError):
        fail()
    ((process, child),) = started
    assert process.returncode == -signal.SIGKILL
    try:
        # A pid file descriptor can be read when its process has ended.
        assert select.select([child], [], [], 30)[0], "its child still runs"
    finally:
        os.close(child)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def test_no_function_inside_another_is_forgotten() -> None:
    """A coroutine that a test forgets to run asserts nothing, and no one sees that."""
    forgotten = []
    for path in sorted(TESTS.rglob("*.py")):
        for outer in ast.walk(ast.parse(path.read_text())):
            if isinstance(outer, FUNCTIONS):
                used = {node.id for node in ast.walk(outer) if isinstance(node, ast.Name)}
                inner = [node for node in outer.body if isinstance(node, FUNCTIONS) and not node.decorator_list]
                forgotten += [f"{path.name}: {outer.name}.{node.name}" for node in inner if node.name not in used]
    assert forgotten == []
