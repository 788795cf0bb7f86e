"""What scripts/setup leaves alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_an_environment_behind_a_link_is_left_alone(tmp_path: Path) -> None:
    """Others may use it: making it anew would empty it under them."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/package").write_text("in use")
    (tmp_path / "link").symlink_to("shared")
    (tmp_path / "lock").touch()
    done = subprocess.run(
        [ROOT / "scripts/setup", tmp_path / "link", tmp_path / "lock"], capture_output=True, text=True, timeout=60
    )
    assert (tmp_path / "shared/package").read_text() == "in use"
    assert done.returncode == 1
    assert f"{tmp_path / 'link'} is a link: delete the link, then run this again" in done.stderr
