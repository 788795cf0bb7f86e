"""Where the hints of a replay come from: `spiderfs simulate` uses the recorded ones, or scores the batches anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from spiderfs.core.guided import Guided
from spiderfs.core.hints import Hint, Ratio, Scored
from spiderfs.core.policy import Key, Policy
from spiderfs.errors import UsageError
from spiderfs.scorer.scoring import ScorerOptions
from spiderfs.simulation.rescoring import depends_on_neighbours, rescored
from spiderfs.trace.format import Trace

AUTO = "auto"
# Embeddings have length 1, so no two are further apart.
MAX_RADIUS = 2.0


def chosen_settings(radii: str | None, neighbours: int | None) -> list[ScorerOptions]:
    """The settings to score anew with; none of them if the recorded scores are to be used.

    Raises UsageError if `radii` is not a list of radii.
    """
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
