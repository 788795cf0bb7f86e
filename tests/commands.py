"""Commands that tests run in their own process, and directories that these take for mounts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from spiderfs.cli.main import main
from spiderfs.linux import mounts


def spiderfs(*arguments: str | Path, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def refusal(*arguments: str | Path, stdin: bytes = b"") -> str:
    """The one line that a failing command says."""
    result = spiderfs(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert result.stderr.startswith("spiderfs: ")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def mount_table(monkeypatch: pytest.MonkeyPatch, directory: Path, *lines: str) -> None:
    """Take these lines for the table of mounts."""
    monkeypatch.setattr(mounts, "MOUNT_TABLE", directory / "mountinfo")
    mounts.MOUNT_TABLE.write_text("".join(f"{line}\n" for line in lines))


def looks_mounted(monkeypatch: pytest.MonkeyPatch, directory: Path, **control: Any) -> Path:
    """A directory that looks like a mount: the mount table says so, and it has these control files."""
    point = directory / "mnt"
    (point / ".spiderfs").mkdir(parents=True)
    for name, text in control.items():
        (point / ".spiderfs" / name.replace("__", ".")).write_text(text)
    mount_table(monkeypatch, directory, f"101 27 0:50 / {point} ro - fuse.spiderfs /nfs/a ro")
    return point
