"""The teacher of a replay: it gives the hints of a trace to a policy, as the daemon gives those of a training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from spiderfs.core.engine import Engine
from spiderfs.core.guided import Adjustable, Guided
from spiderfs.core.hints import AtHand, Candidates, Epoch, Hint, Hub, Labels, Pinning, Ratio, Scored, WarmUp
from spiderfs.core.learning.teaching import Teaching
from spiderfs.core.policy import Key

NEVER = -1


class Teacher:
    """Teaches a guided policy the hints, each before its access."""

    def __init__(
        self, engine: Engine, sizes: Mapping[Key, int], hints: Sequence[tuple[int, Hint]], ratio: float | None
    ) -> None:
        self._engine = engine
        self._sizes = sizes
        self._hints = hints if isinstance(engine.policy, Guided) else ()
        self._next = 0
        # The bytes of samples that are at hand for the next hub or pins.
        self._at_hand: dict[Key, int] = {}
        self._epochs: Counter[str] = Counter()
        self._teaching = Teaching(engine, self._size_of)
        if ratio is not None:
            self._set_ratio(ratio)
        self.due = self._hints[0][0] if self._hints else NEVER

    def give(self, number: int) -> None:
        """Give all hints that are due before access `number`."""
        while self.due == number:
            self._give(self._hints[self._next][1])
            self._next += 1
            self.due = self._hints[self._next][0] if self._next < len(self._hints) else NEVER

    def choose(self, course_id: str, key: Key, hit: bool) -> Key:
        """The sample whose bytes a reader of this course gets for this one, which is cached if it is a `hit`."""
        found = None if hit else self._teaching.stand_in(course_id, key)
        return key if found is None else found

    def served(self, course_id: str, key: Key, given: Key) -> None:
        """A reader of this course asked for a sample, and gets these bytes."""
        self._teaching.served(course_id, key, given)

    def _give(self, hint: Hint) -> None:
        teaching = self._teaching
        match hint:
            case Scored(course_id, keys, scores):
                teaching.scored(course_id, keys, scores)
            case AtHand(key, size):
                self._at_hand[key] = size
            case Hub():
                teaching.hub_found(hint)
                self._at_hand.clear()
            case Candidates(course_id, hubs):
                found = next((hub for hub in hubs if not teaching.is_hub(course_id, hub.key)), None)
                # A hub that no access of the trace reads has no known size.
                if found is not None:
                    self._at_hand.update({found.key: self._sizes[found.key]} if found.key in self._sizes else {})
                    teaching.hub_found(found)
                    self._at_hand.clear()
            case Ratio(ratio):
                self._set_ratio(ratio)
            case Epoch(course_id, accuracy):
                teaching.epoch_ended(course_id, self._epochs[course_id], {}, accuracy)
                self._epochs[course_id] += 1
            case Labels(course_id, labels):
                teaching.begin(course_id, course_id, labels)
            case Pinning(course_id, keys):
                for _ in teaching.pin(course_id, keys):
                    pass
                self._at_hand.clear()
            case WarmUp(course_id, active):
                teaching.warm_up(course_id, active)

    def _set_ratio(self, ratio: float) -> None:
        if isinstance(self._engine.policy, Adjustable):
            self._teaching.pin_ratio(ratio)

    def _size_of(self, key: Key) -> int | None:
        return self._engine.members[key].size if key in self._engine.members else self._at_hand.get(key)
