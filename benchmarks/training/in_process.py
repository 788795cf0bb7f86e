"""The training of benchmarks/training/train.py without its mount, which the other benchmarks that train use.

Images are decoded once into memory. The engine, the policy, the scorer and the sampler are those of a mount, and they
are called in the order in which the daemon calls them. A batch feeds the embeddings of the samples that were served.
Only time is missing: no one waits, a substitute is known at once, and bytes that were just fetched count as still in
landing. Reads are AHEAD batches ahead of the training, as those of two loader workers are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.common.command import Extent
from benchmarks.common.lists import list_origin
from benchmarks.training.systems_report import Epoch
from benchmarks.training.training import (
    CACHED_SHARE,
    EVALUATED,
    SMALL,
    Data,
    Images,
    Recipe,
    Steps,
    evaluate,
    find_data,
    halved,
    sampler_named,
)
from spiderfs.core.engine import Engine
from spiderfs.core.feed import ElasticOptions, PolicyFeed, PolicyFeedOptions
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import MAX_NEIGHBOURS, MAX_SUBSTITUTIONS, Hub, HubLimits, Key, Policy
from spiderfs.policies import POLICIES
from spiderfs.policies.spider import Spider
from spiderfs.scorer import SCORINGS
from spiderfs.scorer.scorer import Scorer
from spiderfs.scorer.scoring import Calibration, ScorerOptions, Scoring
from trainer_hook.connection.client import HookClient

JOB, JOB_DATASET = "training", "1"
# Two loader workers read two batches ahead each.
AHEAD = 4
# So many held-out images are evaluated after each epoch; after the last epoch all of them are.
EVALUATED_SHARE = 5


@dataclass(frozen=True)
class Configuration:
    """How a training is done, and with which cache.

    The defaults are SpiderCache as its paper has it, but with the product's limits on hubs and its k.
    """

    scores: str | None = "graph"
    """The scoring, by which the sampler draws and the cache keeps samples; None draws uniformly."""
    policy: str = "spider"
    """The policy of the cache if there are scores."""
    unscored_policy: str = "lru"
    """The policy of the cache if there are none."""
    planned: bool = False
    """Whether the engine gets a plan of each epoch: of the first when it begins, of others when they are drawn."""
    oversampling: int = 1
    """A batch is chosen from so many times as many samples that the epoch still has to read, cached ones first (Quiver,
    Kumar and Sivathanu, FAST 2020)."""
    sampler: str = "spider"
    """The sampler, by its name for `sampler_named`."""
    cached_share: float = CACHED_SHARE
    """The capacity of the cache, as a share of the bytes of all samples."""
    ratio: tuple[float, float] = (0.9, 0.8)
    """The share of the importance section at the beginning and at the end; 1 leaves no room for hubs."""
    stand_in_share: float = 1.0
    """The share of misses that get their substitute, if there is one; less than 1 acts as `substitute_when=late`
    does."""
    max_stand_ins: int | None = MAX_SUBSTITUTIONS
    """How often a hub is a substitute per epoch; None is no limit."""
    max_neighbours: int | None = MAX_NEIGHBOURS
    """For how many samples a hub may be the substitute; None is no limit."""
    coverage: float = 0.0
    """The share of the draws that are uniform."""
    weight_clip: float | None = None
    """Losses are multiplied by 1/(N q), but at most by this; None multiplies them by 1."""
    settled: float = 1.0
    """The share of an epoch after which the next epoch is drawn by the scores of that moment; 1 means after its end.
    The sampler's own default is a quarter, so that a mount gets the plan in time."""
    neighbours: int = ScorerOptions().neighbours
    """k: the scorer counts neighbours among so many nearest samples."""
    radius: float | Calibration = ScorerOptions().radius
    """The radius, or how the scorer calibrates it."""
    radius_share: float = ScorerOptions().radius_share
    """For "class": the share of a class that are neighbours."""
    embeddings: Literal["unit", "raw"] = "unit"
    """Whether the scorer compares embeddings of length 1, or as the network makes them, all their numbers."""


@dataclass(frozen=True)
class Pool:
    """The decoded images, and the sizes of their files."""

    images: Tensor
    labels: Tensor
    sizes: list[int]
    held_out: Data

    def capacity(self, cached_share: float) -> int:
        return int(sum(self.sizes) * cached_share)


def pool_in(directory: Path, extent: Extent) -> Pool:
    """The images of a directory, each training image read and decoded once."""
    data = find_data(directory, extent)
    images = Images(data.root, data.training)
    return Pool(
        images=torch.stack([images[number][0] for number in range(len(images))]),
        labels=torch.tensor([label for _, label in data.training]),
        sizes=[(data.root / path).stat().st_size for path, _ in data.training],
        held_out=data,
    )


