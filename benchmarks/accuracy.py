"""Which choices of the cache and of the sampler cost accuracy, and what do they save?

    .venv/bin/python benchmarks/accuracy.py --data DIR --json FILE      the whole measurement, about an hour
    .venv/bin/python benchmarks/accuracy.py --data DIR --quick          under a minute, for a look

DIR holds train/CLASS/NAME and test/CLASS/NAME. This is the training of benchmarks/train.py without its mount: images
are decoded once into memory, and reads are decided by the same engine, policy, scorer and sampler that serve a mount,
called in the order in which the daemon calls them. So a run takes about a minute, and many choices can be compared. It
says nothing about time. Reads are AHEAD batches ahead of training, as those of two loader workers.

Beside what its own cache fetched stands, for each run, what others would have fetched for the list that its sampler
drew: LRU, MinIO, MIN with knowledge of the whole training, and MIN that knows each epoch only once it begins, which is
all that a sampler can publish whose next draws depend on what is learned until then.

A FILE that exists, of a measurement of the same extent, is gone on with: what it holds is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from interruption import unwind_on_signals
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from train import BATCH, CACHED_SHARE, LEARNING_RATE, Data, Extent, Images, evaluate, find_data, network, plain_table

from spiderfs.core.elastic import Elastic, ElasticOptions
from spiderfs.core.engine import Engine
from spiderfs.core.guided import Guided
from spiderfs.core.homophily import MAX_STAND_INS, Hub
from spiderfs.core.replay import Accesses, Replay, policy_for, replay
from spiderfs.policies import POLICIES
from spiderfs.policies.spider import Spider
from spiderfs.protocol import Plan
from spiderfs.scorer.scorer import FIRST_PRIOR, Scorer, ScorerOptions
from spiderfs.trace import TraceWriter
from trainer_hook import SpiderSampler
from trainer_hook.client import Client

# Two loader workers, two batches each.
AHEAD = 4
# Of the held-out images, which are evaluated after each epoch: the last epoch is judged by all.
EVALUATED_SHARE = 5
TABLE_WIDTH = 125
MOST_ORIGIN, MOST_TOP1_LOSS = 0.5, 0.005
# SHADE's b0, and what keeps a loss of 0 a score.
RANK_OFFSET, LEAST_LOSS = 10, 1e-3
# The list of samples, as hubs and traces name it.
DATASET = 1


@dataclass(frozen=True)
class Configuration:
    """Every default is what the product does by itself."""

    scores: Literal["graph", "loss", "rank"] | None = "graph"
    """What the sampler draws by and the cache keeps: SpiderCache's graph, the latest loss, or SHADE's rank of it in its
    batch. None samples uniformly, over an LRU."""
    ratio: tuple[float, float] = (0.9, 0.8)
    """Share of the importance section at first and in the end; 1 leaves no room for hubs."""
    stand_in_share: float = 1.0
    """Of the misses that a stand-in exists for: less is what `substitute_when=late` will do."""
    max_stand_ins: int = MAX_STAND_INS
    coverage: float = 0.0
    """Share of the draws that are uniform."""
    weight_clip: float | None = None
    """Losses are multiplied by 1/(N q), but by no more than this."""
    uniform_epochs: int = 0
    """At the beginning; scores are learned in them, but not drawn by."""
    radius_quantile: float = 0.5
    sharpness: float = 1.0
    """The sampler draws by scores to this power; the cache keeps by them as they are."""
    systematic: bool = False
    """Draw with the same chances, but as evenly as can be: see SystematicSampler."""


IMPORTANCE_ONLY = (1.0, 1.0)

CONFIGURATIONS = {
    "uniform": Configuration(scores=None),
    "importance": Configuration(ratio=IMPORTANCE_ONLY),
    "spider": Configuration(),
    "stand-ins 2": Configuration(max_stand_ins=2),
    "stand-ins 4": Configuration(max_stand_ins=4),
    "stand-ins 16": Configuration(max_stand_ins=16),
    "late 10 %": Configuration(stand_in_share=0.1),
    "coverage 0.3": Configuration(ratio=IMPORTANCE_ONLY, coverage=0.3),
    "weights": Configuration(ratio=IMPORTANCE_ONLY, weight_clip=4.0),
    "warm-up 3": Configuration(ratio=IMPORTANCE_ONLY, uniform_epochs=3),
    "radius 0.3": Configuration(ratio=IMPORTANCE_ONLY, radius_quantile=0.3),
    "radius 0.7": Configuration(ratio=IMPORTANCE_ONLY, radius_quantile=0.7),
    "coverage 1": Configuration(ratio=IMPORTANCE_ONLY, coverage=1.0),
    "weights + coverage 0.3": Configuration(ratio=IMPORTANCE_ONLY, weight_clip=4.0, coverage=0.3),
    "weights + sharpness 0.5": Configuration(ratio=IMPORTANCE_ONLY, weight_clip=4.0, sharpness=0.5),
    "weights + systematic": Configuration(ratio=IMPORTANCE_ONLY, weight_clip=4.0, systematic=True),
    "sharpness 0.5": Configuration(ratio=IMPORTANCE_ONLY, sharpness=0.5),
    "systematic": Configuration(ratio=IMPORTANCE_ONLY, systematic=True),
    "loss": Configuration(scores="loss", ratio=IMPORTANCE_ONLY),
    "loss + weights": Configuration(scores="loss", ratio=IMPORTANCE_ONLY, weight_clip=4.0),
    "loss rank": Configuration(scores="rank", ratio=IMPORTANCE_ONLY),
    "ratio 90": Configuration(ratio=(0.9, 0.9)),
    "ratio 90-50": Configuration(ratio=(0.9, 0.5)),
}
BASELINE = "uniform"

FULL = Extent(epochs=12, training=10_000, held_out=10_000, seeds=3)
QUICK = Extent(epochs=3, training=1_500, held_out=1_000, seeds=1)
QUICK_CONFIGURATIONS = ("uniform", "importance", "spider", "loss")


@dataclass(frozen=True)
class Pool:
    """Decoded images, and the bytes of their files."""

    images: Tensor
    labels: Tensor
    sizes: list[int]
    held_out: Data

    @property
    def capacity(self) -> int:
        return int(sum(self.sizes) * CACHED_SHARE)


@dataclass(frozen=True)
class Epoch:
    hit_ratio: float
    origin_bytes_per_sample: float
    drawn_share: float  # of the training set: distinct samples that the sampler drew
    served_share: float  # distinct samples that were trained on
    redirected_share: float  # of the draws
    ratio: float  # of the importance section, at the end
    top1: float  # on a part of the held-out images


@dataclass(frozen=True)
class Run:
    configuration: str
    seed: int
    epochs: list[Epoch]
    top1: float
    """On all held-out images, in the end."""
    list_origin: dict[str, list[float]]
    """Origin bytes per sample by epoch, of each cache in LIST_CACHES on the list that the sampler drew."""
    graph: dict[str, float]
    """Of the scorer, in the end."""
    seconds: float

    def later(self, field: str) -> float:
        """The mean without the first epoch: it fills the cache, and nothing is scored in it."""
        return statistics.fmean(getattr(epoch, field) for epoch in self.epochs[1:])

    def list_later(self, cache: str) -> float:
        return statistics.fmean(self.list_origin[cache][1:])


# -- what decides


class LossScores:
    """Scores from losses, with what else the daemon asks of a scorer."""

    def __init__(self, samples: int, ranked: bool) -> None:
        self._ranked = ranked
        self.scores = np.full(samples, FIRST_PRIOR, np.float32)
        self._scored = np.zeros(samples, bool)

    def batch(self, served: NDArray[np.int64], losses: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[Any]]:
        ids, first = np.unique(served, return_index=True)
        scores = np.maximum(losses[first], LEAST_LOSS)
        if self._ranked:
            scores = np.log((losses[first][:, None] > losses[None]).sum(1) + RANK_OFFSET).astype(np.float32)
        self.scores[ids] = scores
        self._scored[ids] = True
        return ids, scores

    def new_epoch(self) -> None:
        self.scores[~self._scored] = self.scores[self._scored].mean()

    @property
    def sigma(self) -> float:
        return float(self.scores[self._scored].std())


@dataclass
class Counts:
    opens: int = 0
    hits: int = 0
    redirects: int = 0
    origin_bytes: int = 0


class Cache:
    """What a mount and its daemon do with reads and batches; a sample's number is its key."""

    def __init__(
        self,
        configuration: Configuration,
        labels: Sequence[int],
        sizes: list[int],
        capacity: int,
        dimension: int,
        seed: int,
        trace: TraceWriter | None = None,
    ) -> None:
        self.configuration = configuration
        self._sizes = sizes
        self._trace = trace
        self._rng = np.random.default_rng([seed, 1])
        start, end = configuration.ratio
        self.guided: Guided | None = Spider(start, configuration.max_stand_ins) if configuration.scores else None
        self.engine = Engine(self.guided or POLICIES["lru"](), capacity)
        self.elastic = Elastic(ElasticOptions(start=start, end=end))
        self.scorer: Scorer | LossScores | None = None
        if configuration.scores == "graph":
            options = ScorerOptions(radius_quantile=configuration.radius_quantile)
            self.scorer = Scorer(labels, dimension, options)
        elif configuration.scores:
            self.scorer = LossScores(len(labels), configuration.scores == "rank")
        self._epochs_done = self._accesses = 0
        self.counts = Counts()
        self._note_ratio()

    # -- as the client of a SpiderSampler

    def scores(self, name: str, timeout_s: float) -> NDArray[np.float32] | None:
        if self.scorer is None or self._epochs_done < max(1, self.configuration.uniform_epochs):
            return None
        return self.scorer.scores**self.configuration.sharpness

    def plan(self, plan: Plan) -> None:
        """Nothing here fetches ahead."""

    # -- as the mount

    def read(self, wanted: int) -> int:
        """The sample that is given for one that is asked for."""
        self._accesses += 1
        self.counts.opens += 1
        size = self._sizes[wanted]
        hit = wanted in self.engine.members
        given = wanted if hit else self._stand_in(wanted)
        if given != wanted:
            self.counts.redirects += 1
        if hit or given != wanted:
            self.counts.hits += 1
        else:
            self.counts.origin_bytes += size
        self.engine.opened(given, self._sizes[given])
        if self._trace is not None:
            if given == wanted:
                self._trace.append(self._accesses, wanted, size, served=hit, dataset=DATASET)
            else:
                self._trace.redirect(self._accesses, wanted, size, given, self._sizes[given], DATASET)
        return given

    def _stand_in(self, wanted: int) -> int:
        if self.guided is None or self._rng.random() >= self.configuration.stand_in_share:
            return wanted
        hub = self.guided.stand_in(str(DATASET), wanted)
        if hub is None:
            return wanted
        self.guided.stood_in(hub)
        assert isinstance(hub, int)
        return hub

    # -- as the daemon

    def learn(self, served: NDArray[np.int64], embeddings: NDArray[np.float16], losses: NDArray[np.float32]) -> None:
        """Take in a batch: what was trained on, not what was asked for."""
        if self.guided is None:
            return
        hub = None
        if isinstance(self.scorer, Scorer):
            scored = self.scorer.batch(served, embeddings)
            ids, scores, hub = scored.ids, scored.scores, scored.hub()
        else:
            assert self.scorer is not None
            ids, scores = self.scorer.batch(served, losses)
        for sample, score in zip(ids.tolist(), scores.tolist(), strict=True):
            self.guided.scored(sample, score)
            if self._trace is not None:
                self._trace.score(self._accesses, sample, score)
        if hub is not None:
            found = Hub(hub.id, str(DATASET), hub.neighbours.tolist(), hub.distances.tolist())
            self.guided.hub_found(found)
            # It was read with this batch: its bytes lie in landing still.
            self.engine.place(hub.id, self._sizes[hub.id])
            if self._trace is not None:
                self._trace.hub(self._accesses, found, DATASET)

    def epoch_end(self, accuracy: float, progress: float) -> None:
        self._epochs_done += 1
        self.counts = Counts()
        if self.guided is None or self.scorer is None:
            return
        self.scorer.new_epoch()
        self.elastic.observe_sigma(self.scorer.sigma)
        self.elastic.observe_accuracy(accuracy)
        self.guided.new_epoch()
        self.guided.set_ratio(self.elastic.ratio(progress))
        self.engine.settle()
        if self._trace is not None:
            self._trace.epoch(self._accesses, DATASET)
        self._note_ratio()

    @property
    def ratio(self) -> float:
        return self.guided.ratio if self.guided is not None else 0.0

    def _note_ratio(self) -> None:
        if self._trace is not None and self.guided is not None:
            self._trace.ratio(self._accesses, self.guided.ratio)

    def graph(self) -> dict[str, float]:
        return asdict(self.scorer.statistics()) if isinstance(self.scorer, Scorer) else {}


