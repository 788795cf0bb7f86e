"""A guided policy that remembers what it was calls, and gives the substitutes that a test has set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmarks.fakes import MemoryContent
from spiderfs.core.policy import Hub, HubLimits, Key
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.metrics import Counters, SharedCounters
from spiderfs.policies.baselines import LRU
from spiderfs.store.store import Content


class RecordingPolicy(LRU):
    """Ranks as LRU does."""

    name = "recording"
    guided = has_hubs = has_substitutes = adjustable = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []
        self.substitutes: dict[tuple[str, Key], Key] = {}
        self.changes: list[tuple[str, Key, Key | None]] = []
        self._ratio = 0.9

    def scored(self, key: Key, score: float) -> None:
        self.calls.append(("scored", key, score))

    def listed(self, job_dataset_id: str, labels: Mapping[Key, int]) -> None:
        self.calls.append(("listed", job_dataset_id, len(labels)))

    def forget_job_dataset(self, job_dataset_id: str, keys: Iterable[Key]) -> None:
        self.calls.append(("forget_job_dataset", job_dataset_id, sum(1 for _ in keys)))

    def hub_found(self, hub: Hub) -> None:
        self.calls.append(("hub_found", hub.key))

    def is_hub(self, job_dataset_id: str, key: Key) -> bool:
        return False

    def limit_hubs(self, limits: HubLimits) -> None:
        self.calls.append(("limit_hubs", limits))

    def substitute_for(self, job_dataset_id: str, key: Key) -> Key | None:
        return self.substitutes.get((job_dataset_id, key))

    def substituted(self, job_dataset_id: str, substitute: Key, wanted: Key) -> None:
        self.calls.append(("substituted", job_dataset_id, substitute, wanted))

    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        changes, self.changes = self.changes, []
        return changes

    def forget_published(self) -> None:
        self.changes = [
            (job_dataset_id, key, substitute) for (job_dataset_id, key), substitute in self.substitutes.items()
        ]

    def new_epoch(self, job_dataset_id: str) -> None:
        self.calls.append(("new_epoch", job_dataset_id))

    @property
    def ratio(self) -> float:
        return self._ratio

    def set_ratio(self, ratio: float) -> None:
        self.calls.append(("set_ratio", ratio))
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
