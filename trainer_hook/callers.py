"""The objects whose methods are running: how code that a library calls finds out for what it is called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def callers() -> Iterator[Any]:
    """The `self` of each function that runs in this thread, from the caller's own on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # A generator that calls this stands between the frames.
        if "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back
