"""Answering the reader that waits for a file directly from the process that has read the file.

The reader then waits for two wake-ups fewer: that of the process that answers requests, and that of its task.
"""

from __future__ import annotations

from typing import Protocol


class Delivery(Protocol):
    """One answer that waits for a file's content. Only the maker of the delivery knows what the answer means."""

    done: bool
    """Set once the answer was written, or once nobody waited for it any more: then nobody else may answer."""

    def messages(self, size: int) -> tuple[bytes, bytes] | None:
        """The two texts to write for a content of `size` bytes; None if the reading process must not answer.

        The reading process writes the first text with the content behind it, and then the second one, each in one call;
        no second one, if it is empty.
        """
