"""Keep what the scorer finds important, and hubs that stand in for what is not (SpiderCache, section 4.2).

Two sections that share no bytes. A missed sample enters "importance" if there is room or its score is above the lowest
there; a sample of unknown score only if there is room, so that without a trainer this is MinIO. The hub of each batch
enters "homophily", first in, first out. That section never holds more than its part of the share, 1 - ratio; what it
does not hold, importance may use, and gives back to hubs that come.

A hub whose bytes are not there waits for the next time that its sample is opened; a few wait at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from spiderfs.core.guided import Guided
from spiderfs.core.hints import Hub
from spiderfs.core.policy import Key, in_saved_order, saved_keys
from spiderfs.policies.parts.homophily import MAX_STAND_INS, Homophily
from spiderfs.policies.parts.importance import UNKNOWN, Importance

IMPORTANCE, HOMOPHILY = "importance", "homophily"

# r_start of SpiderCache eq. 8.
FIRST_RATIO = 0.9
# Hubs that wait for their bytes: those of the latest batches. Older ones no longer know their neighbours.
MAX_WAITING = 64


class Spider(Guided):
    name = "spider"
    sections = (IMPORTANCE, HOMOPHILY)
    foreseen = IMPORTANCE

    def __init__(self, ratio: float = FIRST_RATIO, max_stand_ins: int = MAX_STAND_INS) -> None:
        self.set_ratio(ratio)
        self._importance = Importance()
        self._homophily = Homophily(max_stand_ins)
        self._waiting: OrderedDict[Key, Hub] = OrderedDict()
        # Sample -> dataset -> stand-in, as they were last told, so that one can be taken back.
        self._told: dict[Key, dict[str, Key]] = {}

    # -- as every policy

    def limit(self, section: str, share_bytes: int, held_bytes: Mapping[str, int]) -> int:
        homophily = share_bytes - int(share_bytes * self._ratio)
        return homophily if section == HOMOPHILY else share_bytes - min(homophily, held_bytes[HOMOPHILY])

    def section_for(self, key: Key) -> str:
        return HOMOPHILY if key in self._waiting or key in self._homophily else IMPORTANCE

    def hit(self, key: Key, size: int) -> None:
        pass

    def missed(self, key: Key, size: int) -> None:
        pass

    def inserted(self, key: Key, size: int) -> None:
        hub = self._waiting.pop(key, None)
        if hub is None:
            self._importance.add(key)
        else:
            self._homophily.put(hub)
        self._homophily.touch(key)

    def removed(self, key: Key) -> None:
        if key in self._homophily:
            self._homophily.remove(key)
        else:
            self._importance.discard(key)
        self._homophily.touch(key)

    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        """A hub saves more reads than any one sample: hubs last."""
        if section == IMPORTANCE:
            return self._importance.ascending()
        if section == HOMOPHILY:
            return iter(self._homophily)
        return chain(self._importance.ascending(), self._homophily)

    def victims_for(self, key: Key, size: int, full: str | None) -> Iterator[Key]:
        if self.section_for(key) == IMPORTANCE:
            return self._importance.below(self.score(key))
        # Below its limit homophily takes back what importance has borrowed.
        return iter(self._homophily) if full == HOMOPHILY else self._importance.ascending()

    def score(self, key: Key) -> float:
        """Its importance, SpiderCache eq. 4."""
        return self._importance.score(key)

    def state(self) -> dict[str, Any]:
        """Scores are those of the members in importance; a scorer that was saved too knows all others."""
        order = list(self._importance.ascending())
        return {
            "ratio": self._ratio,
            "order": order,
            "scores": [self._importance.score(key) for key in order],
            "hubs": [_as_row(self._homophily.hub(key)) for key in self._homophily],
        }

    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        self.set_ratio(state.get("ratio", self._ratio))
        self._waiting.clear()
        self._homophily.clear()
        for hub in map(_from_row, state.get("hubs", ())):
            if hub.key in members:
                self._homophily.put(hub)
        scores = dict(zip(saved_keys(state.get("order", ())), state.get("scores", ()), strict=False))
        rest = (key for key in members if key not in self._homophily)
        order = in_saved_order(rest, scores)
        self._importance.refill((key, scores.get(key, self.score(key))) for key in order)

    # -- as a guided one

    def scored(self, key: Key, score: float) -> None:
        if not score > UNKNOWN:
            raise ValueError(f"a score is positive, not {score}")
        self._importance.set_score(key, score)

    def forget_list(self, dataset: str, keys: Iterable[Key]) -> None:
        """Hubs stay: they are members, and stand in again when the list is declared anew."""
        for key in keys:
            self._importance.forget(key)
        for key in [key for key, hub in self._waiting.items() if hub.dataset == dataset]:
            del self._waiting[key]

    def hub_found(self, hub: Hub) -> None:
        if hub.key in self._homophily:
            self._homophily.put(hub)
            return
        self._waiting[hub.key] = hub
        self._waiting.move_to_end(hub.key)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)

    def stand_in(self, dataset: str, key: Key) -> Key | None:
        if key in self._importance or key in self._homophily:
            return None
        return self._homophily.stand_in(dataset, key)

    def stood_in(self, hub: Key, wanted: Key) -> None:
        self._homophily.stood_in(hub)

    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        changes: list[tuple[str, Key, Key | None]] = []
        for key in self._homophily.drain_touched():
            told = self._told.pop(key, {})
            datasets = self._homophily.datasets_of(key)
            now = {dataset: hub for dataset in datasets if (hub := self.stand_in(dataset, key)) is not None}
            changes += [(dataset, key, hub) for dataset, hub in now.items() if told.get(dataset) != hub]
            changes += [(dataset, key, None) for dataset in told if dataset not in now]
            if now:
                self._told[key] = now
        return changes

    def forget_told(self) -> None:
        self._told.clear()
        self._homophily.touch_all()

    def new_epoch(self) -> None:
        self._homophily.new_epoch()

    @property
    def ratio(self) -> float:
        return self._ratio

    def set_ratio(self, ratio: float) -> None:
        if not 0 <= ratio <= 1:
            raise ValueError(f"the ratio of the sections lies between 0 and 1, not {ratio}")
        self._ratio = ratio


def _as_row(hub: Hub) -> list[Any]:
    return [hub.key, hub.dataset, list(hub.neighbours), list(hub.distances)]


def _from_row(row: Any) -> Hub:
    key, dataset, neighbours, distances = row
    return Hub(key, dataset, saved_keys(neighbours), list(distances))
