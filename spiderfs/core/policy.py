"""The interface of a caching policy. The engine owns sizes, sections and budgets; a policy only ranks samples.

The engine notifies the policy of every open (`hit`, `missed`) and every change of membership (`inserted`, `removed`),
and asks in which order members leave: `eviction_order` when bytes must be freed whatever they are worth, and
`victims_for` when a candidate needs room. That one ends at the first member that is worth no less than the candidate; a
policy that refuses candidates (MIN, importance, "fill once") ends early. The engine reads either order until it has
enough bytes and calls `removed` only after that, so neither method may change the policy. Scores may change while their
samples are cached: the next order must follow them. When `section_for` answers another section for a member,
`Engine.place` moves it, with one `removed` and one `inserted`.

A **guided** policy also ranks by what trainings learn. A **job dataset** is what one job learns about one list; scores,
labels, hubs, substitutes, pins and epochs belong to one, so two trainings on a list do not mix them. By default these
methods do nothing. They never change who is a member, so callers have to `place` or `settle` afterwards, as each says;
only `feed.py` calls them, but for `limit_hubs`, an option of the user.

**Pins.** A policy with pins has a section `PINNED`, with the share PINNED_SHARE of its room. A pinned sample enters it
as soon as it is cached, and is never a victim of other samples. The caller of `pin` pins no more than fit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

Key = Hashable
"""The inode of a sample (an int), or the pair (inode, block) for one block of a large file."""

SAMPLES = "samples"
"""The name of the section in policies that have only one."""
# If a third of all reads were redirected to 2 % of the samples, without a limit each of these would be read 16 times
# per epoch.
MAX_SUBSTITUTIONS = 8
# 64 neighbours of a hub take some 4 kB.
MAX_NEIGHBOURS = 64
# The score of a sample that was never scored. All scores are higher, so such a sample evicts no scored member.
UNKNOWN = 0.0


@dataclass(frozen=True, slots=True)
class HubLimits:
    """The limits of each hub; None is no limit, as in SpiderCache's paper."""

    substitutions: int | None = MAX_SUBSTITUTIONS
    """How often a hub is a substitute per epoch of its job dataset."""
    neighbours: int | None = MAX_NEIGHBOURS
    """For how many samples a hub may be the substitute: the nearest ones."""


@dataclass(frozen=True, slots=True)
class Hub:
    """A sample that can substitute for its neighbours."""

    key: Key
    job_dataset_id: str
    neighbours: Sequence[Key]
    """Samples of the same list with the same label, nearest first."""
    distances: Sequence[float]
    """The distance from the hub to each neighbour, between embeddings of length 1 unless they are raw."""

    def shortened(self, length: int | None) -> Hub:
        """A copy of this hub with its `length` nearest neighbours (None: all), each once, and never the hub itself."""
        near: dict[Key, float] = {}
        for key, distance in zip(self.neighbours, self.distances, strict=True):
            if len(near) == length:
                break
            if key != self.key:
                near.setdefault(key, distance)
        return Hub(self.key, self.job_dataset_id, tuple(near), tuple(near.values()))


