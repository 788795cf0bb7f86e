"""The CPU time of a process and its children."""

from __future__ import annotations

import os
import subprocess
import sys

from spiderfs.profiling.private_mount import tree_cpu_seconds

WORK = "import sys, time\nwhile time.process_time() < 0.1: pass\nprint(flush=True)\nsys.stdin.read()"


def test_children_count_while_they_live() -> None:
    before_s = tree_cpu_seconds(os.getpid())
    with subprocess.Popen([sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert tree_cpu_seconds(child.pid) >= 0.1
        assert tree_cpu_seconds(os.getpid()) >= before_s + 0.1
        child.kill()
    assert tree_cpu_seconds(child.pid) == 0
