"""The section of hubs: cached samples that stand in for their neighbours of the same label.

Hubs leave first in, first out, together with their neighbours, so that the samples that stand in change over time. A
hub stands in only a limited number of times per epoch, because a training that gets the same sample again and again
under many names loses accuracy. After that the next nearest hub stands in; if there is none, the reader gets the sample
itself. SpiderCache has neither this limit nor one on neighbours: None means that there is none.

A hub belongs to one course, because labels and distances do: it never stands in for a reader of another course, and
each course counts for itself how often its hubs stood in. One sample may be a hub of several courses, and leaves as the
hub of all of them. `drain_touched` names the samples whose redirects have to be published anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from spiderfs.core.guided import HubLimits
from spiderfs.core.hints import Hub
from spiderfs.core.policy import Key


class Homophily:
    def __init__(self, limits: HubLimits | None = None) -> None:
        self._limits = limits or HubLimits()
        # The hubs, the oldest first: for each sample its neighbours in each course.
        self._hubs: OrderedDict[Key, dict[str, Hub]] = OrderedDict()
        # For each sample and course the hubs that the sample is a neighbour of, with the distances to them.
        self._near: dict[Key, dict[str, dict[Key, float]]] = {}
        # How often each hub has stood in during this epoch of a course.
        self._stood_in: dict[str, dict[Key, int]] = {}
        self._touched: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self._hubs)

    def __contains__(self, key: object) -> bool:
        return key in self._hubs

    def __iter__(self) -> Iterator[Key]:
        """All hubs, the oldest first."""
        return iter(self._hubs)

    def limit(self, limits: HubLimits) -> None:
        """Change the limits; hubs that are here keep their neighbours."""
        if limits.stand_ins != self._limits.stand_ins:
            self.touch_all()
        self._limits = limits

    def courses_of(self, key: Key) -> dict[str, Hub]:
        """The hub that a sample is, in each course in which it is one."""
        return self._hubs.get(key, {})

    def put(self, hub: Hub) -> None:
        """Add a hub as the youngest; one that is there already gets new neighbours in this course, and keeps its age.

        A sample that is a hub of another course keeps its age too.
        """
        hub = hub.shortened(self._limits.neighbours)
        courses = self._hubs.setdefault(hub.key, {})
        if hub.course_id in courses:
            self._unlink(courses[hub.course_id])
        courses[hub.course_id] = hub
        for neighbour, distance in zip(hub.neighbours, hub.distances, strict=True):
            self._near.setdefault(neighbour, {}).setdefault(hub.course_id, {})[hub.key] = distance
            self._touched[neighbour] = None

    def remove(self, key: Key) -> None:
        """Remove a hub and its neighbours; how often it stood in is remembered until the epoch of its course ends."""
        for hub in self._hubs.pop(key).values():
            self._unlink(hub)

    def clear(self) -> None:
        """Remove all hubs."""
        for key in list(self._hubs):
            self.remove(key)

    def stand_in(self, course_id: str, key: Key) -> Key | None:
        """The nearest hub of a course that may still stand in for a sample in this epoch; None if there is none."""
        best: tuple[float, Key] | None = None
        for hub, distance in self._near.get(key, {}).get(course_id, {}).items():
            if (best is None or distance < best[0]) and not self._used_up(course_id, hub):
                best = (distance, hub)
        return best[1] if best else None

    def courses_near(self, key: Key) -> Iterable[str]:
        """The courses that have a hub with this sample among its neighbours."""
        return self._near.get(key, {})

    def stood_in(self, course_id: str, hub: Key) -> None:
        """Count that a reader of this course got this hub in the name of another sample."""
        counts = self._stood_in.setdefault(course_id, {})
        counts[hub] = counts.get(hub, 0) + 1
        if counts[hub] == self._limits.stand_ins:
            self._touch_neighbours(course_id, hub)

    def new_epoch(self, course_id: str) -> None:
        """Count anew how often each hub of this course stands in."""
        for hub in self._stood_in.get(course_id, {}):
            if self._used_up(course_id, hub):
                self._touch_neighbours(course_id, hub)
        self._stood_in.pop(course_id, None)

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

    def _used_up(self, course_id: str, hub: Key) -> bool:
        limit = self._limits.stand_ins
        return limit is not None and self._stood_in.get(course_id, {}).get(hub, 0) >= limit

    def _touch_neighbours(self, course_id: str, key: Key) -> None:
        hub = self.courses_of(key).get(course_id)
        if hub is not None:
            self._touched.update(dict.fromkeys(hub.neighbours))

    def _unlink(self, hub: Hub) -> None:
        for neighbour in hub.neighbours:
            courses = self._near[neighbour]
            near = courses[hub.course_id]
            del near[hub.key]
            if not near:
                del courses[hub.course_id]
            if not courses:
                del self._near[neighbour]
            self._touched[neighbour] = None
