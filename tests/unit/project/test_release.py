"""`scripts/release`, in a copy of the repository whose tests are said to pass or to fail."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_release_is_made_once_and_whole_or_not_at_all(tmp_path: Path) -> None:
    def run(*command: str, status: int = 0) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    who = {f"GIT_{role}_{part}": "someone@example" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    environment = {**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull}
    for name in ("pyproject.toml", "README.md", "LICENSE", "spiderfs", "trainer_hook", "scripts"):
        run("cp", "-r", str(ROOT / name), ".")
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    (tmp_path / ".gitignore").write_text(".venv\n__pycache__\ndist\n*.egg-info\nbuild\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 7.1.0 (unreleased)\n\nNew.\n\n## 7.0.0 (2020-01-01)\n")
    tests = tmp_path / "scripts" / "test"
    run("git", "init", "--quiet")

    def tests_end_with(status: int) -> None:
        tests.write_text(f"#!/bin/sh\nexit {status}\n")
        run("git", "add", ".")
        run("git", "commit", "--quiet", "--message", "a commit")

    tests_end_with(1)
    assert "write 'scripts/release VERSION'" in run("scripts/release", "7", status=1)
    assert "'## 7.2.0 (unreleased)'" in run("scripts/release", "7.2.0", status=1)
    run("scripts/release", "7.1.0", status=1)
    assert run("git", "status", "--porcelain") == "", "what fails leaves nothing"
    (tmp_path / "README.md").write_text("changed")
    assert "the working tree has changes" in run("scripts/release", "7.1.0", status=1)
    run("git", "checkout", "README.md")
    tests_end_with(0)
    assert "left to do: git push" in run("scripts/release", "7.1.0")
    assert sorted(path.name for path in (tmp_path / "dist").glob("*7*")) == [
        "spiderfs-7.1.0-py3-none-any.whl",
        "spiderfs-7.1.0.tar.gz",
    ]
    assert f"## 7.1.0 ({datetime.now(tz=UTC):%Y-%m-%d})" in (tmp_path / "CHANGELOG.md").read_text()
    assert run("git", "tag") == "v7.1.0\n"
    assert "the tag v7.1.0 exists" in run("scripts/release", "7.1.0", status=1)
