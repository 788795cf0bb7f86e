"""The figures that documents quote are still true, as far as small and short runs show it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# They count bytes, so they hold beside other tests too.
QUICK = ("lookahead", "planned_ranges", "far", "stall")


@pytest.mark.slow
@pytest.mark.thorough
def test_kept_figures_are_still_true(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.all", "--quick", "--out", tmp_path, "--only", *QUICK]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
