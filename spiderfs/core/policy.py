"""What a caching policy must answer, and nothing about how the engine keeps its books.

The engine owns sizes, sections and budgets; a policy only ranks. It is told of every open (`hit`, `missed`) and of
every change of membership (`inserted`, `removed`), and answers in which order members leave:

- `eviction_order` is asked when bytes must be freed whatever the loss: it ends only after the last member;
- `victims_for` is asked when a candidate would need their room: it ends where the candidate is not worth more, so a
  policy that bypasses (MIN, importance, "fill once") is one that stops early. The engine takes all it needs or none.

Both are read to the point where enough is found and only then followed by `removed`, so they must not change the
policy. A policy may split its share into several sections with their own limits and their own victims. Scores may
change while their samples are cached: the next order that is asked for must follow the new ones. A member may belong
into another section than before (`section_for`): `Engine.place` then moves it, as one `removed` and one `inserted`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

Key = Hashable
"""An int inode for a small file (a sample), a tuple (inode, block) for one block of a large file."""

SAMPLES = "samples"
"""Section of the policies that have only one."""


class Policy(ABC):
    name: ClassVar[str]
    sections: ClassVar[tuple[str, ...]] = (SAMPLES,)
    foreseen: ClassVar[str] = SAMPLES
    """The section whose members leave by their next use while readers' plans say it (`foresight.py`)."""
    scoring: ClassVar[str] = "graph"
    """What trainers' batches are made into scores by: a name in the scorer's table. Samplers are told them whatever the
    policy, and one that is guided (`guided.py`) is too."""
    needs_future: ClassVar[bool] = False
    """True if it must know all opens beforehand: it can be replayed over a trace, not mounted."""

    @classmethod
    def foreseeing(cls, future: Sequence[Key]) -> Self:
        """A new policy for a run whose opens will be exactly `future`; most have no use for it."""
        return cls()

    def limit(self, section: str, share_bytes: int, held_bytes: Mapping[str, int]) -> int:
        """Bytes that one section may hold while the policy as a whole may hold `share_bytes`.

        `held_bytes` is what each section holds now: one may use what another leaves free.
        """
        return share_bytes

    def section_for(self, key: Key) -> str:
        """The section that a candidate enters, or that a member belongs to."""
        return self.sections[0]

    @abstractmethod
    def hit(self, key: Key, size: int) -> None:
        """A member was opened."""

    @abstractmethod
    def missed(self, key: Key, size: int) -> None:
        """A sample that is not a member was opened, and will be offered as a candidate next."""

    @abstractmethod
    def inserted(self, key: Key, size: int) -> None:
        """The candidate became a member."""

    @abstractmethod
    def removed(self, key: Key) -> None:
        """A member left: evicted, taken away by the user, or lost by the store."""

    @abstractmethod
    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        """All members, or all of one section, the least valuable first."""

    def victims_for(self, key: Key, size: int, full: str | None) -> Iterator[Key]:
        """Members worth less than this candidate, the least valuable first.

        `full` is the section that has reached its limit, of which alone members are of use, or None where no section
        has but the policy's whole share is used up.
        """
        return self.eviction_order(self.section_for(key))

    @abstractmethod
    def score(self, key: Key) -> float:
        """What the policy holds a sample to be worth, in its own unit; more is better, 0 is unknown."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on as before, in types that msgpack can carry."""

    @abstractmethod
    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        """Forget all members and take over these (key -> bytes, the least valuable first).

        `state` is empty, or what `state()` once gave, possibly for other members.
        """


def saved_keys(saved: Iterable[Any]) -> list[Key]:
    """Keys out of a saved state: msgpack gives tuples back as lists."""
    return [tuple(key) if isinstance(key, list) else key for key in saved]


def in_saved_order(members: Iterable[Key], saved: Iterable[Any]) -> list[Key]:
    """The members in the order of a saved list; those it does not name came later and follow it."""
    known = dict.fromkeys(members)
    first = dict.fromkeys(key for key in saved_keys(saved) if key in known)
    return [*first, *(key for key in known if key not in first)]
