"""Long measurements in slices: each ends by itself, and the same command goes on where it stopped."""

from __future__ import annotations

import argparse
import time

# The exit status when the time of a slice is over and something is left to do.
LEFT = 3


class TimeIsOver(Exception):
    """This slice has ended, and something is left to do; the message says what."""


class Slice:
    """How long this call may measure. A slice has time for one piece of work at least, however long that takes."""

    def __init__(self, minutes: float) -> None:
        self._ends_at = time.monotonic() + 60 * minutes
        self._longest_s = 0.0

    def took(self, seconds: float) -> None:
        """Note how long a piece of work took."""
        self._longest_s = max(self._longest_s, seconds)

    @property
    def over(self) -> bool:
        """Whether no further piece of work fits, if it takes as long as the longest one so far."""
        return self._longest_s > 0 and time.monotonic() + self._longest_s > self._ends_at


def add_minutes(parser: argparse.ArgumentParser, piece: str) -> None:
    """Add --minutes N; `piece` is what is not interrupted when they are over."""
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        metavar="N",
        help=f"begin no {piece} that would end later, and end with exit status {LEFT} if something is left (default: "
        "no limit)",
    )
