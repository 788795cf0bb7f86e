"""What a policy must answer that is guided by what a trainer's batches were scored, beside what every policy must.

Scores, hubs and the ratio come in at any time between two opens. None of them changes who is a member: after
`hub_found` the engine is to `place` the hub, after `pin` what that names, and after `set_ratio` it is to `settle`. A
policy that has no use for hubs, stand-ins, pins, packages, epochs or a ratio leaves what is about them as it is here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping

from spiderfs.core.hints import Hub
from spiderfs.core.policy import Key, Policy


class Guided(Policy):
    @abstractmethod
    def scored(self, key: Key, score: float) -> None:
        """A sample, member or not, has a new score, a positive number."""

    def listed(self, dataset: str, labels: Mapping[Key, int]) -> None:
        """A trainer declared a list of samples, or did so before this policy was chosen; a label stands for a class."""

    def forget_list(self, dataset: str, keys: Iterable[Key]) -> None:
        """Nobody uses this list any more: let go of its labels, and of what is known of `keys` that are no members."""

    def hub_found(self, hub: Hub) -> None:
        """A sample was found that can stand in for others, as soon as its bytes are there."""

    def stand_in(self, dataset: str, key: Key) -> Key | None:
        """The member that a reader of this dataset may be given for a sample; None if it is to get the sample itself.

        It is of the same dataset and label. A sample that is cached has no stand-in.
        """
        return None

    def stood_in(self, hub: Key, wanted: Key) -> None:
        """A reader was given this member for the sample that it wanted."""

    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        """Dataset, sample and stand-in (None: no longer any), for all that may have changed since the last call."""
        return []

    def forget_told(self) -> None:
        """Let the next `redirects_changed` name all redirects there are, as if none had been told."""

    def pin(self, dataset: str, keys: Collection[Key]) -> Collection[Key]:
        """Hold these samples of a dataset, cached or not yet, and no others of it (`policies/parts/pins.py`).

        Returns those that are to be placed.
        """
        return ()

    @property
    def pinned(self) -> Mapping[str, Collection[Key]]:
        """What is held so, by dataset."""
        return {}

    def packable(self, key: Key) -> bool:
        """Whether a sample is one of those that are brought in bulk, in packages."""
        return False

    def missed_samples(self) -> Iterable[Key]:
        """Packable samples that were asked for and not cached, the latest first: packages are made of these."""
        return ()

    def spare_bytes(self) -> int:
        """Bytes that the policy would give now to samples that nobody has asked for, if it `refreshes` by them."""
        return 0

    def refreshes(self, key: Key) -> bool:
        """Whether a sample that is not cached would be of use before anybody asks for it."""
        return False

    def new_epoch(self) -> None:
        """A trainer began an epoch."""

    @property
    def ratio(self) -> float:
        """Share of the section of important samples."""
        return 1.0

    def set_ratio(self, ratio: float) -> None:
        """Change that share, from 0 to 1."""
