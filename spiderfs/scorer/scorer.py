"""The scoring "graph": a sample's score follows from where its embedding lies among all others (SpiderCache, 4.1).

The embeddings of each batch update an index of the whole list. By default each is scaled to length 1, which the paper
does not say: else the radius depends on how long a network makes its vectors. The released program compares raw ones,
with a radius of 1.42 for 512 numbers. A sample's neighbours lie nearer than the radius, the 500 nearest at most. x_same
of them have its own label and x_other another one; equation 4 computes the score from these two numbers.

A bad radius makes all scores equal. It is given, or calibrated (`Radius`), since SpiderCache defines it as
-ln(alpha)/lambda and gives neither number. **class**: a quantile of the distances between random samples of one class,
for each epoch until SETTLED_EPOCHS in a row have changed it by less than SETTLED_CHANGE. **nearest**: for each epoch a
quantile of the distances from a sample to those of its k nearest that have its label. In the first epoch the radius is
computed after every batch; within any other it stays, so that all scores of the epoch can be compared.

Up to EXACT_MAX_SAMPLES samples a batch is compared with all of them, above it with `cells.py`. `index=hnsw` is
SpiderCache's own way, which takes longer and 2.6 times the memory, and finds fewer of the neighbours. Cells hold
vectors of length 1 only, so a long list of raw embeddings is in the graph where hnswlib is installed, and is otherwise
compared whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spiderfs.scorer import index
from spiderfs.scorer.cells import CellIndex
from spiderfs.scorer.graph import GraphIndex, is_installed
from spiderfs.scorer.index import ExactIndex, Ids, Near, NeighbourIndex, Vectors
from spiderfs.scorer.scoring import BatchScores, FoundHub, ScorerOptions, Scoring

# This many distances are remembered, those of some 40 batches: they take 256 KiB, and their quantile takes 1 ms.
REMEMBERED = 1 << 16
# The change of the radius from one epoch to the next, as a share, below which the epoch counts as settled.
SETTLED_CHANGE, SETTLED_EPOCHS = 0.05, 2


class Radius:
    """The distance below which two samples are neighbours; raises ValueError for impossible options."""

    def __init__(self, options: ScorerOptions, remembered: int = REMEMBERED) -> None:
        given = options.radius
        self.fixed = given if isinstance(given, int | float) else None
        self._once = given == "class"
        self._quantile = options.radius_share if self._once else options.radius_quantile
        if self.fixed is not None and not 0 < self.fixed < np.inf:
            raise ValueError(f"the radius must be positive, not {self.fixed}")
        if not 0 < self._quantile < 1:
            raise ValueError(f"the quantile of the radius must lie between 0 and 1, not {self._quantile}")
        self._calibrated = 0.0
        self._frozen = False
        self._settled_epochs = 0
        self._distances = np.zeros(remembered, np.float32)
        self._seen = 0

    @property
    def value(self) -> float:
        """The current radius; 0 while no distance has been observed."""
        return self._calibrated if self.fixed is None else self.fixed

    @property
    def settled(self) -> bool:
        """Whether the radius stays for the rest of the training."""
        return self.fixed is not None or (self._once and self._settled_epochs >= SETTLED_EPOCHS)

    def observe(self, distances: Vectors) -> None:
        """Remember distances between samples of the same label and, in the first epoch, compute the radius again."""
        room = len(self._distances)
        latest = distances[-room:]
        self._distances[(self._seen + np.arange(len(latest))) % room] = latest
        self._seen += len(latest)
        if not self._frozen:
            self._calibrate()

    def new_epoch(self) -> None:
        """Compute the radius from the latest distances, unless the training has settled; it stays until the next."""
        if self.settled:
            return
        before = self._calibrated
        self._calibrate()
        change = abs(self._calibrated - before)
        settled = self._frozen and change < SETTLED_CHANGE * before
        self._settled_epochs = self._settled_epochs + 1 if settled else 0
        self._frozen = self._seen > 0

    def state(self) -> dict[str, Any]:
        """All that `restore` needs, as numbers and arrays."""
        return {
            "calibration": [self._once, self._quantile],
            "radius": self._calibrated,
            "frozen": self._frozen,
            "settled_epochs": self._settled_epochs,
            "distances": self._distances[: min(self._seen, len(self._distances))],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned, if that radius was calibrated in the same way; else begin again."""
        if list(state["calibration"]) != [self._once, self._quantile]:
            return
        self._seen = 0
        self._frozen = True
        self.observe(np.asarray(state["distances"], np.float32))
        self._calibrated = float(state["radius"])
        self._frozen = bool(state["frozen"])
        self._settled_epochs = int(state["settled_epochs"])

    def _calibrate(self) -> None:
        if self._seen:
            self._calibrated = float(np.quantile(self._distances[: self._seen], self._quantile))


