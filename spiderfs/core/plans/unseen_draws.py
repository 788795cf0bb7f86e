"""Draws whose opens are not reported: where the kernel has a file's pages, it opens and reads the file by itself.

A reader reports which samples its training loop has taken. Their opens may be reported a little later, or up to AHEAD_S
seconds sooner; a sample counts as **unseen** when its open was not reported before, nor within UNSEEN_AFTER_S seconds
afterwards. Each draw is either seen or unseen, and never both.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import NamedTuple

from spiderfs.core.events import Access
from spiderfs.core.policy import Key

# An open is reported within some 30 ms.
UNSEEN_AFTER_S = 1.0
# How many opens are remembered, and how long, for draws that the reader has not reported yet. On a busy machine its
# messages come seconds late.
AHEAD_MOST, AHEAD_S = 4096, 3.0


class Draw(NamedTuple):
    """A sample that a reader drew in an epoch, and read at this time; `access` is its open, if that was reported.

    `known` is whether workers knew the reader when the sample was dispatched: before, they may have seen the open, and
    not known whose it was. A sample that `was_in_hand` at the reader's first report may have been opened earlier.
    """

    key: Key
    at_s: float
    epoch: int = 0
    known: bool = True
    access: Access | None = None
    was_in_hand: bool = False


class UnseenDraws:
    def __init__(self) -> None:
        # The draws of each sample whose open may yet be reported, the latest one last; and all of them in order.
        self._awaited: dict[Key, list[Draw]] = {}
        self._order: deque[Draw] = deque()
        # When each sample was opened for a draw that the reader had not reported, the latest time last.
        self._ahead: OrderedDict[Key, tuple[float, Access | None]] = OrderedDict()

    def took(
        self, key: Key, now_s: float, epoch: int = 0, known: bool = True, was_in_hand: bool = False
    ) -> Draw | None:
        """The loop took a sample; until now no one knew that its open, if it was reported, was of this draw.

        Returns the draw if it is seen by that.
        """
        opened_s, access = self._ahead.pop(key, (math.inf, None))
        if now_s - AHEAD_S < opened_s <= now_s:
            return Draw(key, opened_s, epoch, access=access)
        draw = Draw(key, now_s, epoch, known, was_in_hand=was_in_hand)
        self._awaited.setdefault(key, []).append(draw)
        self._order.append(draw)
        return None

    def opened(self, key: Key, opened_s: float, access: Access | None = None) -> Draw | None:
        """The draw of this open, if its sample was taken before the report; it is awaited no longer then."""
        for draw in self._awaited.get(key, ()):
            if opened_s <= draw.at_s:
                self._forget(draw)
                return draw._replace(at_s=opened_s, known=True, access=access)
        return None

    def opened_ahead(self, key: Key, opened_s: float, access: Access | None = None) -> None:
        """Note an open that may be of a draw far beyond those that the reader has reported."""
        self._ahead[key] = opened_s, access
        self._ahead.move_to_end(key)
        if len(self._ahead) > AHEAD_MOST:
            self._ahead.popitem(last=False)

    def take(self, now_s: float) -> list[Draw]:
        """The draws that were found to be unseen since the last call.

        What was taken at a time that is still to come is unseen too: then the clock was set back.
        """
        unseen = []
        while self._order and not now_s - UNSEEN_AFTER_S < self._order[0].at_s <= now_s:
            draw = self._order.popleft()
            if draw in self._awaited.get(draw.key, ()):
                self._forget(draw)
                unseen.append(draw)
        return unseen

    def _forget(self, draw: Draw) -> None:
        draws = self._awaited[draw.key]
        draws.remove(draw)
        if not draws:
            del self._awaited[draw.key]