class SystematicSampler(SpiderSampler):
    """Each sample as often as its chance says, rounded up or down at random.

    Drawn independently, a sample that is expected once is drawn twice or more in 26 % of the epochs and never in 37 %.
    """

    def _drawn(self, draws: int) -> NDArray[np.uint32]:
        if self._scores is None:
            return super()._drawn(draws)
        rng = np.random.default_rng([self._seed, self.epoch])
        order = rng.permutation(self._samples)
        edges = np.cumsum(self.probabilities()[order])
        # Evenly spaced points fall upon each stretch of length q as often as draws * q says, rounded.
        points = (rng.random() + np.arange(draws)) / draws * edges[-1]
        places = np.minimum(np.searchsorted(edges, points, side="right"), self._samples - 1)
        drawn: NDArray[np.uint32] = rng.permutation(order[places]).astype(np.uint32)
        return drawn


# -- training


def train(
    pool: Pool,
    configuration: Configuration,
    name: str,
    seed: int,
    epochs: int,
    stepped: Callable[[], None] = lambda: None,
    trace: TraceWriter | None = None,
) -> Run:
    """Train once; all runs of a seed begin with the same weights, and without scores draw the same list."""
    began = time.monotonic()
    torch.manual_seed(seed)
    samples = len(pool.sizes)
    # Half the time of the other layout.
    model = network(pool.held_out.classes).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert isinstance(model, nn.Sequential)
    features, classifier = model[:-1], cast(nn.Linear, model[-1])
    cache = Cache(
        configuration, pool.labels.tolist(), pool.sizes, pool.capacity, classifier.in_features, seed, trace=trace
    )
    kind = SystematicSampler if configuration.systematic else SpiderSampler
    sampler = kind(samples, seed=seed, coverage=configuration.coverage)
    sampler.bind(cast(Client, cache), "train")
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.02)
    steps = epochs * -(-samples // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps)
    part = replace(
        pool.held_out,
        images=pool.held_out.images[::EVALUATED_SHARE],
        labels=pool.held_out.labels[::EVALUATED_SHARE],
    )

    def step(wanted: list[int], served: list[int]) -> None:
        given = torch.tensor(served)
        images, labels = pool.images[given], pool.labels[given]
        flipped = torch.rand(len(images)) < 0.5
        images = torch.where(flipped[:, None, None, None], images.flip(3), images)
        optimizer.zero_grad()
        embeddings = features(images)
        losses = nn.functional.cross_entropy(classifier(embeddings), labels, reduction="none")
        weights = sampler.weights(wanted, configuration.weight_clip) if configuration.weight_clip else 1.0
        (losses * weights).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        cache.learn(given.numpy(), embeddings.detach().half().numpy(), losses.detach().numpy())
        stepped()

    done: list[Epoch] = []
    lists: list[list[int]] = []
    for number in range(1, epochs + 1):
        model.train()
        drawn = list(sampler)
        trained_on: set[int] = set()
        ahead: deque[tuple[list[int], list[int]]] = deque()
        for first in range(0, len(drawn), BATCH):
            wanted = drawn[first : first + BATCH]
            ahead.append((wanted, [cache.read(sample) for sample in wanted]))
            trained_on.update(ahead[-1][1])
            if len(ahead) > AHEAD:
                step(*ahead.popleft())
        while ahead:
            step(*ahead.popleft())
        lists.append(drawn)
        top1 = evaluate(model, part)
        counts = cache.counts
        done.append(
            Epoch(
                hit_ratio=counts.hits / counts.opens,
                origin_bytes_per_sample=counts.origin_bytes / counts.opens,
                drawn_share=len(set(drawn)) / samples,
                served_share=len(trained_on) / samples,
                redirected_share=counts.redirects / counts.opens,
                ratio=cache.ratio,
                top1=top1,
            )
        )
        cache.epoch_end(top1, number / epochs)
    return Run(
        configuration=name,
        seed=seed,
        epochs=done,
        top1=evaluate(model, pool.held_out),
        list_origin=list_origin(lists, pool.sizes, pool.capacity),
        graph=cache.graph(),
        seconds=time.monotonic() - began,
    )


# -- the same list through other caches

LIST_POLICIES = {"LRU": "lru", "MinIO": "minio", "MIN": "belady"}
MIN_BY_EPOCH = "MIN by epoch"
LIST_CACHES = (*LIST_POLICIES, MIN_BY_EPOCH)


def list_origin(lists: list[list[int]], sizes: list[int], capacity: int) -> dict[str, list[float]]:
    """Origin bytes per sample that each of LIST_CACHES fetches for these epochs, by epoch."""
    accesses = accesses_of([sample for drawn in lists for sample in drawn], sizes)
    found = {}
    for name, policy in LIST_POLICIES.items():
        result = replay(Engine(policy_for(POLICIES[policy], accesses), capacity), accesses, len(lists[0]))
        found[name] = (result.origin_bytes / result.opens).tolist()
    found[MIN_BY_EPOCH] = [result.origin_bytes_per_sample for result in min_by_epoch(lists, sizes, capacity)]
    return found


def min_by_epoch(lists: list[list[int]], sizes: list[int], capacity: int) -> Iterator[Replay]:
    """What a MIN serves that learns each epoch's list when it begins; the cache goes on from epoch to epoch."""
    engine: Engine | None = None
    for drawn in lists:
        accesses = accesses_of(drawn, sizes)
        policy = policy_for(POLICIES["belady"], accesses)
        if engine is None:
            engine = Engine(policy, capacity)
        else:
            engine.change_policy(policy)
        yield replay(engine, accesses, len(drawn))


def accesses_of(samples: list[int], sizes: list[int]) -> Accesses:
    return Accesses.of(samples, [sizes[sample] for sample in samples])


# -- what it shows


@dataclass(frozen=True)
class Row:
    """One configuration against uniform sampling over an LRU, seed by seed."""

    name: str
    runs: list[Run]
    origin: list[float]
    """Of its own cache, in times of LRU and uniform sampling."""
    lists: dict[str, list[float]]
    """Of each of LIST_CACHES, likewise."""
    gained: list[float]
    """Top-1 less that of uniform sampling."""


def rows_of(runs: list[Run]) -> list[Row]:
    baseline = {run.seed: run for run in runs if run.configuration == BASELINE}
    rows = []
    for name in CONFIGURATIONS:
        ran = [run for run in runs if run.configuration == name and run.seed in baseline]
        if not ran:
            continue
        against = [baseline[run.seed] for run in ran]
        bases = [base.list_later("LRU") for base in against]
        rows.append(
            Row(
                name,
                ran,
                [run.later("origin_bytes_per_sample") / base for run, base in zip(ran, bases, strict=True)],
                {
                    cache: [run.list_later(cache) / base for run, base in zip(ran, bases, strict=True)]
                    for cache in LIST_CACHES
                },
                [run.top1 - base.top1 for run, base in zip(ran, against, strict=True)],
            )
        )
    return rows


def spread(values: Sequence[float], form: str, factor: float = 1.0) -> str:
    """Mean and standard deviation over seeds."""
    text = format(statistics.fmean(values) * factor, form)
    return text if len(values) < 2 else f"{text} ± {format(statistics.stdev(values) * factor, form.removeprefix('+'))}"


def show(rows: list[Row], console: Console) -> None:
    table = plain_table("What was read and trained on")
    for heading in ("", "seeds", "hits %", "redirected %", "drawn %", "trained on %", "top-1 %", "- uniform"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            str(len(row.runs)),
            *(
                spread([run.later(field) for run in row.runs], ".1f", 100)
                for field in ("hit_ratio", "redirected_share", "drawn_share", "served_share")
            ),
            spread([run.top1 for run in row.runs], ".1f", 100),
            spread(row.gained, "+.1f", 100),
        )
    console.print(table)
    table = plain_table("Origin bytes per sample, in times of LRU's with uniform sampling; others on the same list")
    for heading in ("", "its cache", *LIST_CACHES, "reached by"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            spread(row.origin, ".2f"),
            *(spread(row.lists[cache], ".2f") for cache in LIST_CACHES),
            reached(row),
        )
    console.print(table)
    console.print(
        f"reached: top-1 at most {100 * MOST_TOP1_LOSS} points below uniform's, and at most {MOST_ORIGIN} x the bytes",
        highlight=False,
    )


def reached(row: Row) -> str:
    """By which cache both targets are met, by the means."""
    if statistics.fmean(row.gained) < -MOST_TOP1_LOSS:
        return ""
    caches = {"its cache": row.origin, MIN_BY_EPOCH: row.lists[MIN_BY_EPOCH]}
    return ", ".join(name for name, times in caches.items() if statistics.fmean(times) <= MOST_ORIGIN)


def print_run(run: Run, console: Console) -> None:
    last = run.epochs[-1]
    console.print(
        f"seed {run.seed}  {run.configuration:13} top-1 {run.top1:5.1%}  last epoch: hits {last.hit_ratio:5.1%}  "
        f"origin {last.origin_bytes_per_sample:4.0f} B  MIN by epoch {run.list_origin[MIN_BY_EPOCH][-1]:4.0f} B  "
        f"drawn {last.drawn_share:4.0%}  trained on {last.served_share:4.0%}  redirected {last.redirected_share:5.1%}  "
        f"ratio {last.ratio:.2f}  ({run.seconds:.0f} s)",
        highlight=False,
        soft_wrap=True,
    )


def plot(rows: list[Row], path: Path) -> None:
    """What each configuration costs and saves: below is cheaper, right is better."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 6), layout="constrained")
    for colour, row in enumerate(rows):
        across = 100 * np.array(row.gained)
        for times, marker in ((row.origin, "o"), (row.lists[MIN_BY_EPOCH], "x")):
            up = np.array(times)
            axis.errorbar(
                across.mean(),
                up.mean(),
                xerr=across.std(ddof=1) if len(across) > 1 else None,
                marker=marker,
                color=pyplot.cm.tab20(colour % 20),
                label=row.name if marker == "o" else None,
                elinewidth=0.6,
            )
    axis.axvline(-100 * MOST_TOP1_LOSS, color="grey", linewidth=0.8, linestyle="--")
    axis.axhline(MOST_ORIGIN, color="grey", linewidth=0.8, linestyle="--")
    axis.set(
        xlabel="top-1 less that of uniform sampling, points (bars: standard deviation over seeds)",
        ylabel="origin bytes per sample, in times of LRU's with uniform sampling",
        title=f"o: its own cache   x: {MIN_BY_EPOCH} on the same list   dashed: the targets",
    )
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# -- the program


def decode(data: Data) -> Pool:
    """Read and decode every training image once."""
    images = Images(data.root, data.training)
    return Pool(
        images=torch.stack([images[number][0] for number in range(len(images))]),
        labels=torch.tensor([label for _, label in data.training]),
        sizes=[(data.root / path).stat().st_size for path, _ in data.training],
        held_out=data,
    )


def result_of(extent: Extent, runs: list[Run]) -> dict[str, Any]:
    return {
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        },
        "extent": identity(extent),
        "configurations": {run.configuration: asdict(CONFIGURATIONS[run.configuration]) for run in runs},
        "runs": [asdict(run) for run in runs],
    }


def identity(extent: Extent) -> dict[str, Any]:
    """What runs must have in common to stand in one table."""
    common = {"batch": BATCH, "ahead": AHEAD, "cached_share": CACHED_SHARE, "learning_rate": LEARNING_RATE}
    return asdict(extent) | {"seeds": 0} | common


def runs_in(path: Path, extent: Extent) -> list[Run]:
    """The runs of an earlier measurement that this one goes on with; raises RuntimeError if it was another one."""
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    if result["extent"] != identity(extent):
        raise RuntimeError(f"{path} is of a measurement of another extent: {result['extent']}")
    runs = [Run(**run | {"epochs": [Epoch(**epoch) for epoch in run["epochs"]]}) for run in result["runs"]]
    for name, saved in result["configurations"].items():
        if CONFIGURATIONS.get(name) != Configuration(**saved | {"ratio": tuple(saved["ratio"])}):
            raise RuntimeError(f"{path} is of another configuration by the name of {name}")
    return runs


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    torch.set_num_threads(1)
    runs = [] if arguments.json is None else runs_in(arguments.json, extent)
    done = {(run.seed, run.configuration) for run in runs}
    pool = decode(find_data(arguments.data, extent))
    console.print(
        f"{extent.training:,} training images ({sum(pool.sizes) / 1e6:.1f} MB), {extent.held_out:,} held out, "
        f"{extent.epochs} epochs; cache {CACHED_SHARE:.0%}; {len(runs)} runs are there already",
        highlight=False,
    )
    try:
        with Progress(console=console, transient=True) as progress:
            for seed, name in itertools.product(range(1, extent.seeds + 1), arguments.configs):
                if (seed, name) in done:
                    continue
                task = progress.add_task(f"{name}, seed {seed}", total=extent.epochs * -(-extent.training // BATCH))
                run = train(pool, CONFIGURATIONS[name], name, seed, extent.epochs, lambda: progress.advance(task))  # noqa: B023
                progress.remove_task(task)
                runs.append(run)
                print_run(run, console)
                if arguments.json is not None:
                    save(arguments.json, result_of(extent, runs))
    finally:
        # A measurement that is broken off shows what it has.
        rows = rows_of(runs)
        if rows:
            console.print("\nmean ± deviation over seeds; of later epochs, without the first; top-1 after the last")
            show(rows, console)
            if arguments.plot is not None:
                plot(rows, arguments.plot)


def save(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    unfinished.replace(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="DIR/train/CLASS/NAME, DIR/test/...")
    parser.add_argument("--quick", action="store_true", help="few images, epochs and configurations, one seed")
    for name, field in (("epochs", "epochs"), ("train-samples", "training"), ("test-samples", "held_out")):
        parser.add_argument(f"--{name}", type=int, dest=field, metavar="N", help=f"default {getattr(FULL, field)}")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"default {FULL.seeds}")
    parser.add_argument("--configs", metavar="A,B", help=f"which to run, of {','.join(CONFIGURATIONS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there, after each run")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture there")
    arguments = parser.parse_args()
    default = QUICK_CONFIGURATIONS if arguments.quick else CONFIGURATIONS
    arguments.configs = arguments.configs.split(",") if arguments.configs else list(default)
    if unknown := set(arguments.configs) - set(CONFIGURATIONS):
        parser.error(f"no such configuration: {', '.join(sorted(unknown))}; choose from {','.join(CONFIGURATIONS)}")
    extent = asdict(QUICK if arguments.quick else FULL)
    extent |= {field: given for field in extent if (given := getattr(arguments, field)) is not None}
    if extent["epochs"] < 2 or extent["seeds"] < 1 or extent["training"] < BATCH:
        parser.error(f"at least 2 epochs (the first fills the cache), 1 seed and {BATCH} training images")
    arguments.extent = Extent(**extent)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    unwind_on_signals()
    # Its tables are wider than most terminals.
    console = Console(width=max(TABLE_WIDTH, shutil.get_terminal_size().columns))
    try:
        measure(arguments, console)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except (OSError, RuntimeError) as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
