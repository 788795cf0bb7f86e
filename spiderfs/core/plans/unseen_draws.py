"""Draws whose opens nobody hears of: where the kernel has a file's pages, it opens and reads the file by itself.

A reader says which samples its training loop has taken. News of their opens may come a little later, or up to AHEAD_S
seconds sooner; a sample counts as **unseen** when its open was not heard of before, nor within UNSEEN_AFTER_S seconds
afterwards. Each draw is either seen or unseen, and never both.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from spiderfs.core.policy import Key

# News of an open comes within some 30 ms.
UNSEEN_AFTER_S = 1.0
# How many opens are remembered, and how long, for draws that the reader has not told of yet. On a busy machine its
# messages come seconds late.
AHEAD_MOST, AHEAD_S = 4096, 3.0


class UnseenDraws:
    def __init__(self) -> None:
        # When each sample was taken whose open may yet be heard of, the latest time last; and all of them in order.
        self._awaited: dict[Key, list[float]] = {}
        self._order: deque[tuple[float, Key]] = deque()
        # When each sample was opened for a draw that the reader had not told of, the latest time last.
        self._ahead: OrderedDict[Key, float] = OrderedDict()

    def took(self, key: Key, now_s: float) -> None:
        """The loop took a sample; its open, if it was heard of, could not be told to be that of this draw."""
        opened_s = self._ahead.pop(key, None)
        if opened_s is not None and now_s - AHEAD_S < opened_s <= now_s:
            return
        self._awaited.setdefault(key, []).append(now_s)
        self._order.append((now_s, key))

    def heard(self, key: Key, opened_s: float) -> bool:
        """Whether this open is that of a sample which was taken before the news came; it is awaited no longer then."""
        for taken_s in self._awaited.get(key, ()):
            if opened_s <= taken_s:
                self._forget(key, taken_s)
                return True
        return False

    def heard_ahead(self, key: Key, opened_s: float) -> None:
        """Note an open that may be of a draw far beyond those that the reader has told of."""
        self._ahead[key] = opened_s
        self._ahead.move_to_end(key)
        if len(self._ahead) > AHEAD_MOST:
            self._ahead.popitem(last=False)

    def take(self, now_s: float) -> list[Key]:
        """The samples that were found to be unseen since the last call, once for each draw.

        What was taken at a time that is still to come is unseen too: then the clock was set back.
        """
        unseen = []
        while self._order and not now_s - UNSEEN_AFTER_S < self._order[0][0] <= now_s:
            taken_s, key = self._order.popleft()
            if taken_s in self._awaited.get(key, ()):
                self._forget(key, taken_s)
                unseen.append(key)
        return unseen

    def _forget(self, key: Key, taken_s: float) -> None:
        times = self._awaited[key]
        times.remove(taken_s)
        if not times:
            del self._awaited[key]