@dataclass(frozen=True)
class Run:
    configuration: str
    seed: int
    epochs: list[Epoch]
    top1: float
    """The accuracy on all held-out images after the last epoch."""
    list_origin: dict[str, list[float]]
    """The origin bytes per sample in each epoch that each cache of LIST_CACHES fetches for the sampler's draws."""
    graph: dict[str, float]
    """The scorer's statistics at the end."""
    seconds: float


# -- what decides


@dataclass
class Counts:
    opens: int = 0
    hits: int = 0
    redirects: int = 0
    origin_bytes: int = 0


class Cache:
    """Does what a mount and its daemon do with one training's reads and batches; a sample's number is its key."""

    follows_plans = True

    def __init__(
        self,
        configuration: Configuration,
        labels: Sequence[int],
        sizes: list[int],
        capacity: int,
        dimension: int,
        seed: int,
        epochs: int,
    ) -> None:
        """`epochs` is how many the training will have."""
        self.configuration = configuration
        self._sizes = sizes
        self._rng = np.random.default_rng([seed, 1])
        start, end = configuration.ratio
        policy: Policy = POLICIES[configuration.policy if configuration.scores else configuration.unscored_policy]()
        if isinstance(policy, Spider):
            policy = Spider(start, HubLimits(configuration.max_stand_ins, configuration.max_neighbours))
        self.engine = Engine(policy, capacity)
        self._landing: set[Key] = set()
        """The samples of the batch that is being learned."""
        options = PolicyFeedOptions(ElasticOptions(start=start, end=end))
        self._feed = PolicyFeed(self.engine, self._size_of, options)
        self._index_of: dict[Key, int] = {sample: sample for sample in range(len(sizes))}
        self.scorer: Scoring | None = None
        self._epochs_done = self._accesses = self._epoch = 0
        self.counts = Counts()
        if configuration.scores:
            settings = ScorerOptions(
                neighbours=configuration.neighbours,
                radius=configuration.radius,
                radius_share=configuration.radius_share,
                embeddings=configuration.embeddings,
            )
            self.scorer = SCORINGS[configuration.scores](labels, dimension, settings)
            self._feed.begin_job(JOB, epochs)
            self._feed.begin(JOB_DATASET, JOB, dict(enumerate(labels)))

    def _size_of(self, sample: Key) -> int | None:
        assert isinstance(sample, int)
        return self._sizes[sample] if sample in self.engine.members or sample in self._landing else None

    # -- as the client of a SpiderSampler

    def scores(self, name: str, timeout_s: float) -> NDArray[np.float32] | None:
        return self.scorer.scores.copy() if self.scorer is not None and self._epochs_done else None

    def cached(self, name: str, timeout_s: float) -> NDArray[np.bool_]:
        return np.array([sample in self.engine.members for sample in range(len(self._sizes))])

    def warm_up(self, name: str, active: bool) -> None:
        self._feed.warm_up(JOB_DATASET, active)

    def pin(self, name: str, indices: NDArray[np.int64], timeout_s: float) -> int:
        for _ in self._feed.pin(JOB_DATASET, indices.tolist()):
            pass
        return len(indices)

    # -- as the mount

    def plan(self, number: int, order: Sequence[int], begun: bool = True) -> None:
        """Give the engine the plan of an epoch that begins or, if `begun` is False, of the next epoch."""
        if self.configuration.planned:
            indices = np.array(order, np.uint32)
            epoch = PlannedEpoch(number, range(len(self._sizes)), self._index_of, indices)
            self.engine.plan(JOB, JOB_DATASET, epoch, float(self._accesses), begun)
            if begun:
                self._epoch = number

    def progressed(self, dispatched: int, taken: int) -> None:
        """Pass the engine how many samples of the current epoch are about to be read, and how many were read before."""
        if self.configuration.planned:
            self.engine.progressed(JOB, JOB_DATASET, self._epoch, dispatched, taken, float(self._accesses))

    def read(self, wanted: int) -> int:
        """Read a sample; returns the sample that is served, which may be a substitute."""
        self._accesses += 1
        self.counts.opens += 1
        size = self._sizes[wanted]
        if self.configuration.planned:
            self.engine.wanted(JOB, wanted, float(self._accesses))
        hit = wanted in self.engine.members
        given = wanted if hit else self._given(wanted)
        if given != wanted:
            self.counts.redirects += 1
        if hit or given != wanted:
            self.counts.hits += 1
        else:
            self.counts.origin_bytes += size
        if self.scorer is not None:
            self._feed.served(JOB_DATASET, wanted, given)
        self.engine.opened(given, self._sizes[given])
        return given

    def _given(self, wanted: int) -> int:
        """The sample that a reader gets for this one, which is not cached."""
        if self.scorer is None or self._rng.random() >= self.configuration.stand_in_share:
            return wanted
        found = self._feed.substitute(JOB_DATASET, wanted)
        given = wanted if found is None else found
        assert isinstance(given, int)
        return given

    # -- as the daemon

    def learn(self, served: NDArray[np.int64], embeddings: NDArray[np.float16], losses: NDArray[np.float32]) -> None:
        """Learn from a batch: from the samples that were trained on, not from those that were asked for."""
        if self.scorer is None:
            return
        scored = self.scorer.batch(served, embeddings, losses)
        self._feed.scored(JOB_DATASET, scored.ids.tolist(), scored.scores.tolist())
        hub = next((hub for hub in scored.hubs() if not self._feed.is_hub(JOB_DATASET, hub.id)), None)
        if hub is not None:
            self._landing = set(served.tolist())
            self._feed.hub_found(Hub(hub.id, JOB_DATASET, hub.neighbours.tolist(), hub.distances.tolist()))
            self._landing.clear()

    def epoch_end(self, accuracy: float) -> None:
        self._epochs_done += 1
        self.counts = Counts()
        if self.scorer is None:
            return
        self.scorer.new_epoch()
        # Epochs are counted from 0, as the hook counts them.
        self._feed.epoch_ended(JOB, self._epochs_done - 1, {JOB_DATASET: self.scorer.sigma}, accuracy)

    @property
    def ratio(self) -> float:
        return self._feed.status().ratio or 0.0

    @property
    def beta(self) -> int:
        """Of equation 5: 1 once sigma has fallen."""
        return next((job.beta for job in self._feed.status().jobs if job.job_id == JOB), 0)

    def graph(self) -> dict[str, float]:
        return self.scorer.statistics() if isinstance(self.scorer, Scorer) else {}


