"""The interface of a guided policy: one that ranks samples by the scores of the batches that trainers send.

A guided policy answers all that every policy answers (`policy.py`), and the methods here. Scores, hubs and the ratio
arrive at any time between two opens. None of these methods changes who is a member. So the caller has to call
`Engine.place` for the hub after `hub_found`, `Engine.place` for each returned sample after `pin`, and `Engine.settle`
after `set_ratio`. A policy without hubs, stand-ins, pins, epochs or a ratio inherits the methods about them.

`list_id` identifies a list of samples that trainers declared. Two declarations of the same files with the same labels
are one list.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping

from spiderfs.core.hints import Hub
from spiderfs.core.policy import Key, Policy


class Guided(Policy):
    @abstractmethod
    def scored(self, key: Key, score: float) -> None:
        """A sample, member or not, has a new score; `score` must be positive, else this raises ValueError."""

    def listed(self, list_id: str, labels: Mapping[Key, int]) -> None:
        """A trainer declared a list, now or before this policy was chosen; samples with equal labels are one class."""

    def forget_list(self, list_id: str, keys: Iterable[Key]) -> None:
        """No trainer uses this list any more: forget its labels, and the scores of those `keys` that are no members."""

    def hub_found(self, hub: Hub) -> None:
        """The scorer found a hub: its sample can stand in for its neighbours as soon as the sample is cached."""

    def stand_in(self, list_id: str, key: Key) -> Key | None:
        """The member whose bytes a reader of this list may get for a sample; None if it gets the sample's own.

        The stand-in is of the same list and has the same label. A cached sample has no stand-in.
        """
        return None

    def stood_in(self, stand_in: Key, wanted: Key) -> None:
        """A reader asked for the sample `wanted` and got the bytes of `stand_in`."""

    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        """All redirects that may have changed since the last call: list, sample, and stand-in (None if it has none)."""
        return []

    def forget_told(self) -> None:
        """Make the next `redirects_changed` return every redirect, as if it had never returned any."""

    def pin(self, list_id: str, keys: Collection[Key]) -> Collection[Key]:
        """Pin these samples of a list, cached or not, in place of those that were pinned (`policies/parts/pins.py`).

        Returns the samples that the engine has to `place`: those that are newly pinned or no longer pinned.
        """
        return ()

    @property
    def pinned(self) -> Mapping[str, Collection[Key]]:
        """The pinned samples of each list."""
        return {}

    def new_epoch(self) -> None:
        """A trainer began an epoch."""

    @property
    def ratio(self) -> float:
        """The share of the policy's room that important samples have, from 0 to 1."""
        return 1.0

    def set_ratio(self, ratio: float) -> None:
        """Change the ratio."""
