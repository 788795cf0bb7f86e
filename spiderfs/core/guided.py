"""The interface of a guided policy: one that ranks samples by the scores of the batches that trainers send.

A **course** is what one job learns about one list of samples; `course_id` names the pair. Scores, labels, hubs,
stand-ins, pins and epochs belong to a course, so two trainings on one list do not mix what they learn.

A guided policy answers all that every policy answers (`policy.py`), and the methods of `Guided`. What only some of them
can do is an interface of its own:

    HasHubs      hubs, which may stand in for their neighbours
    HasStandIns  samples whose bytes a reader may get under the name of another sample
    HasPins      samples that a trainer reads again and again
    Divided      a room that is shared by a ratio, which people may look at
    Adjustable   the same, and training or people may set the ratio
    WarmsUp      a cache that stays as it is while a training warms up
    Restocked    room for samples that nobody has read yet

Scores, hubs and the ratio arrive at any time between two opens. None of these methods changes who is a member. So
whoever calls them has to call `Engine.place` or `Engine.settle` afterwards, as each of them says. Only
`learning/teaching.py` calls them, but for `limit_hubs`, which is an option of the user.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from spiderfs.core.hints import Hub
from spiderfs.core.policy import Key, Policy

# If a third of all reads were redirected to 2 % of the samples, without a limit each of these would be read 16 times
# per epoch.
MAX_STAND_INS = 8
# 64 neighbours of a hub take some 4 kB.
MAX_NEIGHBOURS = 64
# The score of a sample that was never scored. All scores are higher, so such a sample evicts no scored member.
UNKNOWN = 0.0


class Guided(Policy):
    @abstractmethod
    def scored(self, key: Key, score: float) -> None:
        """A sample, member or not, has a new worth; `score` must be positive, else this raises ValueError."""

    def listed(self, course_id: str, labels: Mapping[Key, int]) -> None:
        """A job declared a list, now or before this policy was chosen; samples with equal labels are one class."""

    def forget_course(self, course_id: str, keys: Iterable[Key]) -> None:
        """Forget what belongs to a course that is over, and the scores of those `keys` that are no members."""

    def new_epoch(self, course_id: str) -> None:
        """The job of this course began an epoch; other courses go on."""

    def scored_by(self, course_id: str, key: Key, score: float) -> None:
        """A course has a new score for a sample; `scored` has told its worth to all courses."""

    def read_by(self, course_id: str, key: Key) -> None:
        """A reader of this course got a sample's own bytes; `hit` or `missed` follows."""


@dataclass(frozen=True, slots=True)
class HubLimits:
    """The limits of each hub; None is no limit, as in SpiderCache's paper. Raises ValueError for impossible ones."""

    stand_ins: int | None = MAX_STAND_INS
    """How often a hub stands in per epoch of its course."""
    neighbours: int | None = MAX_NEIGHBOURS
    """For how many samples a hub may stand in: the nearest ones."""

    def __post_init__(self) -> None:
        if (self.stand_ins is not None and self.stand_ins < 0) or (self.neighbours is not None and self.neighbours < 1):
            raise ValueError("a hub stands in at least 0 times, for at least 1 neighbour; None is no limit")


class HasHubs(ABC):
    @abstractmethod
    def hub_found(self, hub: Hub) -> None:
        """The scorer found a hub: its sample can stand in for its neighbours as soon as the sample is cached.

        The caller has to `place` the sample.
        """

    @abstractmethod
    def is_hub(self, course_id: str, key: Key) -> bool:
        """Whether this sample is a hub of the course already, so that another one of the batch is wanted."""

    @abstractmethod
    def limit_hubs(self, limits: HubLimits) -> None:
        """Change the limits of each hub; that on neighbours holds for hubs that are found from now on."""


class HasStandIns(ABC):
    @abstractmethod
    def stand_in(self, course_id: str, key: Key) -> Key | None:
        """The member whose bytes a reader of this course may get for a sample; None if it gets the sample's own.

        The stand-in is of the same list and has the same label. A cached sample has no stand-in.
        """

    @abstractmethod
    def stood_in(self, course_id: str, stand_in: Key, wanted: Key) -> None:
        """A reader of this course asked for the sample `wanted` and got the bytes of `stand_in`."""

    @abstractmethod
    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        """All redirects that may have changed since the last call: course, sample, stand-in (None if it has none)."""

    @abstractmethod
    def forget_told(self) -> None:
        """Make the next `redirects_changed` return every redirect, as if it had never returned any."""


class HasPins(ABC):
    @abstractmethod
    def pin(self, course_id: str, keys: Collection[Key]) -> Collection[Key]:
        """Pin these samples of a course, cached or not, in place of those that were pinned (`policies/pins.py`).

        Returns the samples that the engine has to `place`: those that are newly pinned or no longer pinned.
        """

    @property
    @abstractmethod
    def pinned(self) -> Mapping[str, Collection[Key]]:
        """The pinned samples of each course."""


class Divided(ABC):
    @property
    @abstractmethod
    def ratio(self) -> float:
        """The share of the policy's room that important samples have, from 0 to 1."""


class Adjustable(Divided):
    @abstractmethod
    def set_ratio(self, ratio: float) -> None:
        """Change the ratio; the caller has to `settle`. Raises ValueError unless it lies from 0 to 1."""


class WarmsUp(ABC):
    @abstractmethod
    def warm_up(self, course_id: str, active: bool) -> None:
        """A job began the warm-up of this course, or ended it: in it no read of this course evicts anything.

        A course that is listed anew does not warm up.
        """


class Restocked(ABC):
    """A policy with room for samples that nobody has read yet, which packages bring (`daemon/caching/packer.py`)."""

    @abstractmethod
    def ranks_low(self, key: Key) -> bool:
        """Whether a sample, member or not, belongs to the part that reads use up."""

    @abstractmethod
    def missed_low(self) -> Iterable[Key]:
        """Samples that rank low and were not cached when readers asked for them, the latest first."""

    @abstractmethod
    def room_for_unread_bytes(self) -> int:
        """Bytes that the policy would give, now, to samples that it `wants_unread`."""

    @abstractmethod
    def wants_unread(self, key: Key) -> bool:
        """Whether a sample that is not cached would be useful in the cache before anybody asks for it."""
