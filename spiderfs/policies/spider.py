"""Keep the samples that the scorer finds important, and hubs that substitute for others (SpiderCache, section 4.2).

The policy has two sections, which share no bytes. A missed sample enters "importance" if there is room, or if its score
is above the lowest score there. A sample of unknown score enters only if there is room, so without a trainer this
policy acts as MinIO does. The hub of each batch enters "homophily", which never holds more than 1 - ratio of the
policy's share. The importance section may use what homophily does not hold, and gives it back to new hubs. A hub whose
sample is not cached waits until a reader opens the sample; a few samples wait at a time.

Hubs, substitutes and their limits belong to a job dataset (`core/policy.py`); the importance section ranks by the worth
of a sample to all job datasets. Hubs leave first in, first out, together with their neighbours, so that the substitutes
change over time. A hub is a substitute only a limited number of times per epoch, because a training that gets the same
sample again and again under many names loses accuracy. After that the next nearest hub is the substitute; if there is
none, the reader gets the sample itself. SpiderCache has neither this limit nor one on neighbours: None means that there
is none. One sample may be a hub of several job datasets, and leaves as the hub of all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from spiderfs.core.heap import Heap
from spiderfs.core.policy import UNKNOWN, Hub, HubLimits, Key, Policy, in_saved_order, saved_keys


class Homophily:
    """The section of hubs: cached samples that substitute for their neighbours of the same label.

    `drain_touched` names the samples whose redirects have to be published again.
    """

    def __init__(self, limits: HubLimits | None = None) -> None:
        self._limits = limits or HubLimits()
        # The hubs, the oldest first: for each sample its neighbours in each job dataset.
        self._hubs: OrderedDict[Key, dict[str, Hub]] = OrderedDict()
        # For each sample and job dataset the hubs that the sample is a neighbour of, with the distances to them.
        self._near: dict[Key, dict[str, dict[Key, float]]] = {}
        # How often each hub was a substitute in this epoch of a job dataset.
        self._substitutions: dict[str, dict[Key, int]] = {}
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
        if limits.substitutions != self._limits.substitutions:
            self.touch_all()
        self._limits = limits

    def job_datasets_of(self, key: Key) -> dict[str, Hub]:
        """The hub that a sample is, in each job dataset in which it is one."""
        return self._hubs.get(key, {})

    def put(self, hub: Hub) -> None:
        """Add a hub as the youngest; one that is there already gets new neighbours in this job dataset, and keeps its
        age.

        A sample that is a hub of another job dataset keeps its age too.
        """
        hub = hub.shortened(self._limits.neighbours)
        job_datasets = self._hubs.setdefault(hub.key, {})
        if hub.job_dataset_id in job_datasets:
            self._unlink(job_datasets[hub.job_dataset_id])
        job_datasets[hub.job_dataset_id] = hub
        for neighbour, distance in zip(hub.neighbours, hub.distances, strict=True):
            self._near.setdefault(neighbour, {}).setdefault(hub.job_dataset_id, {})[hub.key] = distance
            self._touched[neighbour] = None

    def remove(self, key: Key) -> None:
        """Remove a hub and its neighbours; how often it was a substitute is remembered until the epoch of its job
        dataset ends."""
        for hub in self._hubs.pop(key).values():
            self._unlink(hub)

    def clear(self) -> None:
        """Remove all hubs."""
        for key in list(self._hubs):
            self.remove(key)

    def substitute_for(self, job_dataset_id: str, key: Key) -> Key | None:
        """The nearest hub of a job dataset that may still substitute for a sample in this epoch; None if there is
        none."""
        best: tuple[float, Key] | None = None
        for hub, distance in self._near.get(key, {}).get(job_dataset_id, {}).items():
            if (best is None or distance < best[0]) and not self._used_up(job_dataset_id, hub):
                best = (distance, hub)
        return best[1] if best else None

    def job_datasets_near(self, key: Key) -> Iterable[str]:
        """The job datasets that have a hub with this sample among its neighbours."""
        return self._near.get(key, {})

    def substituted(self, job_dataset_id: str, hub: Key) -> None:
        """Count that a reader of this job dataset got this hub in the name of another sample."""
        counts = self._substitutions.setdefault(job_dataset_id, {})
        counts[hub] = counts.get(hub, 0) + 1
        if counts[hub] == self._limits.substitutions:
            self._touch_neighbours(job_dataset_id, hub)

    def new_epoch(self, job_dataset_id: str) -> None:
        """Count again how often each hub of this job dataset is a substitute."""
        for hub in self._substitutions.get(job_dataset_id, {}):
            if self._used_up(job_dataset_id, hub):
                self._touch_neighbours(job_dataset_id, hub)
        self._substitutions.pop(job_dataset_id, None)

    def touch(self, key: Key) -> None:
        """Note that a sample entered or left the cache, so that it may have another substitute now."""
        if key in self._near:
            self._touched[key] = None

    def touch_all(self) -> None:
        """Make the next `drain_touched` return every sample that is a neighbour of a hub."""
        self._touched.update(dict.fromkeys(self._near))

    def drain_touched(self) -> list[Key]:
        """The samples whose substitute may have changed since the last call."""
        touched = list(self._touched)
        self._touched.clear()
        return touched

    def _used_up(self, job_dataset_id: str, hub: Key) -> bool:
        limit = self._limits.substitutions
        return limit is not None and self._substitutions.get(job_dataset_id, {}).get(hub, 0) >= limit

    def _touch_neighbours(self, job_dataset_id: str, key: Key) -> None:
        hub = self.job_datasets_of(key).get(job_dataset_id)
        if hub is not None:
            self._touched.update(dict.fromkeys(hub.neighbours))

    def _unlink(self, hub: Hub) -> None:
        for neighbour in hub.neighbours:
            job_datasets = self._near[neighbour]
            near = job_datasets[hub.job_dataset_id]
            del near[hub.key]
            if not near:
                del job_datasets[hub.job_dataset_id]
            if not job_datasets:
                del self._near[neighbour]
            self._touched[neighbour] = None


IMPORTANCE, HOMOPHILY = "importance", "homophily"

# r_start of SpiderCache eq. 8.
FIRST_RATIO = 0.9
# Samples that may wait to be hubs, those of the latest batches. The neighbours of an older hub have moved since.
MAX_WAITING = 64


class Spider(Policy):
    name = "spider"
    sections = (IMPORTANCE, HOMOPHILY)
    foreseen = IMPORTANCE
    guided = has_hubs = has_substitutes = adjustable = True

    def __init__(self, ratio: float = FIRST_RATIO, hub_limits: HubLimits | None = None) -> None:
        self.set_ratio(ratio)
        # The scores of all samples, cached or not; and the members of the importance section by score.
        self._scores: dict[Key, float] = {}
        self._important: Heap[Key] = Heap()
        self._homophily = Homophily(hub_limits)
        # For each sample that waits, the hub that it will be in each job dataset.
        self._waiting: OrderedDict[Key, dict[str, Hub]] = OrderedDict()
        # The redirects as `redirects_changed` last returned them (sample -> job dataset -> substitute), to take them
        # back.
        self._published: dict[Key, dict[str, Key]] = {}

    # -- as every policy

    def limit(self, section: str, share_bytes: int, held_bytes: Mapping[str, int]) -> int:
        homophily = share_bytes - int(share_bytes * self._ratio)
        return homophily if section == HOMOPHILY else share_bytes - min(homophily, held_bytes[HOMOPHILY])

    def section_for(self, key: Key) -> str:
        return HOMOPHILY if key in self._waiting or key in self._homophily else IMPORTANCE

    def inserted(self, key: Key, size: int) -> None:
        hubs = self._waiting.pop(key, {})
        if not hubs:
            self._important.set(key, self.score(key))
        for hub in hubs.values():
            self._homophily.put(hub)
        self._homophily.touch(key)

    def removed(self, key: Key) -> None:
        if key in self._homophily:
            self._homophily.remove(key)
        else:
            self._important.discard(key)
        self._homophily.touch(key)

    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        """Hubs leave last: a hub saves more reads than any one sample."""
        if section == IMPORTANCE:
            return self._important.ascending()
        if section == HOMOPHILY:
            return iter(self._homophily)
        return chain(self._important.ascending(), self._homophily)

    def victims_for(self, key: Key, size: int, full: str | None) -> Iterator[Key]:
        if self.section_for(key) == IMPORTANCE:
            return self._important.below(self.score(key))
        # While homophily is below its limit, hubs take back the room that importance has used.
        return iter(self._homophily) if full == HOMOPHILY else self._important.ascending()

    def score(self, key: Key) -> float:
        """The sample's importance (SpiderCache eq. 4)."""
        return self._scores.get(key, UNKNOWN)

    def state(self) -> dict[str, Any]:
        """Only the scores of members in the importance section are in it; the scorer saves all scores of its own."""
        order = list(self._important.ascending())
        hubs = [hub for key in self._homophily for hub in self._homophily.job_datasets_of(key).values()]
        return {
            "ratio": self._ratio,
            "order": order,
            "scores": [self.score(key) for key in order],
            "hubs": [[hub.key, hub.job_dataset_id, list(hub.neighbours), list(hub.distances)] for hub in hubs],
        }

    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        self.set_ratio(state.get("ratio", self._ratio))
        self._waiting.clear()
        self._homophily.clear()
        for key, job_dataset_id, neighbours, distances in state.get("hubs", ()):
            if key in members:
                self._homophily.put(Hub(key, job_dataset_id, saved_keys(neighbours), list(distances)))
        scores = dict(zip(saved_keys(state.get("order", ())), state.get("scores", ()), strict=False))
        rest = (key for key in members if key not in self._homophily)
        ranked = [(key, scores.get(key, self.score(key))) for key in in_saved_order(rest, scores)]
        self._scores.update((key, score) for key, score in ranked if score != UNKNOWN)
        self._important.refill(ranked)

    # -- as every guided policy

    def scored(self, key: Key, score: float) -> None:
        if not score > UNKNOWN:
            raise ValueError(f"a score must be positive, not {score}")
        self._scores[key] = score
        if key in self._important:
            self._important.set(key, score)

    def forget_job_dataset(self, job_dataset_id: str, keys: Iterable[Key]) -> None:
        """Hubs stay, for they are members; they are substitutes again when a trainer declares the list again."""
        for key in keys:
            if key not in self._important:
                self._scores.pop(key, None)
        for key in [key for key, hubs in self._waiting.items() if job_dataset_id in hubs]:
            del self._waiting[key][job_dataset_id]
            if not self._waiting[key]:
                del self._waiting[key]
        self._homophily.new_epoch(job_dataset_id)

    def hub_found(self, hub: Hub) -> None:
        if hub.key in self._homophily:
            self._homophily.put(hub)
            return
        self._waiting.setdefault(hub.key, {})[hub.job_dataset_id] = hub
        self._waiting.move_to_end(hub.key)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)

    def is_hub(self, job_dataset_id: str, key: Key) -> bool:
        return job_dataset_id in self._homophily.job_datasets_of(key)

    def substitute_for(self, job_dataset_id: str, key: Key) -> Key | None:
        if key in self._important or key in self._homophily:
            return None
        return self._homophily.substitute_for(job_dataset_id, key)

    def substituted(self, job_dataset_id: str, substitute: Key, wanted: Key) -> None:
        self._homophily.substituted(job_dataset_id, substitute)

    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        changes: list[tuple[str, Key, Key | None]] = []
        for key in self._homophily.drain_touched():
            published = self._published.pop(key, {})
            near = self._homophily.job_datasets_near(key)
            now = {
                job_dataset_id: hub
                for job_dataset_id in near
                if (hub := self.substitute_for(job_dataset_id, key)) is not None
            }
            changes += [
                (job_dataset_id, key, hub)
                for job_dataset_id, hub in now.items()
                if published.get(job_dataset_id) != hub
            ]
            changes += [(job_dataset_id, key, None) for job_dataset_id in published if job_dataset_id not in now]
            if now:
                self._published[key] = now
        return changes

    def forget_published(self) -> None:
        self._published.clear()
        self._homophily.touch_all()

    def new_epoch(self, job_dataset_id: str) -> None:
        self._homophily.new_epoch(job_dataset_id)

    def limit_hubs(self, limits: HubLimits) -> None:
        self._homophily.limit(limits)

    @property
    def ratio(self) -> float:
        return self._ratio

    def set_ratio(self, ratio: float) -> None:
        if not 0 <= ratio <= 1:
            raise ValueError(f"the ratio must lie between 0 and 1, not {ratio}")
        self._ratio = ratio
