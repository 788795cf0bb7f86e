"""What the scripts that make environments leave alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_an_environment_behind_a_link_is_left_alone(tmp_path: Path) -> None:
    """Others may use it: making it again would empty it under them."""
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


def test_the_environment_of_the_scripts_is_not_the_one_that_users_are_told_to_make() -> None:
    made = re.findall(r"^python3 -m venv (\S+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert made == [".venv"]
    for script in (ROOT / "scripts").iterdir():
        named = re.findall(r"(?<![\w.])\.venv\S*", script.read_text()) if script.is_file() else []
        used = {re.match(r"\.venv[\w-]*", name)[0] for name in named}  # type: ignore[index]
        assert used <= {".venv-dev"} or script.name == "install-mount-helper", script
