"""Mounts of an ordinary user, through fusermount3, in tests that root runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

UID = 65534

# The modules are imported before root is given up, because they may lie where only root can read them; lmdb imports
# modules when it opens an environment.
_BEGIN = f"""
import importlib, os, pkgutil, sys, time
import click, lmdb, pydantic, spiderfs.cli.main, spiderfs.cli.mount, spiderfs.daemon.supervisor
from spiderfs.policies import mountable_policies
mountable_policies()
for module in pkgutil.iter_modules(lmdb.__path__, "lmdb."):
    if not module.name.endswith(("__main__", "tool", "cffi")):
        importlib.import_module(module.name)
source, point, options = sys.argv[1:]
os.setgroups([]); os.setgid({UID}); os.setuid({UID})

def run(*arguments):
    try:
        spiderfs.cli.main.main(list(arguments))
    except SystemExit as exc:
        assert not exc.code, exc.code

"""


def run_as_ordinary_user(program: str, source: Path, point: Path, options: str) -> str:
    """What a Python program of this user prints; it has `source`, `point`, `options`, and `run` for commands."""
    command = [sys.executable, "-c", _BEGIN + program, source, point, options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def let_everybody_in(place: Path) -> None:
    """pytest closes the directories above a test's to all other users, and scripts/test that of the run."""
    for path in (place, *place.parents):
        found = path.stat()
        if path.is_relative_to(tempfile.gettempdir()) and found.st_uid == os.getuid():
            path.chmod(found.st_mode | 0o055)
