"""The interface of a caching policy. The engine owns sizes, sections and budgets; a policy only ranks samples.

The engine tells the policy of every open (`hit`, `missed`) and of every change of membership (`inserted`, `removed`).
It asks the policy in which order members leave:

- `eviction_order`, when bytes must be freed whatever they are worth: it ends only after the last member;
- `victims_for`, when a candidate needs room: it ends at the first member that is worth no less than the candidate. A
  policy that refuses candidates (MIN, importance, "fill once") ends early. The engine takes all the room that the
  candidate needs, or none.

The engine reads either order until it has found enough bytes, and calls `removed` only after that, so neither method
may change the policy. A policy may split its share into several sections, with their own limits and their own victims.
Scores may change while their samples are cached: the next order must follow the new scores. When `section_for` answers
another section than before for a member, `Engine.place` moves the member, with one `removed` and one `inserted`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

Key = Hashable
"""The inode of a sample (an int), or the pair (inode, block) for one block of a large file."""

SAMPLES = "samples"
"""The name of the section in policies that have only one."""


class Policy(ABC):
    name: ClassVar[str]
    sections: ClassVar[tuple[str, ...]] = (SAMPLES,)
    foreseen: ClassVar[str] = SAMPLES
    """The section whose members leave by their next use while plans say when that is (`plans/foresight.py`)."""
    scoring: ClassVar[str] = "graph"
    """The scoring that turns trainers' batches into scores: a name in the table `spiderfs.scorer.SCORINGS`. Samplers
    get the scores under every policy; the policy itself gets them only if it is guided (`guided.py`)."""
    needs_future: ClassVar[bool] = False
    """True if the policy must know all opens beforehand: it can be replayed over a trace, but not mounted."""

    @classmethod
    def foreseeing(cls, future: Sequence[Key]) -> Self:
        """A new policy for a run whose opens will be exactly `future`; most policies ignore it."""
        return cls()

    def limit(self, section: str, share_bytes: int, held_bytes: Mapping[str, int]) -> int:
        """Bytes that one section may hold while the policy as a whole may hold `share_bytes`.

        `held_bytes` says how many bytes each section holds now, so that one section may use what another leaves free.
        """
        return share_bytes

    def section_for(self, key: Key) -> str:
        """The section that a candidate enters, or that a member belongs to."""
        return self.sections[0]

    def hit(self, key: Key, size: int) -> None:  # noqa: B027 - many policies have nothing to do
        """A member was opened."""

    def missed(self, key: Key, size: int) -> None:  # noqa: B027 - many policies have nothing to do
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


def saved_keys(saved: Iterable[Any]) -> list[Key]:
    """Keys as they were before msgpack saved them: it turns tuples into lists."""
    return [tuple(key) if isinstance(key, list) else key for key in saved]


def in_saved_order(members: Iterable[Key], saved: Iterable[Any]) -> list[Key]:
    """The members in the order of a saved list; members that the list does not name came later, and follow."""
    known = dict.fromkeys(members)
    first = dict.fromkeys(key for key in saved_keys(saved) if key in known)
    return [*first, *(key for key in known if key not in first)]
