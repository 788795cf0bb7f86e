"""A daemon of which something is other than usual."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def spiderfs_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let `mounted` use a program `spiderfs` that first runs the given code."""

    def begin(what: str) -> None:
        program = tmp_path / "spiderfs"
        program.write_text(f"#!{sys.executable}\nfrom spiderfs.cli.main import main\n{what}\nmain()\n")
        program.chmod(0o755)
        monkeypatch.setattr("mounting.SPIDERFS", program)

    return begin


@pytest.fixture
def short_pauses() -> str:
    """Code for `spiderfs_after`: processes that die again and again pause no longer than after their second death, and
    so do requests."""
    return """
from spiderfs.daemon import deaths, restarts
from spiderfs.fuse import resent_requests

restarts.LONGEST_PAUSE_S = restarts.LONGEST_BUSY_PAUSE_S = restarts.FIRST_PAUSE_S
deaths.MANAGER_PAUSE_S = restarts.FIRST_PAUSE_S
resent_requests.LONGEST_BEHIND_S = 0.1
"""
