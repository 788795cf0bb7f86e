"""What runs before a commit leaves no kind of test out, and with --all everything runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COLLECTED = (
    "tests/fault",
    "tests/fuse/test_idle.py",
    "tests/fuse/test_interpreters.py",
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
    assert covering < everything
    assert functions(everything) - functions(covering) == functions(thorough) - functions(covering)
    faults = {item for item in covering if item.startswith("tests/fault/")}
    for way in ("kernel", "pyfuse3", "immutable"):
        assert any(re.search(rf"[\[-]{way}[\]-]", item) for item in faults), way
    assert len(faults) < 0.7 * sum(item.startswith("tests/fault/") for item in everything)


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
