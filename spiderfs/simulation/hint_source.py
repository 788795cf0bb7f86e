"""Where the hints of a replay come from: `spiderfs simulate` uses the recorded ones, or scores the batches anew.

The scorings are those of a mount (`scorer/`), and they get the same batches in the same order; batches that the mount
scored together are scored together here. So with the settings of the mount they find the same scores again. The scores
and hubs that they find become the hints of a replay, each where its batch came; lists, pins, ends of epochs and the
ratio stay as they were recorded. Which hub a batch gets is left to the replay: the best of its samples that is no hub
yet.

A trace has the embeddings of the samples that were served while it was recorded. If stand-ins were served, the samples
that they stood in for have old embeddings. A trace that was recorded without stand-ins (`substitute=off`) has the right
embeddings of all samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from spiderfs.core.guided import Guided
from spiderfs.core.hints import Candidates, Epoch, Hint, Hub, Labels, Pinning, Ratio, Scored, WarmUp
from spiderfs.core.policy import Key, Policy
from spiderfs.errors import UsageError
from spiderfs.scorer import SCORINGS
from spiderfs.scorer.scorer import Scorer
from spiderfs.scorer.scoring import Hub as ScorerHub
from spiderfs.scorer.scoring import ScorerOptions, Scoring
from spiderfs.trace.batch import TracedBatch
from spiderfs.trace.format import Trace

AUTO = "auto"
# Embeddings have length 1, so no two are further apart.
MAX_RADIUS = 2.0


@dataclass(frozen=True, slots=True)
class Rescored:
    hints: list[tuple[int, Hint]]
    """The hints to replay instead of `Trace.hints`."""
    described: dict[str, dict[str, str]]
    """For each course, by its number, how its scoring describes itself at the end of the trace."""


def depends_on_neighbours(scoring: str) -> bool:
    """Whether a scoring uses the radius and the number of neighbours."""
    return issubclass(SCORINGS[scoring], Scorer)


def rescored(trace: Trace, scoring: str, options: ScorerOptions) -> Rescored:
    """The results of a scoring of a trace; raises UsageError if the trace has no embeddings, or is damaged."""
    if not trace.has_batches:
        raise UsageError(
            "the trace holds no embeddings, so nothing can be scored anew: record one with a trainer attached and"
            " trace_embeddings=on"
        )
    hints: list[tuple[int, Hint]] = []
    courses: dict[str, _Course] = {}
    for before, lesson in _lessons(trace):
        match lesson:
            case Labels(course_id, labels):
                # After a crash of the manager a trainer declares its list again, and its scoring goes on.
                if course_id not in courses or courses[course_id].labels != labels:
                    courses[course_id] = _Course(course_id, labels, scoring, options)
                hints.append((before, lesson))
            case list():
                course_id = lesson[0].course_id
                if course_id not in courses:
                    raise _damaged(f"it holds a batch of course {course_id}, but not its list")
                hints += [(before, hint) for hint in courses[course_id].batches(lesson)]
            case Epoch(course_id):
                if course_id in courses:
                    courses[course_id].new_epoch()
                hints.append((before, lesson))
            case Ratio() | Pinning() | WarmUp():
                hints.append((before, lesson))
    return Rescored(hints, {name: found.described() for name, found in courses.items()})


def _lessons(trace: Trace) -> Iterator[tuple[int, list[TracedBatch] | Hint]]:
    """The lessons of a trace, as `Trace.lessons` has them; batches that were scored together are one lesson."""
    together: list[TracedBatch] = []
    came_before, course_id = 0, ""
    for before, lesson in trace.lessons():
        if together and not (isinstance(lesson, TracedBatch) and lesson.goes_on and lesson.course_id == course_id):
            yield came_before, together
            together = []
        if isinstance(lesson, TracedBatch):
            together.append(lesson)
            came_before, course_id = before, lesson.course_id
        else:
            yield before, lesson
    if together:
        yield came_before, together


class _Course:
    """A course and its scoring, as `daemon/training/courses/courses.py` has them for a mount."""

    def __init__(self, course_id: str, labels: Mapping[Key, int], scoring: str, options: ScorerOptions) -> None:
        self.labels = labels
        self._course_id = course_id
        self._keys = list(labels)
        self._index_of = {key: index for index, key in enumerate(self._keys)}
        self._name = scoring
        self._options = options
        self._scoring: Scoring | None = None

    def batches(self, batches: Sequence[TracedBatch]) -> list[Hint]:
        """The new scores of batches that were scored together, and the hub of each of them that has one."""
        apart = SCORINGS[self._name].ranks_within_batches
        groups = [[batch] for batch in batches] if apart else [batches]
        return [hint for group in groups for hint in self._scored(group)]

    def _scored(self, batches: Sequence[TracedBatch]) -> list[Hint]:
        keys = np.concatenate([batch.keys for batch in batches]).tolist()
        try:
            indices = [self._index_of[key] for key in keys]
        except KeyError as exc:
            raise _damaged(f"a batch of course {self._course_id} has the file {exc}, which its list has not") from None
        dimension = int(batches[0].embeddings.shape[1])
        if self._scoring is None or not self._scoring.fits(dimension):
            labels = np.fromiter(self.labels.values(), np.int64, len(self.labels))
            self._scoring = SCORINGS[self._name](labels, dimension, self._options)
        given = [batch.losses for batch in batches if batch.losses is not None]
        try:
            embeddings = np.concatenate([batch.embeddings for batch in batches]).astype(np.float32)
            losses = np.concatenate(given).astype(np.float32) if given else None
            scored = self._scoring.batch(indices, embeddings, losses, len(batches))
        except ValueError as exc:
            raise _damaged(str(exc)) from exc
        found = [self._keys[index] for index in scored.ids.tolist()]
        hints: list[Hint] = [Scored(self._course_id, found, scored.scores.tolist())] if found else []
        numbers = np.repeat(np.arange(len(batches)), [len(batch.keys) for batch in batches]).tolist()
        batch_of = dict(zip(indices, numbers, strict=True))
        hubs_of: dict[int, list[ScorerHub]] = {}
        for hub in scored.hubs():
            hubs_of.setdefault(batch_of[hub.id], []).append(hub)
        # As the mount does, the batch with the best hub comes first.
        hints += [Candidates(self._course_id, _Hubs(self._course_id, self._keys, its)) for its in hubs_of.values()]
        return hints

    def new_epoch(self) -> None:
        if self._scoring is not None:
            self._scoring.new_epoch()

    def described(self) -> dict[str, str]:
        return {} if self._scoring is None else dict(self._scoring.described())


class _Hubs(Sequence[Hub]):
    """The hubs that a batch may have, the best first: which one it gets depends on the policy that is replayed.

    Arrays hold the neighbours of all of them, 8 bytes each: with 30 neighbours a sample takes 240 bytes.
    """

    def __init__(self, course_id: str, keys: Sequence[Key], found: Sequence[ScorerHub]) -> None:
        self._course_id = course_id
        self._keys = keys
        self._ids = [hub.id for hub in found]
        self._ends = np.cumsum([len(hub.neighbours) for hub in found], dtype=np.int64)
        self._neighbours = np.concatenate([hub.neighbours for hub in found]).astype(np.int32)
        self._distances = np.concatenate([hub.distances for hub in found])

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: int) -> Hub:  # type: ignore[override]  # nobody asks for a slice
        key = self._keys[self._ids[place]]
        its = slice(int(self._ends[place - 1]) if place else 0, int(self._ends[place]))
        neighbours = [self._keys[index] for index in self._neighbours[its].tolist()]
        return Hub(key, self._course_id, neighbours, self._distances[its].tolist())


def _damaged(reason: str) -> UsageError:
    return UsageError(f"the trace is damaged: {reason}: record another, or replay it without scoring anew")


def chosen_settings(radii: str | None, neighbours: int | None) -> list[ScorerOptions]:
    """The settings to score anew with; none for the recorded scores. Raises UsageError if `radii` are no radii."""
    if radii is None and neighbours is None:
        return []
    settings = []
    for word in (AUTO if radii is None else radii).split(","):
        try:
            radius = None if word.strip() == AUTO else float(word)
        except ValueError:
            radius = 0.0
        if radius is not None and not 0 < radius <= MAX_RADIUS:
            raise UsageError(f"no radius: {word.strip()!r}; give numbers above 0 and up to {MAX_RADIUS:g}, or {AUTO}")
        chosen = ScorerOptions(radius=radius)
        settings.append(chosen if neighbours is None else replace(chosen, neighbours=neighbours))
    return list(dict.fromkeys(settings))


class HintSource:
    """The hints for the replays of one trace."""

    def __init__(self, trace: Trace, settings: Sequence[ScorerOptions], ratio: float | None) -> None:
        """`settings` are those to score anew with; a `ratio` makes replays ignore the recorded ratios."""
        self._trace = trace
        self._settings = settings
        self._ratio = ratio
        self._recorded = trace.hints()
        self._anew: dict[tuple[str, ScorerOptions], list[tuple[int, Hint]]] = {}
        self.scorings: list[dict[str, Any]] = []
        """A summary of each new scoring, as plain data."""

    def settings_for(self, policy: type[Policy]) -> Sequence[ScorerOptions | None]:
        """The settings to replay a policy with; None stands for the recorded hints."""
        if not self._settings or not issubclass(policy, Guided):
            return [None]
        return self._settings if depends_on_neighbours(policy.scoring) else self._settings[:1]

    def hints(self, policy: type[Policy], setting: ScorerOptions | None) -> list[tuple[int, Hint]]:
        """The hints for a policy, each with the number of the access before which it comes."""
        hints = self._recorded if setting is None else self._scored(policy.scoring, setting)
        if self._ratio is None:
            return hints
        return [(before, hint) for before, hint in hints if not isinstance(hint, Ratio)]

    def _scored(self, scoring: str, setting: ScorerOptions) -> list[tuple[int, Hint]]:
        if (scoring, setting) not in self._anew:
            began = perf_counter()
            found = rescored(self._trace, scoring, setting)
            self._anew[scoring, setting] = found.hints
            recorded, anew = (set(_scores(hints)) for hints in (self._recorded, found.hints))
            self.scorings.append(
                {
                    "scoring": scoring,
                    **self.described(scoring, setting),
                    "scores": len(anew),
                    "scores_as_recorded": len(anew & recorded),
                    "seconds": perf_counter() - began,
                    "courses": found.described,
                }
            )
        return self._anew[scoring, setting]

    @staticmethod
    def described(scoring: str, setting: ScorerOptions | None) -> dict[str, Any]:
        """A setting as plain data; the values are None if they make no difference to the scoring."""
        if setting is None or not depends_on_neighbours(scoring):
            return {"radius": None, "neighbours": None}
        radius = AUTO if setting.radius is None else f"{setting.radius:.12g}"
        return {"radius": radius, "neighbours": setting.neighbours}


def _scores(hints: Sequence[tuple[int, Hint]]) -> Iterator[tuple[int, str, Key, float]]:
    """Each new score: the number of the access before which it came, the course, the sample and the score."""
    for before, hint in hints:
        if isinstance(hint, Scored):
            yield from ((before, hint.course_id, *score) for score in zip(hint.keys, hint.scores, strict=True))