class Policy(ABC):
    name: ClassVar[str]
    sections: ClassVar[tuple[str, ...]] = (SAMPLES,)
    foreseen: ClassVar[str] = SAMPLES
    """The section whose members leave by their next use while plans say when that is (`plans/foresight.py`)."""
    scoring: ClassVar[str] = "graph"
    """The scoring that turns trainers' batches into scores: a name in the table `spiderfs.scorer.SCORINGS`. Samplers
    get the scores under every policy; the policy itself gets them only if it is guided."""
    guided: ClassVar[bool] = False
    """Whether the policy follows what trainings learn: without it none of the methods for that is called."""
    has_hubs: ClassVar[bool] = False
    """Whether `hub_found` does anything: a hub's sample may substitute for its neighbours."""
    has_substitutes: ClassVar[bool] = False
    """Whether readers may get the bytes of another sample, by `substitute_for`."""
    adjustable: ClassVar[bool] = False
    """Whether training and people may set the `ratio`."""
    restocks: ClassVar[bool] = False
    """Whether there is room for samples that no one has read yet, which packages bring (`daemon/caching/packer.py`)."""
    needs_future: ClassVar[bool] = False
    """True if the policy must know all opens beforehand: it can be replayed over a trace, but not mounted."""

    @classmethod
    def foreseeing(cls, future: Sequence[Key]) -> Self:
        """A new policy for a run whose opens will be exactly `future`; most policies ignore it."""
        return cls()

    def limit(self, section: str, share_bytes: int, held_bytes: Mapping[str, int]) -> int:
        """Bytes that a section may hold of the policy's `share_bytes`; `held_bytes` has what each section holds now."""
        return share_bytes

    def section_for(self, key: Key) -> str:
        """The section that a candidate enters, or that a member belongs to."""
        return self.sections[0]

    def hit(self, key: Key, size: int) -> None:
        """A member was opened."""

    def missed(self, key: Key, size: int) -> None:
        """A sample that is no member was opened; next, the engine offers it as a candidate."""

    @abstractmethod
    def inserted(self, key: Key, size: int) -> None:
        """The candidate became a member."""

    @abstractmethod
    def removed(self, key: Key) -> None:
        """A member left: the engine or the user evicted it, or the store lost it."""

    @abstractmethod
    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        """All members, or all members of one section, the least valuable first."""

    def victims_for(self, key: Key, size: int, full: str | None) -> Iterator[Key]:
        """Members worth less than this candidate, the least valuable first.

        `full` names the section that has reached its limit: only its own members can make room there. It is None if no
        section has reached its limit but the policy's whole share is used up.
        """
        return self.eviction_order(self.section_for(key))

    @abstractmethod
    def score(self, key: Key) -> float:
        """The worth of a sample to the policy, in a unit of its own; higher is better, and 0 means unknown."""

    def state(self) -> dict[str, Any]:
        """All that `restore` needs to go on as before, in types that msgpack can carry."""
        return {}

    @abstractmethod
    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        """Forget all members and take over these (key -> bytes, the least valuable first).

        `state` is empty, or what `state()` once returned, possibly when there were other members.
        """

    # -- what trainings learn (guided policies)

    def scored(self, key: Key, score: float) -> None:
        """A sample, member or not, has a new worth; `score` must be positive."""

    def listed(self, job_dataset_id: str, labels: Mapping[Key, int]) -> None:
        """A job declared a list, now or before this policy was chosen; samples with equal labels are one class."""

    def forget_job_dataset(self, job_dataset_id: str, keys: Iterable[Key]) -> None:
        """Forget what belongs to a job dataset that is over, and the scores of those `keys` that are no members."""

    def new_epoch(self, job_dataset_id: str) -> None:
        """The job of this job dataset began an epoch; other job datasets go on."""

    def scored_by(self, job_dataset_id: str, key: Key, score: float) -> None:
        """A job dataset has a new score for a sample; `scored` has passed its worth to all job datasets."""

    def read_by(self, job_dataset_id: str, key: Key) -> None:
        """A reader of this job dataset got a sample's own bytes; `hit` or `missed` follows."""

    def hub_found(self, hub: Hub) -> None:
        """A hub can substitute for its neighbours as soon as it is cached; the caller has to `place` it."""

    def is_hub(self, job_dataset_id: str, key: Key) -> bool:
        """Whether this sample is a hub of the job dataset already, so that another one of the batch is wanted."""
        return False

    def limit_hubs(self, limits: HubLimits) -> None:
        """Change the limits of each hub; that on neighbours holds for hubs that are found from now on."""

    def substitute_for(self, job_dataset_id: str, key: Key) -> Key | None:
        """The member whose bytes a reader of this job dataset may get for a sample; None if it gets the sample's own.

        The substitute is of the same list and has the same label. A cached sample has no substitute.
        """
        return None

    def substituted(self, job_dataset_id: str, substitute: Key, wanted: Key) -> None:
        """A reader of this job dataset asked for the sample `wanted` and got the bytes of `substitute`."""

    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        """All redirects that may have changed since the last call: job dataset, sample, substitute (None if it has
        none)."""
        return []

    def forget_published(self) -> None:
        """Make the next `redirects_changed` return every redirect, as if it had never returned any."""

    def pin(self, job_dataset_id: str, keys: Collection[Key]) -> Collection[Key]:
        """Pin these samples of a job dataset, cached or not, in place of those that were pinned (`PinnedSamples`).

        Returns the samples that the engine has to `place`: those that are newly pinned or no longer pinned.
        """
        return ()

    @property
    def pinned(self) -> Mapping[str, Collection[Key]]:
        """The pinned samples of each job dataset."""
        return {}

    @property
    def ratio(self) -> float | None:
        """The share of the policy's room that important samples have, from 0 to 1; None if the room is not divided."""
        return None

    def set_ratio(self, ratio: float) -> None:
        """Change the ratio; the caller has to `settle`. Raises ValueError unless it lies from 0 to 1."""

    def warm_up(self, job_dataset_id: str, active: bool) -> None:
        """A job's warm-up began or ended: its reads then evict nothing. One that is listed again does not warm up."""

    lists: int = 0
    """How often the policy has chosen, since it was made, which samples rank low."""

    def ranks_low(self, key: Key) -> bool:
        """Whether a sample, member or not, belongs to the part that reads use up."""
        return False

    def missed_low(self) -> Iterable[Key]:
        """Samples that rank low and were not cached when readers asked for them, the latest first."""
        return ()

    def room_for_unread_bytes(self) -> int:
        """Bytes that the policy would give, now, to samples that it `wants_unread`."""
        return 0

    def wants_unread(self, key: Key) -> bool:
        """Whether a sample that is not cached would be useful in the cache before anybody asks for it."""
        return False


