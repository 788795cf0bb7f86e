"""The table of scorings; adding one is a file here and a line in it. Policies name theirs in `Policy.scoring`."""

from __future__ import annotations

from spiderfs.scorer.losses import LossScores, RankScores
from spiderfs.scorer.scorer import Scorer
from spiderfs.scorer.scoring import Scoring

SCORINGS: dict[str, type[Scoring]] = {
    "graph": Scorer,
    "rank": RankScores,
    "loss": LossScores,
}
