"""Handing bytes to whoever waits for them from the process that has read them, before anybody else hears of it.

A reader over a slow source waits for two wake-ups less so: the one of the process that answers requests, and that of
its task.
"""

from __future__ import annotations

from typing import Protocol


class Delivery(Protocol):
    """Two messages to the same descriptor: `head` and the bytes behind it, then `answer`."""

    head: bytes
    answer: bytes
    done: bool
    """Set once both were written, or once nobody waited for them any more."""
