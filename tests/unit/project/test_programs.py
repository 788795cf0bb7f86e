"""What a test starts can be interrupted, and ends with it: also where the tests run in the background."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import program

TESTS = Path(__file__).parents[2]
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
