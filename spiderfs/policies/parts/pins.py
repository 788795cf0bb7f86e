"""Samples that are held whatever else is worth more, for a trainer has said that it will read them again and again.

A policy that keeps such a section gives it this name and this share of its room, lets nothing of it be a victim of
others, and puts a sample there as soon as its bytes are there. Whoever tells it (`Guided.pin`) tells it no more than
what fits; the limit of the section holds all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from spiderfs.core.policy import Key

PINNED = "pinned"
"""The section."""
# Of the room of a policy: ImPACT's buffer for the samples that it evaluates before each epoch.
PINNED_SHARE = 0.25


def pinned_limit(share_bytes: int) -> int:
    """Bytes that may be held so, of the share of a policy or of a whole budget."""
    return int(share_bytes * PINNED_SHARE)


class Pins:
    """Which samples are to be held, by the dataset that they are of; whether they are cached is not known here."""

    def __init__(self, by_dataset: Mapping[str, Iterable[Key]] | None = None) -> None:
        self._by_dataset = {dataset: dict.fromkeys(keys) for dataset, keys in (by_dataset or {}).items()}

    def __contains__(self, key: object) -> bool:
        return any(key in keys for keys in self._by_dataset.values())

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._by_dataset.values())

    @property
    def by_dataset(self) -> Mapping[str, Collection[Key]]:
        return self._by_dataset

    def replace(self, dataset: str, keys: Iterable[Key]) -> list[Key]:
        """Hold these of a dataset, and no others of it; the samples of which it is no longer true what was true."""
        before, now = self._by_dataset.pop(dataset, {}), dict.fromkeys(keys)
        if now:
            self._by_dataset[dataset] = now
        return [*(key for key in before if key not in self), *(key for key in now if key not in before)]
