"""What the engine has the store do: the answer of each of its methods that takes an event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spiderfs.core.policy import Key


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that the store has to make: first all of `drop`, then all of `keep`."""

    keep: tuple[tuple[Key, str], ...] = ()
    """Move the key to this section, from landing or from another section."""
    drop: tuple[Key, ...] = ()
    """Remove the key from the cache."""


NOTHING = Changes()


def merged(several: Iterable[Changes]) -> Changes:
    """The changes of several calls as one: what the engine said last about a key counts."""
    fate: dict[Key, str | None] = {}
    for changes in several:
        fate.update(dict.fromkeys(changes.drop))
        fate.update(changes.keep)
    return Changes(
        tuple((key, section) for key, section in fate.items() if section is not None),
        tuple(key for key, section in fate.items() if section is None),
    )
