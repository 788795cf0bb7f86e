"""What a policy must answer that is guided by what a trainer's scorer finds, beside what every policy must.

Scores, hubs and the ratio come in at any time between two opens. None of them changes who is a member: after
`hub_found` the engine is to `place` the hub, after `set_ratio` it is to `settle`.
"""

from __future__ import annotations

from abc import abstractmethod

from spiderfs.core.homophily import Hub
from spiderfs.core.policy import Key, Policy


class Guided(Policy):
    @abstractmethod
    def scored(self, key: Key, score: float) -> None:
        """A sample, member or not, has a new score, a positive number."""

    @abstractmethod
    def hub_found(self, hub: Hub) -> None:
        """A sample was found that can stand in for others, as soon as its bytes are there."""

    @abstractmethod
    def stand_in(self, dataset: str, key: Key) -> Key | None:
        """The member that a reader of this dataset may be given for a sample; None if it is to get the sample itself.

        It is of the same dataset and label. A sample that is cached has no stand-in.
        """

    @abstractmethod
    def stood_in(self, hub: Key) -> None:
        """A reader was given this hub for another sample."""

    @abstractmethod
    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        """Dataset, sample and stand-in (None: no longer any), for all that may have changed since the last call."""

    @abstractmethod
    def forget_told(self) -> None:
        """Let the next `redirects_changed` name all redirects there are, as if none had been told."""

    @abstractmethod
    def new_epoch(self) -> None:
        """A trainer began an epoch."""

    @property
    @abstractmethod
    def ratio(self) -> float:
        """Share of the section of important samples."""

    @abstractmethod
    def set_ratio(self, ratio: float) -> None:
        """Change that share, from 0 to 1."""
