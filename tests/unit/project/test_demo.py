"""What scripts/demo refuses before it begins; what it shows is seen by running it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[3] / "scripts" / "demo.py"


def test_a_plot_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    plot = tmp_path / "missing" / "plot.png"
    done = subprocess.run(
        [sys.executable, DEMO, "--plot", plot], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert f"{plot} cannot be written: choose another file with --plot" in " ".join(done.stderr.split())