class Classes:
    """Draws random samples of one label."""

    def __init__(self, labels: Ids) -> None:
        self._order = np.argsort(labels, kind="stable")
        ordered = labels[self._order]
        self._first = np.searchsorted(ordered, labels, "left")
        self._sizes = np.searchsorted(ordered, labels, "right") - self._first
        self._rng = np.random.default_rng(0)

    def partners(self, ids: Ids, count: int) -> Ids:
        """(ids, count) random samples of the label of each sample, which may be itself."""
        places = self._first[ids, None] + self._rng.integers(self._sizes[ids, None], size=(len(ids), count))
        found: Ids = self._order[places]
        return found


VERSION = 4
STATE_FILE, INDEX_FILE = "scores.npz", "index.bin"
# A saved state names its index by the position in this table.
INDEXES: dict[str, Callable[[int, int], NeighbourIndex]] = {"exact": ExactIndex, "cells": CellIndex, "hnsw": GraphIndex}

# Up to this length, comparing with all samples costs at most twice as much as cells, and misses nothing: 46 and 24
# ms for 128 rows of 50,000 samples, if 1,024 rows come at once (one core; benchmarks/engine/scorer.py).
EXACT_MAX_SAMPLES = 50_000
# neighbour_max of equation 4.
PAPERS_NEIGHBOURS = 500
# The rows of a batch that calibrate the radius, and their distances: the nearest samples have to be sorted.
CALIBRATING_ROWS, CALIBRATING_DISTANCES = 16, 2048
# 1/x_same when x_same is 0: such a sample is rarer than one with a single neighbour of its label.
INVERSE_OF_NONE = 2.0


def importance(same: ArrayLike, other: ArrayLike) -> NDArray[np.float32]:
    """ln(1/x_same + x_other/500 + 1), with 1/x_same := 2 where x_same is 0 (SpiderCache eq. 4)."""
    # 1/INVERSE_OF_NONE replaces an x_same of 0.
    x_same = np.maximum(np.asarray(same), 1 / INVERSE_OF_NONE)
    scores: NDArray[np.float32] = np.log(1 / x_same + np.asarray(other) / PAPERS_NEIGHBOURS + 1).astype(np.float32)
    return scores


@dataclass(frozen=True, slots=True)
class GraphScores(BatchScores):
    """The scores of a batch, and the neighbours that they were computed from; one row for each sample."""

    same: Ids
    """x_same of each sample."""
    other: Ids
    """x_other of each sample."""
    alike: Near
    """The neighbours that count as x_same."""

    def hubs(self) -> Iterator[FoundHub]:
        """All samples whose x_same is above 0, those of the highest x_same first."""
        order = np.argsort(self.alike.rows, kind="stable")
        ends = np.cumsum(self.same)
        for row in np.argsort(-self.same, kind="stable").tolist():
            count = int(self.same[row])
            if not count:
                return
            its = order[ends[row] - count : ends[row]]
            its = its[np.argsort(self.alike.distances[its], kind="stable")]
            yield FoundHub(int(self.ids[row]), self.alike.ids[its], self.alike.distances[its])


