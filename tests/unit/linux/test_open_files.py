"""The limit on open files is raised as far as it may be."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
from spiderfs.linux.memory import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
allow_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("hard", [64, 500])
def test_the_limit_is_raised_as_far_as_it_may(hard: int) -> None:
    said = subprocess.run([sys.executable, "-c", _PROGRAM, str(hard)], capture_output=True, text=True, check=True)
    assert said.stdout.split() == [str(hard)] * 2
