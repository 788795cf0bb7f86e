"""Pinned samples: a trainer has said that it will read them again and again, so they stay in the cache.

A policy with pins has a section of this name, with this share of the policy's room. A pinned sample enters that section
as soon as it is cached, and is never a victim of other samples. The caller of `HasPins.pin` pins no more samples than
fit; the limit of the section holds in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from spiderfs.core.policy import Key

PINNED = "pinned"
"""The name of the section."""
# The section's share of the policy's room. ImPACT has a buffer of this size for samples to evaluate before each epoch.
PINNED_SHARE = 0.25


def pinned_limit(share_bytes: int) -> int:
    """The bytes that pinned samples may have, out of a policy's share or of a whole budget."""
    return int(share_bytes * PINNED_SHARE)


class Pins:
    """Which samples of each course are pinned; this class does not know whether they are cached."""

    def __init__(self, by_course: Mapping[str, Iterable[Key]] | None = None) -> None:
        self._by_course = {course_id: dict.fromkeys(keys) for course_id, keys in (by_course or {}).items()}

    def __contains__(self, key: object) -> bool:
        return any(key in keys for keys in self._by_course.values())

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._by_course.values())

    @property
    def by_course(self) -> Mapping[str, Collection[Key]]:
        return self._by_course

    def replace(self, course_id: str, keys: Iterable[Key]) -> list[Key]:
        """Pin these samples of a course, in place of those that were pinned.

        Returns the samples that have changed: those that are no longer pinned, and those that were not pinned before.
        """
        before, now = self._by_course.pop(course_id, {}), dict.fromkeys(keys)
        if now:
            self._by_course[course_id] = now
        return [*(key for key in before if key not in self), *(key for key in now if key not in before)]
