"""Commands that are given a path below a mount that hangs."""

from __future__ import annotations

import threading

import pytest
from click.testing import CliRunner

from spiderfs.cli import control_files
from spiderfs.cli.main import main


@pytest.mark.parametrize("command", ["doctor", "bench", "status", "warm"])
def test_a_path_that_hangs_is_reported(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr(control_files, "ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(control_files, "mounted_at", lambda _: ends.wait(10))
    result = CliRunner().invoke(main, [command, "/nfs/imagenet"])
    ends.set()
    said = "spiderfs: /nfs/imagenet hangs: check its server, or detach the mount that it lies in\n"
    assert (result.exit_code, result.stderr) == (1, said)
