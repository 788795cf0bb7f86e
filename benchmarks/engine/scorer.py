"""What a batch costs the scorer, and how right its scores are: time, bytes, recall and correlation, by index and list.

    .venv-dev/bin/python -m benchmarks.engine.scorer [--quick] [--large] [--json FILE]

Embeddings are synthetic, and move as those of a model in training do (`benchmarks/common/embeddings.py`). First the
index is filled, as a first epoch fills it; then calls of 128 and of 1,024 rows are timed: normalise, update, calibrate,
count, score. Times are CPU times, which other programs disturb less than wall times. hnswlib uses one thread, and
matrix products use as many as BLAS takes, so compare them with OPENBLAS_NUM_THREADS=1. "Correlation" is Spearman's, of
the scores of some samples with those that an exact search for their neighbours yields.

With --json, rows that the file already holds are not measured again, and each new row is written at once. So a run
that was interrupted, or a run without --large, can be continued.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from scipy.stats import spearmanr

from benchmarks.common.command import command_line, main
from benchmarks.common.embeddings import Embeddings
from benchmarks.common.results import machine, plain_table, save
from spiderfs.scorer.index import Ids, Near, Vectors, blocks_of, exact_nearest, normalised
from spiderfs.scorer.scorer import Scorer, importance
from spiderfs.scorer.scoring import ScorerOptions

Kind = Literal["exact", "cells", "hnsw"]
BATCH, MANY = 128, 1024
FEW_CLASSES = 10
SAMPLES_OF_A_CLASS = 1000
COMPARED = 1024


@dataclass(frozen=True)
class Row:
    index: str
    samples: int
    classes: int
    dimension: int
    fill_cpu_ms_per_batch: float
    cpu_ms_per_batch: float  # of 128 rows, when 128 come at once
    cpu_ms_per_batch_of_many: float  # of 128 rows, when 1,024 come at once
    bytes_per_sample: float
    recall: float
    correlation: float
    failures: int


def measure(kind: Kind, samples: int, classes: int, dimension: int, calls: int) -> Row:
    embeddings = Embeddings(samples, dimension, classes)
    scorer = Scorer(embeddings.labels, dimension, ScorerOptions(index=kind))
    fill_s = 0.0
    order = np.random.default_rng(1).permutation(samples)
    for start in range(0, samples, BATCH):
        ids = order[start : start + BATCH]
        vectors: Vectors = normalised(embeddings.of(ids))
        began = time.process_time()
        scorer.index.update(ids, vectors)
        fill_s += time.process_time() - began
    rng = np.random.default_rng(2)
    # The first call finds the radius.
    timed(scorer, embeddings, rng, MANY, 1)
    scorer.new_epoch()
    few_s = timed(scorer, embeddings, rng, BATCH, calls)
    many_s = timed(scorer, embeddings, rng, MANY, max(2, calls // 4))
    ids = rng.choice(samples, min(COMPARED, samples), replace=False)
    return Row(
        index=kind,
        samples=samples,
        classes=classes,
        dimension=dimension,
        fill_cpu_ms_per_batch=fill_s / (samples / BATCH) * 1e3,
        cpu_ms_per_batch=few_s * 1e3,
        cpu_ms_per_batch_of_many=many_s * 1e3,
        bytes_per_sample=scorer.index.bytes_per_sample,
        recall=scorer.recall(COMPARED // 4, rng),
        correlation=correlation(exact(scorer, ids), found(scorer, ids)),
        failures=scorer.index.failures,
    )


def timed(scorer: Scorer, embeddings: Embeddings, rng: np.random.Generator, rows: int, calls: int) -> float:
    """The median CPU time of BATCH rows, in seconds, when so many come at once."""
    times_s = []
    # One call is not counted: after it the processor's caches are warm.
    for _ in range(calls + 1):
        ids = rng.choice(len(embeddings.labels), min(rows, len(embeddings.labels)), replace=False)
        batch = embeddings.of(ids, 0.5).astype(np.float16)
        began = time.process_time()
        scorer.batch(ids, batch)
        times_s.append((time.process_time() - began) * BATCH / len(ids))
    return float(np.median(times_s[1:]))


def exact(scorer: Scorer, ids: Ids) -> NDArray[np.float32]:
    """The scores that a search among all vectors of the index yields for these samples."""
    vectors, most = scorer.index.vectors(ids), scorer.options.neighbours
    return scores_of(scorer, ids, exact_nearest(blocks_of(scorer.index), ids, vectors, most, scorer.radius).within())


def found(scorer: Scorer, ids: Ids) -> NDArray[np.float32]:
    """The scores that the index yields for these samples."""
    near = scorer.index.within(ids, scorer.index.vectors(ids), scorer.radius, scorer.options.neighbours)
    return scores_of(scorer, ids, near)


def scores_of(scorer: Scorer, ids: Ids, near: Near) -> NDArray[np.float32]:
    """The scores of these samples if these are their neighbours."""
    alike = scorer.labels[near.ids] == scorer.labels[ids[near.rows]]
    same, other = (np.bincount(near.rows[which], minlength=len(ids)) for which in (alike, ~alike))
    return importance(same, other)


def correlation(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Spearman's rank correlation."""
    return float(spearmanr(one, other).statistic)


def cases_of(options: argparse.Namespace) -> list[tuple[Kind, int, int, int]]:
    """Index, samples, classes and dimension of each row."""
    kinds: tuple[Kind, ...] = ("exact", "cells", "hnsw")
    if options.quick:
        lists = [(2_000, FEW_CLASSES, 16), (2_000, FEW_CLASSES, 64)]
    else:
        lists = [(samples, FEW_CLASSES, 64) for samples in (10_000, 50_000, 100_000)]
        lists += [(100_000, FEW_CLASSES, dimension) for dimension in (16, 128)]
        lists += [(100_000, 100_000 // SAMPLES_OF_A_CLASS, 64)]
    if options.large:
        lists += [(1_000_000, classes, 64) for classes in (1_000_000 // SAMPLES_OF_A_CLASS, FEW_CLASSES)]
    return [(kind, *some) for some in lists for kind in kinds]


def run(options: argparse.Namespace, console: Console) -> None:
    calls = 5 if options.quick else 20
    kept = options.json is not None and options.json.exists()
    rows = [Row(**row) for row in json.loads(options.json.read_text())["rows"]] if kept else []
    done = {(row.index, row.samples, row.classes, row.dimension) for row in rows}
    for case in track(cases_of(options), console=console, transient=True):
        if case not in done:
            rows.append(measure(*case, calls))
            rows.sort(key=lambda row: (row.samples, row.classes, row.dimension, row.index))
            save(options.json, {"machine": machine(), "batch": BATCH, "rows": [asdict(row) for row in rows]})
    headings = ("index", "samples", "classes", "dim", "fill", "of 128", "of 1024", "bytes", "recall", "corr.")
    title = f"CPU ms of {BATCH} rows, of {BATCH} and of {MANY} that come at once"
    table = plain_table(title, *headings, words=("index",))
    forms = ("", ",", ",", "", ".1f", ".1f", ".1f", ".0f", ".3f", ".3f")
    for row in rows:
        table.add_row(*map(format, asdict(row).values(), forms))
    console.print(table)


if __name__ == "__main__":
    program = command_line(__doc__)
    program.add_argument("--large", action="store_true", help="a million samples too: half an hour of one core")
    main(run, program)