class Scorer(Scoring):
    """The scoring "graph"."""

    def __init__(self, labels: ArrayLike, dimension: int, options: ScorerOptions | None = None) -> None:
        super().__init__(labels, dimension, options)
        count = len(self.labels)
        kind = self.options.index
        self._raw = self.options.embeddings == "raw"
        if kind == "auto" and count <= EXACT_MAX_SAMPLES:
            kind = "exact"
        elif kind == "auto":
            kind = "cells" if not self._raw else "hnsw" if is_installed() else "exact"
        self._kind = list(INDEXES).index(kind)
        self.index = INDEXES[kind](count, dimension)
        self._radius = Radius(self.options)
        self._classes = Classes(self.labels)
        self._present = np.zeros(count, bool)
        self._same = np.zeros(count, np.int32)
        self._other = np.zeros(count, np.int32)

    @classmethod
    def saved(cls, labels: ArrayLike, options: ScorerOptions, directory: Path) -> Self | None:
        try:
            index.check_whole(directory / STATE_FILE)
            dimension = int(index.saved_arrays(directory / STATE_FILE)["identity"][3])
        except (OSError, ValueError, KeyError, IndexError):
            return None
        made = cls(labels, dimension, options)
        return made if made.restore(directory) else None

    @property
    def radius(self) -> float:
        return self._radius.value

    def batch(
        self,
        indices: ArrayLike,
        embeddings: NDArray[np.floating],
        losses: NDArray[np.floating] | None = None,
        batches: int = 1,
    ) -> GraphScores:
        """Score batches by their embeddings; this scoring ignores losses."""
        rows = np.shape(indices)
        if len(rows) != 1 or embeddings.shape != (*rows, self.dimension):
            raise ValueError(
                f"{rows} indices with embeddings of shape {embeddings.shape}: give rows of {self.dimension} numbers"
            )
        ids, first = self._different(indices)
        if not np.isfinite(embeddings).all():
            raise ValueError("an embedding has numbers that are not finite")
        vectors = embeddings[first].astype(np.float32) if self._raw else index.normalised(embeddings[first])
        self.index.update(ids, vectors)
        self._present[ids] = True
        if not self._radius.settled:
            self._calibrate(ids, vectors, batches)
        near = self.index.within(ids, vectors, self.radius, self.options.neighbours)
        alike = self._are_alike(ids, near)
        same = np.bincount(near.rows[alike], minlength=len(ids))
        other = np.bincount(near.rows, minlength=len(ids)) - same
        scores = importance(same, other)
        self._take(ids, scores)
        self._same[ids], self._other[ids] = same, other
        return GraphScores(ids, scores, same, other, Near(near.rows[alike], near.ids[alike], near.distances[alike]))

    def new_epoch(self) -> None:
        """Compute the radius of the epoch that begins, and give samples without a score the mean of the others."""
        self._radius.new_epoch()
        super().new_epoch()

    def statistics(self) -> dict[str, float]:
        """Figures of the samples that have been scored.

        `isolated_share` of them have an x_same of 0, `full_share` as many neighbours as count: theirs cannot rise.
        """
        scored = self._scored
        count = max(1, int(scored.sum()))
        same, other = self._same[scored], self._other[scored]
        return {
            "radius": self.radius,
            "median_same": float(np.median(same)) if len(same) else 0.0,
            "mean_same": float(same.mean()) if len(same) else 0.0,
            "isolated_share": int((same == 0).sum()) / count,
            "full_share": int((same + other >= self.options.neighbours).sum()) / count,
            "sigma": self.sigma,
        }

    def described(self) -> list[tuple[str, str]]:
        found = self.statistics()
        return [
            ("radius", f"{self.radius:.4g}{'' if self._radius.settled else '  (of this epoch)'}"),
            ("median x_same", f"{found['median_same']:g}"),
            ("mean x_same", f"{found['mean_same']:.4g}"),
            ("isolated share", f"{found['isolated_share']:.3f}  (x_same = 0)"),
            ("saturated share", f"{found['full_share']:.3f}  (more samples within the radius than count)"),
            ("scored share", f"{self.scored_share:.3f}"),
            ("sigma", f"{self.sigma:.4g}"),
            ("bytes per sample", f"{self.index.bytes_per_sample:.0f}"),
        ]

    def recall(self, sample: int, rng: np.random.Generator) -> float:
        """The share of the neighbours that count as x_same which the index finds, over `sample` random samples.

        An exact search over the whole list gives the true neighbours: for a long list this takes some tenths of a
        second.
        """
        present = self.index.present()
        if not len(present):
            return 1.0
        ids = rng.choice(present, min(sample, len(present)), replace=False)
        vectors = self.index.vectors(ids)
        most, radius = self.options.neighbours, self.radius
        exactly = index.exact_nearest(index.blocks_of(self.index), ids, vectors, most, radius).within()
        # Each pair of a row and its neighbour becomes one number.
        found, true = (
            (near.rows * len(self.labels) + near.ids)[self._are_alike(ids, near)]
            for near in (self.index.within(ids, vectors, radius, most), exactly)
        )
        return float(np.isin(true, found).mean()) if len(true) else 1.0

    # -- over a remount

    def save(self, directory: Path) -> None:
        """Write the index and the scores. After a crash between the two, the scores are older, which does no harm."""
        index.write_whole(directory / INDEX_FILE, self.index.save)
        scores = {"scores": self.scores, "scored": self._scored, "same": self._same, "other": self._other}
        arrays = {"identity": self._identity(), **scores, **self._radius.state()}
        index.write_whole(directory / STATE_FILE, lambda path: index.save_arrays(path, arrays))

    def restore(self, directory: Path) -> bool:
        try:
            for name in (STATE_FILE, INDEX_FILE):
                index.check_whole(directory / name)
            state = index.saved_arrays(directory / STATE_FILE)
            if state["identity"].tolist() != self._identity():
                return False
            self.index.restore(directory / INDEX_FILE)
        except (OSError, ValueError, KeyError):
            return False
        self.scores, self._scored = state["scores"], state["scored"]
        self._same, self._other = state["same"], state["other"]
        self._radius.restore(state)
        self._present[:] = False
        self._present[self.index.present()] = True
        return True

    def _identity(self) -> list[int]:
        """A saved state can be used only if its identity is equal to this one."""
        labels = crc32(self.labels.tobytes())
        return [VERSION, self._kind, self.options.neighbours, self.dimension, labels, self._raw]

    # -- scoring

    def _calibrate(self, ids: Ids, vectors: Vectors, batches: int) -> None:
        """Show the radius the distances of some rows to samples of their labels: random ones, or the nearest.

        Several batches show as many as if each came alone: else the radius would follow older batches for longer.
        """
        step = -(-len(ids) // (CALIBRATING_ROWS * batches))
        ids, vectors = ids[::step], vectors[::step]
        if self.options.radius == "class":
            partners = self._classes.partners(ids, CALIBRATING_DISTANCES // CALIBRATING_ROWS)
            rows, columns = np.nonzero(self._present[partners] & (partners != ids[:, None]))
            others = self.index.vectors(partners[rows, columns])
            self._radius.observe(np.linalg.norm(others - vectors[rows], axis=1))
            return
        nearest = self.index.nearest(ids, vectors, self.options.neighbours)
        alike = (self.labels[nearest.ids] == self.labels[ids, None]) & (nearest.ids >= 0)
        distances = nearest.distances[alike]
        self._radius.observe(distances[:: 1 + len(distances) // (CALIBRATING_DISTANCES * batches)])

    def _are_alike(self, ids: Ids, near: Near) -> NDArray[np.bool_]:
        """Whether each neighbour has the label of its row's sample."""
        alike: NDArray[np.bool_] = self.labels[near.ids] == self.labels[ids[near.rows]]
        return alike
