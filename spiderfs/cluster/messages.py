"""What the managers of one training's mounts tell each other, in frames like those of the hook's protocol.

Rows to be scored are a `Batch`, whose indices name the samples that were served, and `RankEnded` comes after the last
of an epoch; `SharedScores` and `SharedHub` are what was made of them. Samples are named by their index in the list,
which is the same on all nodes.

A `PlanPiece` and a `Progress` are about those samples of a plan that the node which hears them keeps for the sender's
job. The `list` of a `Progress` says whose plan it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spiderfs.errors import ProtocolError
from spiderfs.protocol import Batch, Decoder, Limits, Message, Progress
from spiderfs.protocol.messages import Float32s, Uint32s, demand


@dataclass(frozen=True, eq=False)
class SharedScores(Message):
    """Scores of different samples, made of embeddings of this dimension."""

    TYPE = "shared_scores"
    dimension: int
    ids: Uint32s
    scores: Float32s

    def check(self, limits: Limits) -> None:
        demand(0 < self.dimension <= limits.dimension, f"embeddings of dimension {self.dimension}")
        demand(len(self.scores) == len(self.ids) == len(np.unique(self.ids)), "not one score for each sample")
        demand(bool((np.isfinite(self.scores) & (self.scores > 0)).all()), "a score is not above 0")


@dataclass(frozen=True, eq=False)
class SharedHub(Message):
    """A hub, and its neighbours, nearest first."""

    TYPE = "shared_hub"
    id: int
    neighbours: Uint32s
    distances: Float32s

    def check(self, limits: Limits) -> None:
        demand(len(self.neighbours) == len(self.distances), "not one distance for each neighbour")
        demand(bool(np.isfinite(self.distances).all()), "a distance is not finite")


@dataclass(frozen=True)
class RankEnded(Message):
    """A rank has ended this epoch: its rows of it have been sent."""

    TYPE = "rank_ended"
    rank: int
    epoch: int


@dataclass(frozen=True, eq=False)
class PlanPiece(Message):
    """Draws of the epoch that a reader begins, or goes on with, at the position `start`: those from `first` on.

    There are so many `draws` in all, and the pieces come in order. With none the reader has no plan any more.
    """

    TYPE = "plan_piece"
    reader: str
    epoch: int
    start: int
    draws: int
    first: int
    order: Uint32s

    def check(self, limits: Limits) -> None:
        demand(self.start <= self.draws <= limits.samples, f"position {self.start} in a plan of {self.draws}")
        demand(self.first + len(self.order) <= self.draws, "draws beyond the end of a plan")
        demand(bool(len(self.order)) or not self.draws, "a piece of no draws")


_SAID = (Batch, RankEnded, SharedScores, SharedHub, PlanPiece, Progress)
_KINDS: dict[str, type[Message]] = {kind.TYPE: kind for kind in _SAID}


def unpacked(frames: bytes, samples: int) -> list[Message]:
    """The messages of these frames about a list of so many samples; raises ProtocolError."""
    decoder = Decoder(kinds=_KINDS)
    found: list[Message] = []
    for message in decoder.feed(frames):
        match message:
            case Batch(indices=named) | SharedScores(ids=named) | PlanPiece(order=named):
                largest = int(named.max(initial=0))
            case SharedHub(id=hub, neighbours=near):
                largest = max(hub, int(near.max(initial=0)))
            case RankEnded() | Progress():
                largest = 0
            case _:
                raise message if isinstance(message, ProtocolError) else ProtocolError("no message of another node")
        demand(largest < samples, f"sample {largest} of a list of {samples}", "index")
        found.append(message)
    demand(bool(found) and not decoder.in_frame, "a frame that breaks off")
    return found
