"""The section of hubs: cached samples that stand in for their neighbours of the same label.

Hubs leave first in, first out, and their lists with them, so that the samples that are trained on in place of others
change. A hub stands in only so often per epoch, for a sample that is trained on again and again in many names costs
accuracy; then the next nearest hub takes over, and when there is none the real sample is read.

A hub belongs to one dataset (the list of samples that a trainer declared), which alone says who has the same label: it
never stands in for a reader of another one. Whoever publishes the redirects asks for those that `touched` names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from spiderfs.core.hints import Hub
from spiderfs.core.policy import Key

# With a third of all reads redirected to 2 % of the samples, each of them would be read 16 times per epoch.
MAX_STAND_INS = 8
# Neighbours kept of a hub's list, the nearest: 64 of them are some 4 kB.
MAX_NEIGHBOURS = 64


class Homophily:
    def __init__(self, max_stand_ins: int = MAX_STAND_INS, max_neighbours: int = MAX_NEIGHBOURS) -> None:
        if max_stand_ins < 0 or max_neighbours < 1:
            raise ValueError("a hub stands in at least 0 times, for at least one neighbour")
        self.max_stand_ins = max_stand_ins
        self._max_neighbours = max_neighbours
        self._hubs: OrderedDict[Key, Hub] = OrderedDict()
        # Neighbour -> hub -> distance.
        self._near: dict[Key, dict[Key, float]] = {}
        self._stood_in: dict[Key, int] = {}
        self._touched: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self._hubs)

    def __contains__(self, key: object) -> bool:
        return key in self._hubs

    def __iter__(self) -> Iterator[Key]:
        """Hubs, the oldest first."""
        return iter(self._hubs)

    def hub(self, key: Key) -> Hub:
        return self._hubs[key]

    def put(self, hub: Hub) -> None:
        """Add a hub as the youngest, or give one that is there a new list at its old age."""
        hub = hub.shortened(self._max_neighbours)
        if hub.key in self._hubs:
            self._unlink(self._hubs[hub.key])
        self._hubs[hub.key] = hub
        for neighbour, distance in zip(hub.neighbours, hub.distances, strict=True):
            self._near.setdefault(neighbour, {})[hub.key] = distance
            self._touched[neighbour] = None

    def remove(self, key: Key) -> None:
        """Take a hub out, and its list with it. How often it stood in is remembered until the epoch ends."""
        self._unlink(self._hubs.pop(key))

    def clear(self) -> None:
        """Take all hubs out."""
        for key in list(self._hubs):
            self.remove(key)

    def stand_in(self, dataset: str, key: Key) -> Key | None:
        """The nearest hub of a dataset that can still stand in for a sample in this epoch."""
        best: tuple[float, Key] | None = None
        for hub, distance in self._near.get(key, {}).items():
            if (
                self._hubs[hub].dataset == dataset
                and (best is None or distance < best[0])
                and self._stood_in.get(hub, 0) < self.max_stand_ins
            ):
                best = (distance, hub)
        return best[1] if best else None

    def datasets_of(self, key: Key) -> set[str]:
        """The datasets in which hubs have this sample in their lists."""
        return {self._hubs[hub].dataset for hub in self._near.get(key, {})}

    def stood_in(self, hub: Key) -> None:
        """Count one time that a reader was given this hub for another sample."""
        times = self._stood_in.get(hub, 0) + 1
        self._stood_in[hub] = times
        if times == self.max_stand_ins and hub in self._hubs:
            self._touched.update(dict.fromkeys(self._hubs[hub].neighbours))

    def new_epoch(self) -> None:
        """Let every hub stand in as often as is allowed again."""
        for key, times in self._stood_in.items():
            if times >= self.max_stand_ins and key in self._hubs:
                self._touched.update(dict.fromkeys(self._hubs[key].neighbours))
        self._stood_in.clear()

    def touch(self, key: Key) -> None:
        """Say that a sample came or went, so that its own stand-in may be another one, if any list names it."""
        if key in self._near:
            self._touched[key] = None

    def touch_all(self) -> None:
        self._touched.update(dict.fromkeys(self._near))

    def drain_touched(self) -> list[Key]:
        """The samples whose stand-in may have changed since the last call."""
        touched = list(self._touched)
        self._touched.clear()
        return touched

    def _unlink(self, hub: Hub) -> None:
        for neighbour in hub.neighbours:
            near = self._near[neighbour]
            del near[hub.key]
            if not near:
                del self._near[neighbour]
            self._touched[neighbour] = None