def saved_keys(saved: Iterable[Any]) -> list[Key]:
    """Keys as they were before msgpack saved them: it turns tuples into lists."""
    return [tuple(key) if isinstance(key, list) else key for key in saved]


def in_saved_order(members: Iterable[Key], saved: Iterable[Any]) -> list[Key]:
    """The members in the order of a saved list; members that the list does not name came later, and follow."""
    known = dict.fromkeys(members)
    first = dict.fromkeys(key for key in saved_keys(saved) if key in known)
    return [*first, *(key for key in known if key not in first)]


PINNED = "pinned"
"""The name of the section."""
# The section's share of the policy's room. ImPACT has a buffer of this size for samples to evaluate before each epoch.
PINNED_SHARE = 0.25


def pinned_limit(share_bytes: int) -> int:
    """The bytes that pinned samples may have, out of a policy's share or of a whole budget."""
    return int(share_bytes * PINNED_SHARE)


class PinnedSamples:
    """Which samples of each job dataset are pinned; this class does not know whether they are cached."""

    def __init__(self, by_job_dataset: Mapping[str, Iterable[Key]] | None = None) -> None:
        self._by_job_dataset = {
            job_dataset_id: dict.fromkeys(keys) for job_dataset_id, keys in (by_job_dataset or {}).items()
        }

    def __contains__(self, key: object) -> bool:
        return any(key in keys for keys in self._by_job_dataset.values())

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._by_job_dataset.values())

    @property
    def by_job_dataset(self) -> Mapping[str, Collection[Key]]:
        return self._by_job_dataset

    def replace(self, job_dataset_id: str, keys: Iterable[Key]) -> list[Key]:
        """Pin these samples of a job dataset, in place of those that were pinned.

        Returns the samples that have changed: those that are no longer pinned, and those that were not pinned before.
        """
        before, now = self._by_job_dataset.pop(job_dataset_id, {}), dict.fromkeys(keys)
        if now:
            self._by_job_dataset[job_dataset_id] = now
        return [*(key for key in before if key not in self), *(key for key in now if key not in before)]
