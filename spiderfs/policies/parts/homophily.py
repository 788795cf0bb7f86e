"""The section of hubs: cached samples that stand in for their neighbours of the same label.

Hubs leave first in, first out, together with their neighbours, so that the samples that stand in change over time. A
hub stands in only a limited number of times per epoch, because a training that gets the same sample again and again
under many names loses accuracy. After that the next nearest hub stands in; if there is none, the reader gets the sample
itself.

A hub belongs to one list, because labels belong to a list: it never stands in for a reader of another list.
`drain_touched` names the samples whose redirects have to be published anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from spiderfs.core.hints import Hub
from spiderfs.core.policy import Key

# How often a hub stands in per epoch. If a third of all reads were redirected to 2 % of the samples, without a limit
# each of these would be read 16 times per epoch.
MAX_STAND_INS = 8
# So many neighbours of a hub are remembered, the nearest ones: 64 of them take some 4 kB.
MAX_NEIGHBOURS = 64


class Homophily:
    def __init__(self, max_stand_ins: int = MAX_STAND_INS, max_neighbours: int = MAX_NEIGHBOURS) -> None:
        if max_stand_ins < 0 or max_neighbours < 1:
            raise ValueError("max_stand_ins must be at least 0, and max_neighbours at least 1")
        self.max_stand_ins = max_stand_ins
        self._max_neighbours = max_neighbours
        self._hubs: OrderedDict[Key, Hub] = OrderedDict()
        # The distance to each hub that a sample is a neighbour of.
        self._near: dict[Key, dict[Key, float]] = {}
        # How often each hub has stood in during this epoch.
        self._stood_in: dict[Key, int] = {}
        self._touched: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self._hubs)

    def __contains__(self, key: object) -> bool:
        return key in self._hubs

    def __iter__(self) -> Iterator[Key]:
        """All hubs, the oldest first."""
        return iter(self._hubs)

    def hub(self, key: Key) -> Hub:
        return self._hubs[key]

    def put(self, hub: Hub) -> None:
        """Add a hub as the youngest; a hub that is there already gets new neighbours, and keeps its age."""
        hub = hub.shortened(self._max_neighbours)
        if hub.key in self._hubs:
            self._unlink(self._hubs[hub.key])
        self._hubs[hub.key] = hub
        for neighbour, distance in zip(hub.neighbours, hub.distances, strict=True):
            self._near.setdefault(neighbour, {})[hub.key] = distance
            self._touched[neighbour] = None

    def remove(self, key: Key) -> None:
        """Remove a hub and its neighbours; how often it stood in is remembered until the epoch ends."""
        self._unlink(self._hubs.pop(key))

    def clear(self) -> None:
        """Remove all hubs."""
        for key in list(self._hubs):
            self.remove(key)

    def stand_in(self, course_id: str, key: Key) -> Key | None:
        """The nearest hub of a list that may still stand in for a sample in this epoch; None if there is none."""
        best: tuple[float, Key] | None = None
        for hub, distance in self._near.get(key, {}).items():
            if (
                self._hubs[hub].course_id == course_id
                and (best is None or distance < best[0])
                and self._stood_in.get(hub, 0) < self.max_stand_ins
            ):
                best = (distance, hub)
        return best[1] if best else None

    def lists_of(self, key: Key) -> set[str]:
        """The lists that have a hub with this sample among its neighbours."""
        return {self._hubs[hub].course_id for hub in self._near.get(key, {})}

    def stood_in(self, hub: Key) -> None:
        """Count that a reader got this hub in the name of another sample."""
        times = self._stood_in.get(hub, 0) + 1
        self._stood_in[hub] = times
        if times == self.max_stand_ins and hub in self._hubs:
            self._touched.update(dict.fromkeys(self._hubs[hub].neighbours))

    def new_epoch(self) -> None:
        """Count anew how often each hub stands in."""
        for key, times in self._stood_in.items():
            if times >= self.max_stand_ins and key in self._hubs:
                self._touched.update(dict.fromkeys(self._hubs[key].neighbours))
        self._stood_in.clear()

    def touch(self, key: Key) -> None:
        """Note that a sample entered or left the cache, so that it may have another stand-in now."""
        if key in self._near:
            self._touched[key] = None

    def touch_all(self) -> None:
        """Make the next `drain_touched` return every sample that is a neighbour of a hub."""
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
