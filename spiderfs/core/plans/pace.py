"""How fast a reader goes through the positions of its plan, and when it comes to which."""

from __future__ import annotations

# A reader's pace is measured over this time, and averaged with the pace before.
PACE_WINDOW_S = 1.0
FIRST_PACE_S = 0.001
# A pace this many times slower than before may be a pause of the training: it counts only if the next is slow too.
PAUSE_FACTOR = 4


class Paced:
    """Times are computed from an anchor, so that they change together, and only when someone asks for it."""

    def __init__(self, now_s: float, position: int) -> None:
        self.pace_s = FIRST_PACE_S
        """Seconds from one position to the next."""
        # The pace is measured from the first batch on, not from the plan on: a training may begin much later.
        self._paced_at: tuple[float, int] | None = None
        self._anchor_pace_s = self.pace_s
        self._has_pace = self._may_have_paused = False
        self._anchor_at(now_s, position)

    def time_of(self, position: int) -> float:
        """When the reader will come to a position, by its pace; the time of what is in hand is over."""
        anchored_s, anchored = self._anchor
        return anchored_s + (position - anchored) * self._anchor_pace_s

    def _anchor_at(self, now_s: float, position: int) -> None:
        self._anchor = (now_s, position)
        self._anchor_pace_s = self.pace_s

    def _keep_pace(self, position: int, now_s: float) -> None:
        """The reader has come so far."""
        if self._paced_at is None:
            self._paced_at = (now_s, position)
        since_s, since = self._paced_at
        if now_s - since_s >= PACE_WINDOW_S and position > since:
            measured_s = (now_s - since_s) / (position - since)
            self._paced_at = (now_s, position)
            slow = self._has_pace and measured_s > PAUSE_FACTOR * self.pace_s
            self._may_have_paused = slow and not self._may_have_paused
            if not self._may_have_paused:
                self.pace_s = (self.pace_s + measured_s) / 2 if self._has_pace else measured_s
                self._has_pace = True
