"""Turns the batches of trainers into scores and hubs, and tells the policy of them.

The way of a batch:

1. For each sample that the batch names, find the sample whose bytes the trainer got (`core/served_samples.py`).
   Otherwise the embedding of a stand-in would be filed under the sample that it stood in for.
2. Choose the rows that there is time for.
3. Score these rows in a thread.
4. Tell the engine of the scores and the policy of the hub, and have the engine place the hub.

One thread at a time uses the scorings of all lists. So each other use of a scoring (to describe it, to save it, to end
an epoch) waits until the batch is scored. Everything but the scorings belongs to the manager's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import trio

from spiderfs.core.events import Access
from spiderfs.core.hints import Hub
from spiderfs.core.policy import Key
from spiderfs.core.served_samples import ServedSamples
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.dataset import Dataset, delete_older_scores
from spiderfs.daemon.training.lists_in_memory import ListsInMemory
from spiderfs.metrics import Counters
from spiderfs.options.model import Options
from spiderfs.protocol import Batch
from spiderfs.scorer.scorer import Scorer
from spiderfs.scorer.scoring import BatchScores, ScorerOptions, Scoring
from spiderfs.store.environment import exit_if_corrupt
from spiderfs.trace.format import TraceWriter


class _Rows(NamedTuple):
    """The rows of some batches that are scored: sample `places[i]` of the list has `embeddings[i]` and `losses[i]`."""

    places: npt.NDArray[np.int64]
    embeddings: npt.NDArray[np.float32]
    losses: npt.NDArray[np.float32] | None


class BatchScoring:
    """Trainers are named by their numbers; the scores of a list lie in `scores_directory`, below its digest."""

    def __init__(
        self,
        cache: CacheControl,
        lists: ListsInMemory,
        counters: Counters,
        scores_directory: Path,
        options: Options,
        trace: Callable[[], TraceWriter | None],
    ) -> None:
        self._cache = cache
        self._lists = lists
        self._counters = counters
        self._scores_directory = scores_directory
        self._options = ScorerOptions(radius=options.radius)
        self._trace = trace
        self._trace_embeddings = options.trace_embeddings
        self._served_samples = ServedSamples()
        self._one_at_a_time = trio.CapacityLimiter(1)

    def of(self, dataset: Dataset) -> Scoring | None:
        """The scoring of a list that the present policy goes by; None until it has something to learn from."""
        return dataset.scorings.get(self._cache.engine.policy.scoring)

    # -- what trainers read

    def note(self, accesses: Iterable[Access]) -> None:
        """Remember which sample's bytes trainers got, until the batches with these reads arrive."""
        for access in accesses:
            if access.trainer:
                self._served_samples.note(access.trainer, access.wanted, access.inode)

    def forget_reads(self, trainer: int) -> None:
        """Forget the reads of a trainer that begins an epoch, or leaves: no batch comes for them any more."""
        self._served_samples.forget(trainer)

    # -- batches

    async def learn(self, trainer: int, dataset: Dataset, batches: Sequence[Batch]) -> None:
        """Score the rows of some batches that are alike in shape: as many rows as the largest of them has."""
        rows = self._rows(trainer, dataset, batches)
        if rows is None:
            return
        name = self._cache.engine.policy.scoring
        scored = await self._score(name, dataset, rows)
        policy, trace = self._cache.guided, self._trace()
        now = time.time()
        if trace and policy is not None:
            trace.ratio(now, policy.ratio)
        if trace and self._trace_embeddings:
            trace.batch(now, dataset.number, dataset.inodes[rows.places], rows.embeddings, rows.losses)
        # The policy may have changed meanwhile; the scores are kept for the next one that goes by them.
        if policy is not None and policy.scoring == name:
            self._tell_scores(dataset, scored, trace, now)
            self._tell_hub(dataset, scored, trace, now)

    def _rows(self, trainer: int, dataset: Dataset, batches: Sequence[Batch]) -> _Rows | None:
        """What to score of these batches; None if no row is of a sample of the list."""
        served: list[Key] = []
        for batch in batches:
            served += self._served_samples.arrived(trainer, dataset.inodes[batch.indices].tolist())
        places = np.array([dataset.place_of.get(inode, -1) for inode in served], np.int64)
        known = np.flatnonzero(places >= 0)
        if not len(known):
            return None
        rows = known[dataset.to_score(places[known], max(len(batch.indices) for batch in batches))]
        self._counters.add("hook_rows_left_out", len(known) - len(rows))
        embeddings = np.concatenate([batch.embeddings for batch in batches])[rows].astype(np.float32)
        given = [batch.losses for batch in batches if batch.losses is not None]
        losses = np.concatenate(given)[rows].astype(np.float32) if given else None
        return _Rows(places[rows], embeddings, losses)

    async def _score(self, name: str, dataset: Dataset, rows: _Rows) -> BatchScores:
        def score() -> BatchScores:
            scoring = dataset.scoring_for(name, rows.embeddings.shape[1], self._options)
            return scoring.batch(rows.places, rows.embeddings, rows.losses)

        started = time.perf_counter()
        scored = await trio.to_thread.run_sync(score, limiter=self._one_at_a_time)
        dataset.scorings_made += 1
        dataset.scoring_s += time.perf_counter() - started
        return scored

    def _tell_scores(self, dataset: Dataset, scored: BatchScores, trace: TraceWriter | None, now: float) -> None:
        for place, score in zip(scored.ids.tolist(), scored.scores.tolist(), strict=True):
            inode = int(dataset.inodes[place])
            if inode:
                self._cache.engine.scored(inode, score)
                if trace:
                    trace.score(now, inode, score)

    def _tell_hub(self, dataset: Dataset, scored: BatchScores, trace: TraceWriter | None, now: float) -> None:
        found, policy = scored.hub(), self._cache.guided
        if found is None or policy is None:
            return
        inode = int(dataset.inodes[found.id])
        hub = Hub(inode, dataset.digest, dataset.inodes[found.neighbours].tolist(), found.distances.tolist())
        policy.hub_found(hub)
        if trace:
            trace.hub(now, hub, dataset.number)
        with exit_if_corrupt():
            self._cache.place(inode)

    # -- epochs and policies

    async def new_epoch(self, datasets: Collection[Dataset]) -> list[float]:
        """Begin an epoch of these lists, for scorings and policy; returns how far the scores of each list spread."""
        sigmas = []
        for dataset in datasets:
            scoring = self.of(dataset)
            if scoring is not None:
                await trio.to_thread.run_sync(scoring.new_epoch, limiter=self._one_at_a_time)
                sigmas.append(scoring.sigma)
        if self._cache.guided is not None:
            self._cache.guided.new_epoch()
        return sigmas

    async def introduce(self, dataset: Dataset) -> None:
        """Tell the policy of a list, and of the scores of an earlier training on it, if there are any."""
        name = self._cache.engine.policy.scoring
        await trio.to_thread.run_sync(dataset.remember, name, self._options, limiter=self._one_at_a_time)
        # The policy may have changed meanwhile.
        policy, scoring = self._cache.guided, self.of(dataset)
        if policy is None:
            return
        policy.listed(dataset.digest, dataset.label_of)
        if scoring is not None:
            for inode, score in zip(dataset.keys, scoring.scores.tolist(), strict=True):
                if inode:
                    self._cache.engine.scored(inode, score)

    # -- for people and samplers

    def to_draw_by(self, dataset: Dataset) -> npt.NDArray[np.float32]:
        """One score a sample, for a sampler; empty while there are none."""
        scoring = self.of(dataset)
        return np.empty(0, np.float32) if scoring is None else scoring.to_draw_by()

    async def described(self, dataset: Dataset, sample: int) -> list[tuple[str, str]] | None:
        """What people may want to know of a list's scoring; None before anything was scored.

        If the scoring has an index, this says which share of the neighbours the index finds: it is compared with all
        samples of the list, for `sample` of them.
        """
        scoring = self.of(dataset)
        if scoring is None:
            return None

        def describe() -> list[tuple[str, str]]:
            found = scoring.described()
            if isinstance(scoring, Scorer):
                found.append(("recall", f"{scoring.recall(sample, np.random.default_rng(0)):.3f}"))
            return found

        return await trio.to_thread.run_sync(describe, limiter=self._one_at_a_time)

    # -- saving

    def save(self) -> None:
        """Write down the scores of all lists. Blocks on the disk, and must not run while a batch is scored."""
        for dataset in self._lists:
            dataset.save()
        delete_older_scores(self._scores_directory, self._lists)

    async def save_in_thread(self) -> None:
        await trio.to_thread.run_sync(self.save, limiter=self._one_at_a_time)

    async def save_list(self, dataset: Dataset) -> None:
        """Write down the scores of one list; raises OSError."""
        await trio.to_thread.run_sync(dataset.save, limiter=self._one_at_a_time)