# -- training


class Training:
    """One training: its model, sampler and cache, used in the order in which a training through a mount uses them."""

    def __init__(
        self,
        pool: Pool,
        configuration: Configuration,
        seed: int,
        epochs: int,
        recipe: Recipe = SMALL,
    ) -> None:
        by_scores = {"coverage": configuration.coverage, "settled": configuration.settled}
        torch.manual_seed(seed)
        self.pool = pool
        self.recipe = recipe
        self._configuration = configuration
        self._epochs = epochs
        self._samples = len(pool.sizes)
        model = recipe.network(pool.held_out.classes)
        self.model = model
        self._features, self._classifier = model[:-1], cast(nn.Linear, model[-1])
        self.capacity = pool.capacity(configuration.cached_share)
        self._embedded = halved if configuration.embeddings == "raw" else recipe.embedded
        width = self._embedded(torch.zeros(1, self._classifier.in_features)).shape[1]
        labels = pool.labels.tolist()
        self.cache = Cache(configuration, labels, pool.sizes, self.capacity, width, seed, epochs)
        self.sampler = sampler_named(configuration.sampler, self._samples, seed, epochs, **by_scores)
        self.sampler.bind(cast(HookClient, self.cache), "train")
        self.sampler.offer(self.evaluated)
        self.steps = Steps(model, epochs, self._samples, recipe.batch, recipe.optimizer, recipe.schedule)
        self._part = replace(
            pool.held_out,
            images=pool.held_out.images[::EVALUATED_SHARE],
            labels=pool.held_out.labels[::EVALUATED_SHARE],
        )
        self.rng = np.random.default_rng([seed, 2])

    def epoch(self, number: int) -> tuple[list[int], Epoch]:
        """Train for an epoch; returns the samples in the order in which they were read, and the epoch's figures."""
        self.model.train()
        sampler, cache, batch = self.sampler, self.cache, self.recipe.batch
        drawn = list(sampler)
        cache.plan(number, drawn)
        read: list[int] = []
        trained_on: set[int] = set()
        ahead: deque[tuple[list[int], list[int]]] = deque()
        settling = int(sampler.settled * len(drawn)) // batch * batch
        batches = -(-len(drawn) // batch)
        trained = 0

        def train_one() -> None:
            nonlocal trained
            self._step(*ahead.popleft())
            trained += 1
            self.steps.taken(number - 1, trained, batches)

        for wanted in in_batches(drawn, cache, batch, self._configuration.oversampling, self.rng):
            if len(read) == settling and sampler.settled < 1:
                following = sampler.draw_ahead()
                if following is not None:
                    cache.plan(number + 1, following, begun=False)
            cache.progressed(len(read) + len(wanted), len(read))
            read += wanted
            ahead.append((wanted, [cache.read(sample) for sample in wanted]))
            trained_on.update(ahead[-1][1])
            if len(ahead) > AHEAD:
                train_one()
        while ahead:
            train_one()
        figures = self._figures(len(set(drawn)), len(trained_on))
        cache.epoch_end(figures.top1)
        figures = replace(figures, beta=cache.beta)
        sampler.epoch_end(figures.top1)
        return read, figures

    def _figures(self, drawn: int, trained_on: int) -> Epoch:
        counts, graph = self.cache.counts, self.cache.graph()
        return Epoch(
            hit_ratio=counts.hits / counts.opens,
            origin_bytes_per_sample=counts.origin_bytes / counts.opens,
            drawn_share=drawn / self._samples,
            served_share=trained_on / self._samples,
            redirected_share=counts.redirects / counts.opens,
            ratio=self.cache.ratio,
            top1=self.top1(self._part),
            reads_share=counts.opens / self._samples,
            sigma=graph.get("sigma", 0.0),
            radius=graph.get("radius", 0.0),
            mean_same=graph.get("mean_same", 0.0),
        )

    def top1(self, held_out: Data) -> float:
        """The accuracy on these held-out images."""
        with self.recipe.precision():
            return evaluate(self.model, held_out, self.recipe.prepared)

    def evaluated(self, samples: NDArray[np.int64]) -> NDArray[np.float32]:
        """Evaluate samples as the hook does: they are read as all others, and their losses are learned."""
        cache = self.cache
        opens, hits, redirects = cache.counts.opens, cache.counts.hits, cache.counts.redirects
        served = [cache.read(sample) for sample in samples.tolist()]
        cache.counts.opens, cache.counts.hits, cache.counts.redirects = opens, hits, redirects
        self.model.eval()
        parts = [served[first : first + EVALUATED] for first in range(0, len(served), EVALUATED)]
        with torch.no_grad():
            found: NDArray[np.float32] = torch.cat([self._learned(part) for part in parts]).cpu().numpy()
        self.model.train()
        return found

    def _learned(self, served: list[int]) -> Tensor:
        """The losses of these samples by the model as it is, which the cache learns too."""
        embeddings, losses = self._forward(served, self.recipe.prepared)
        self._learn(served, embeddings, losses)
        return losses

    def _forward(self, served: list[int], prepared: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The classifier's input for each of these samples, and the loss."""
        chosen = torch.tensor(served, device=self.pool.images.device)
        with self.recipe.precision():
            embeddings = self._features(prepared(self.pool.images[chosen]))
            output = self._classifier(embeddings)
        return embeddings, nn.functional.cross_entropy(output.float(), self.pool.labels[chosen], reduction="none")

    def _learn(self, served: list[int], embeddings: Tensor, losses: Tensor) -> None:
        sent = self._embedded(embeddings.detach()).cpu().numpy()
        self.cache.learn(np.array(served), sent, losses.detach().cpu().numpy())

    def _step(self, wanted: list[int], served: list[int]) -> None:
        self.steps.optimizer.zero_grad()
        embeddings, losses = self._forward(served, self.recipe.augmented)
        clip = self._configuration.weight_clip
        weights = self.sampler.weights(wanted, clip).to(losses.device) if clip else 1.0
        (losses * weights).mean().backward()  # type: ignore[no-untyped-call]
        self.steps.optimizer.step()
        self._learn(served, embeddings, losses)
        self.sampler.trained(np.array(wanted, np.uint32), losses.detach().cpu().numpy())


def train(
    pool: Pool,
    configuration: Configuration,
    name: str,
    seed: int,
    epochs: int,
) -> Run:
    """Train once; all runs of a seed begin with the same weights and, without scores, make the same draws."""
    began = time.monotonic()
    training = Training(pool, configuration, seed, epochs)
    done = [training.epoch(number) for number in range(1, epochs + 1)]
    return Run(
        configuration=name,
        seed=seed,
        epochs=[figures for _, figures in done],
        top1=training.top1(pool.held_out),
        list_origin=list_origin([read for read, _ in done], pool.sizes, training.capacity),
        graph=training.cache.graph(),
        seconds=time.monotonic() - began,
    )


def in_batches(
    drawn: list[int], cache: Cache, batch: int, oversampling: int, rng: np.random.Generator
) -> Iterator[list[int]]:
    """The draws of an epoch batch by batch; with oversampling, a batch is chosen when it is asked for."""
    left = np.array(drawn)
    if oversampling == 1:
        yield from (drawn[first : first + batch] for first in range(0, len(drawn), batch))
        return
    while len(left):
        candidates = rng.choice(len(left), min(oversampling * batch, len(left)), replace=False)
        missing = np.array([sample not in cache.engine.members for sample in left[candidates].tolist()])
        # The sort is stable, so that cached samples and others each keep their random order.
        taken = candidates[np.argsort(missing, kind="stable")[:batch]]
        yield left[taken].tolist()
        left = np.delete(left, taken)
