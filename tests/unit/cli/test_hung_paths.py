"""Commands that are given a path below a mount that hangs."""

from __future__ import annotations

import threading

import pytest
from commands import refusal

from spiderfs.cli import control_files


@pytest.mark.parametrize("command", ["doctor", "bench", "status", "warm"])
def test_a_path_that_hangs_is_reported(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr(control_files, "ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(control_files, "mounted_at", lambda _: ends.wait(10))
    said = refusal(command, "/nfs/imagenet")
    ends.set()
    assert said == "spiderfs: /nfs/imagenet hangs: check its server, or detach the mount that it lies in\n"
