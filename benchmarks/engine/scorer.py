"""The cost of a batch to the scorer: milliseconds, bytes per sample and recall, over set size and dimension.

    .venv/bin/python -m benchmarks.engine.scorer [--quick] [--large] [--json FILE]

Embeddings are synthetic: each class has several clusters, the classes overlap, and the embeddings drift from batch to
batch as those of a model in training do. First the index is filled, as a first epoch fills it; then batches of 128 are
timed: normalise, update, calibrate, count, score. hnswlib uses one thread, and matrix products use as many as BLAS
takes, so compare them with OPENBLAS_NUM_THREADS=1. Other programs disturb the CPU time less than the wall time; the
time of filling is CPU time.

With --json, rows that the file already holds are not measured again, and each new row is written at once. So a run
that was interrupted, or a run without --large, can be continued.

The second table says what a smaller k costs: the rank correlation of its scores with those of the paper's k of 500.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from benchmarks.common.command import command_line
from benchmarks.common.interruption import exit_status
from benchmarks.common.results import machine, plain_table, save
from spiderfs.scorer.index import Ids, Vectors, normalised
from spiderfs.scorer.scorer import Scorer
from spiderfs.scorer.scoring import ScorerOptions

BATCH = 128
CLASSES = 10
CLUSTERS_PER_CLASS = 5
# The standard deviation within a cluster; that of the clusters' centres is 1.
SPREAD = 1.0
# The standard deviation of an embedding between two epochs.
DRIFT = 0.1
RECALL_SAMPLE = 256
PAPERS_K = 500
SMALLER_KS = (50, 100, 200)


@dataclass(frozen=True)
class Row:
    index: str
    samples: int
    dimension: int
    fill_cpu_ms_per_batch: float
    ms_per_batch: float
    cpu_ms_per_batch: float
    bytes_per_sample: float
    recall: float
    median_same: float
    failures: int


class Embeddings:
    """Synthetic embeddings that drift; each is drawn when it is needed, so that a million take no memory."""

    def __init__(self, samples: int, dimension: int) -> None:
        self._rng = np.random.default_rng(0)
        self._centres = self._rng.normal(size=(CLASSES * CLUSTERS_PER_CLASS, dimension)).astype(np.float32)
        self._cluster = self._rng.integers(0, len(self._centres), samples)
        self.labels = self._cluster % CLASSES
        # One sample of twenty lies in a cluster of another class.
        astray = self._rng.random(samples) < 0.05
        self._cluster[astray] = self._rng.integers(0, len(self._centres), int(astray.sum()))
        self._seeds = np.arange(samples)

    def of(self, ids: Ids) -> NDArray[np.float16]:
        own = np.stack([np.random.default_rng(seed).normal(size=self._centres.shape[1]) for seed in self._seeds[ids]])
        moved = DRIFT * self._rng.normal(size=own.shape)
        return (self._centres[self._cluster[ids]] + SPREAD * own + moved).astype(np.float16)


def measure(kind: Literal["exact", "graph"], samples: int, dimension: int, batches: int) -> Row:
    embeddings = Embeddings(samples, dimension)
    scorer = Scorer(embeddings.labels, dimension, ScorerOptions(index=kind))
    fill_s = 0.0
    order = np.random.default_rng(1).permutation(samples)
    for start in range(0, samples, BATCH):
        ids = order[start : start + BATCH]
        vectors: Vectors = normalised(embeddings.of(ids))
        began = time.process_time()
        scorer.index.update(ids, vectors)
        fill_s += time.process_time() - began
    times_s: list[tuple[float, float]] = []
    rng = np.random.default_rng(2)
    # Two batches are not counted: the first finds the radius, and after the second the processor's caches are warm.
    for _ in range(batches + 2):
        ids = rng.choice(samples, BATCH, replace=False)
        batch = embeddings.of(ids)
        began, cpu_began = time.perf_counter(), time.process_time()
        scorer.batch(ids, batch)
        times_s.append((time.perf_counter() - began, time.process_time() - cpu_began))
        if len(times_s) == 1:
            scorer.new_epoch()
    statistics = scorer.statistics()
    wall_s, cpu_s = np.median(times_s[2:], axis=0).tolist()
    return Row(
        index=kind,
        samples=samples,
        dimension=dimension,
        fill_cpu_ms_per_batch=fill_s / (samples / BATCH) * 1e3,
        ms_per_batch=wall_s * 1e3,
        cpu_ms_per_batch=cpu_s * 1e3,
        bytes_per_sample=statistics.bytes_per_sample,
        recall=scorer.recall(RECALL_SAMPLE, rng),
        median_same=statistics.median_same,
        failures=statistics.failures,
    )


def ranks_of_scores(neighbours: int, samples: int, dimension: int) -> NDArray[np.float64]:
    """The ranks of all samples by score, with a calibrated radius."""
    embeddings = Embeddings(samples, dimension)
    vectors = embeddings.of(np.arange(samples))
    scorer = Scorer(embeddings.labels, dimension, ScorerOptions(neighbours=neighbours, index="exact"))
    # The first pass fills the index and finds the radius, the second scores.
    for _ in range(2):
        for start in range(0, samples, BATCH):
            ids = np.arange(start, min(start + BATCH, samples))
            scorer.batch(ids, vectors[ids])
        scorer.new_epoch()
    _, inverse, counts = np.unique(scorer.scores, return_inverse=True, return_counts=True)
    # Equal scores share the mean of their ranks.
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


def correlations_with_papers_k(samples: int, dimension: int) -> dict[int, float]:
    """Spearman's rank correlation between the scores with the paper's k and the scores with each smaller k."""
    papers = ranks_of_scores(PAPERS_K, samples, dimension)
    smaller = {k: ranks_of_scores(k, samples, dimension) for k in SMALLER_KS}
    return {k: float(np.corrcoef(np.stack([papers, ranks])).min()) for k, ranks in smaller.items()}


@dataclass
class Results:
    """The measurements so far, written to a file if --json names one."""

    path: Path | None
    rows: list[Row]
    correlations: dict[str, float]

    @classmethod
    def of(cls, path: Path | None) -> Results:
        if path is None or not path.exists():
            return cls(path, [], {})
        kept = json.loads(path.read_text())
        return cls(path, [Row(**row) for row in kept["rows"]], kept["correlation_with_k_500"])

    def row(self, kind: Literal["exact", "graph"], samples: int, dimension: int, batches: int) -> Row:
        for row in self.rows:
            if (row.index, row.samples, row.dimension) == (kind, samples, dimension):
                return row
        row = measure(kind, samples, dimension, batches)
        self.rows.append(row)
        self.rows.sort(key=lambda row: (row.samples, row.dimension, row.index))
        self.keep()
        return row

    def correlations_of(self, samples: int, dimension: int) -> dict[str, float]:
        if not self.correlations:
            found = correlations_with_papers_k(samples, dimension)
            self.correlations = {str(k): correlation for k, correlation in found.items()}
            self.keep()
        return self.correlations

    def keep(self) -> None:
        if self.path is not None:
            report = {
                "machine": machine(),
                "batch": BATCH,
                "rows": [asdict(row) for row in self.rows],
                "correlation_with_k_500": self.correlations,
            }
            save(self.path, report)


def run(options: argparse.Namespace, console: Console) -> None:
    sizes = (2_000,) if options.quick else (10_000, 100_000, 1_000_000) if options.large else (10_000, 100_000)
    dimensions = (16, 64) if options.quick else (16, 64, 128, 512)
    batches = 5 if options.quick else 20
    kinds: tuple[Literal["exact", "graph"], ...] = ("exact", "graph")
    results = Results.of(options.json)
    headings = ("index", "samples", "dimension", "fill ms", "ms", "CPU ms", "bytes a sample", "recall")
    table = plain_table(f"What a batch of {BATCH} samples costs", *headings, words=("index",))
    cases = list(itertools.product(sizes, dimensions, kinds))
    for samples, dimension, kind in track(cases, console=console, transient=True):
        row = results.row(kind, samples, dimension, batches)
        table.add_row(
            row.index,
            f"{row.samples:,}",
            f"{row.dimension}",
            f"{row.fill_cpu_ms_per_batch:.1f}",
            f"{row.ms_per_batch:.1f}",
            f"{row.cpu_ms_per_batch:.1f}",
            f"{row.bytes_per_sample:.0f}",
            f"{row.recall:.3f}",
        )
    console.print(table)
    table = plain_table(f"Rank correlation of the scores with those of k = {PAPERS_K}", "k", "correlation")
    for k, correlation in results.correlations_of(2_000 if options.quick else 10_000, 64).items():
        table.add_row(k, f"{correlation:.3f}")
    console.print(table)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument(
        "--large", action="store_true", help="measure a million samples too: half an hour of one core, some GB"
    )
    arguments = parser.parse_args()
    return exit_status("scorer", lambda: run(arguments, Console()), "interrupted")


if __name__ == "__main__":
    sys.exit(main())
