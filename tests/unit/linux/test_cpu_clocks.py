"""The CPU time of a process and its children."""

from __future__ import annotations

import subprocess
import sys

from programs import program

from spiderfs.profiling.private_mount import tree_cpu_seconds

WORK = "import sys, time\nwhile time.process_time() < 0.1: pass\nprint(flush=True)\nsys.stdin.read()"


def test_children_count_while_they_live() -> None:
    # The shell itself does next to nothing. The tree of the tests' own process has children that come and go.
    command = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, WORK]
    with program(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        shell.stdout.readline()
        assert tree_cpu_seconds(shell.pid) >= 0.1
        # The child ends when nothing more can be read, and the shell with it.
    assert tree_cpu_seconds(shell.pid) == 0
