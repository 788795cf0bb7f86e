"""Which threads are to open again, on a machine that has just booted."""

from __future__ import annotations

import time

import pytest

from spiderfs.vfs.unstored_bytes import UnstoredBytes

pytestmark = pytest.mark.clock

THREAD, OTHER = 7, 8


def test_no_open_has_failed_on_a_machine_that_has_just_booted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.5)
    unstored = UnstoredBytes()
    assert not unstored.opens_again(THREAD)
    unstored.open_failed(THREAD)
    assert unstored.opens_again(THREAD)
    assert not unstored.opens_again(OTHER)
    unstored.open_succeeded(THREAD)
    assert not unstored.opens_again(THREAD)
