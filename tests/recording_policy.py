"""A guided policy that remembers what it was told, and gives the stand-ins that a test has set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmarks.fakes import MemoryContent
from spiderfs.core.guided import Adjustable, Guided, HasHubs, HasStandIns, HubLimits
from spiderfs.core.hints import Hub
from spiderfs.core.policy import Key
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.metrics import Counters, SharedCounters
from spiderfs.policies.lru import LRU
from spiderfs.store.store import Content


class RecordingPolicy(LRU, Guided, HasHubs, HasStandIns, Adjustable):
    """Ranks as LRU does."""

    name = "recording"

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[object, ...]] = []
        self.stand_ins: dict[tuple[str, Key], Key] = {}
        self.changes: list[tuple[str, Key, Key | None]] = []
        self._ratio = 0.9

    def scored(self, key: Key, score: float) -> None:
        self.told.append(("scored", key, score))

    def listed(self, course_id: str, labels: Mapping[Key, int]) -> None:
        self.told.append(("listed", course_id, len(labels)))

    def forget_course(self, course_id: str, keys: Iterable[Key]) -> None:
        self.told.append(("forget_course", course_id, sum(1 for _ in keys)))

    def hub_found(self, hub: Hub) -> None:
        self.told.append(("hub_found", hub.key))

    def is_hub(self, course_id: str, key: Key) -> bool:
        return False

    def limit_hubs(self, limits: HubLimits) -> None:
        self.told.append(("limit_hubs", limits))

    def stand_in(self, course_id: str, key: Key) -> Key | None:
        return self.stand_ins.get((course_id, key))

    def stood_in(self, course_id: str, stand_in: Key, wanted: Key) -> None:
        self.told.append(("stood_in", course_id, stand_in, wanted))

    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        changes, self.changes = self.changes, []
        return changes

    def forget_told(self) -> None:
        self.changes = [(course_id, key, stand_in) for (course_id, key), stand_in in self.stand_ins.items()]

    def new_epoch(self, course_id: str) -> None:
        self.told.append(("new_epoch", course_id))

    @property
    def ratio(self) -> float:
        return self._ratio

    def set_ratio(self, ratio: float) -> None:
        self.told.append(("set_ratio", ratio))
        self._ratio = ratio


def recorded_cache(
    content: Content | None = None, counters: Counters | None = None, capacity: int | None = None
) -> tuple[CacheControl, RecordingPolicy]:
    """A manager's cache in memory, by default an empty one without room, and its policy."""
    policy = RecordingPolicy()
    cache = CacheControl(
        MemoryContent() if content is None else content,
        "lru",
        0.5,
        SharedCounters(1).row(0) if counters is None else counters,
    )
    if capacity is not None:
        cache.restore(capacity, None)
    cache.engine.change_policy(policy)
    return cache, policy
