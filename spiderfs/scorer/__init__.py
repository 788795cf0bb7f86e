"""The table of scorings. To add a scoring, add a file to this folder and a line to the table.

A policy names its scoring in `Policy.scoring`.
"""

from __future__ import annotations

from spiderfs.scorer.scorer import Scorer
from spiderfs.scorer.scoring import LossScores, RankScores, Scoring

SCORINGS: dict[str, type[Scoring]] = {"graph": Scorer, "rank": RankScores, "loss": LossScores}
